"""A GGUF file as a model: its metadata as a Hugging Face config, its tensor names as Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.found import Found, token_ids
from sapwood.srt.loader.gguf import GgufFile
from sapwood.srt.loader.gguf_tokenizer import write_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""`general.architecture` → the Hugging Face name."""

ROPE_FACTORS = "rope_freqs.weight"

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WORDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def describe(path: Path, cache: Path, *, tokenizer: bool) -> Found:
    """What a GGUF file says of itself; its tokenizer.json is made in `cache` on first use.

    Raises ModelError naming the key or tensor that is missing or not supported.
    """
    gguf = GgufFile(path)
    metadata = gguf.metadata
    template = metadata.get("tokenizer.chat_template")
    file = write_tokenizer(metadata, path, cache / "tokenizers") if tokenizer else None
    return Found(
        name=path.stem,
        format="gguf",
        path=path,
        files=[path],
        config=config_of(gguf),
        eos_ids=token_ids(*(_id(metadata, key) for key in _ENDS)),
        tokenizer_file=file,
        chat_template=template if isinstance(template, str) else None,
        template_vars=_template_vars(metadata),
        sampling_defaults={},
    )


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """The file's metadata under the keys of a Hugging Face config.json."""
    metadata, tensors = gguf.metadata, gguf.tensors
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: the GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count"):
        raise ModelError(f"{gguf.path}: is a mixture of experts ({arch}.expert_count), not supported yet")
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{gguf.path}: has no matrix token_embd.weight")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        **_sizes(gguf, arch),
        "hidden_act": "silu",
        "rope_parameters": _rope(gguf, arch),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": _id(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _id(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _sizes(gguf: GgufFile, arch: str) -> dict[str, Any]:
    def own(key: str, default: Any = None) -> Any:
        value = gguf.metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, (int, float)):
            raise ModelError(f"{gguf.path}: {arch}.{key} is {value!r}; one number for all layers is needed")
        return value

    heads, hidden = own("attention.head_count"), own("embedding_length")
    head_dim = own("attention.key_length", hidden // max(heads, 1))
    rotary, value_dim = own("rope.dimension_count", head_dim), own("attention.value_length", head_dim)
    if rotary != head_dim or value_dim != head_dim:
        raise ModelError(
            f"{gguf.path}: key length {head_dim}, value length {value_dim} and rotary length {rotary} "
            "must be equal"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own("context_length"),
    }


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself if it has none."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    if name.startswith("blk.") and stem in _IN_LAYER:
        return f"model.layers.{block}.{_IN_LAYER[stem]}.{kind}"
    return _OUTSIDE.get(name, name)


def is_permuted(name: str) -> bool:
    """Whether a Llama GGUF stores the rows of this Hugging Face tensor as interleaved rotary pairs."""
    return ".q_proj." in name or ".k_proj." in name


def _rope(gguf: GgufFile, arch: str) -> dict[str, Any]:
    metadata = gguf.metadata
    theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if ROPE_FACTORS in gguf.tensors:
        tensor = gguf.tensors[ROPE_FACTORS]
        if tensor.kind != "f32":
            raise ModelError(f"{gguf.path}: tensor {ROPE_FACTORS} must be F32, not {tensor.kind.upper()}")
        return {"rope_type": "factors", "rope_theta": theta, "factors": _floats(gguf, ROPE_FACTORS)}
    if kind == "linear":
        return {
            "rope_type": "linear",
            "rope_theta": theta,
            "factor": metadata.get(f"{arch}.rope.scaling.factor"),
        }
    if kind != "none":
        raise ModelError(f"{gguf.path}: the rope scaling {kind!r} is not supported; supported: none, linear")
    return {"rope_type": "default", "rope_theta": theta}


def _floats(gguf: GgufFile, name: str) -> list[float]:
    return [float(x) for x in gguf.raw(name).view(np.dtype("<f4"))]


def _id(metadata: dict[str, Any], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _template_vars(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    words = {}
    for name, key in _WORDS.items():
        number = _id(metadata, key)
        if isinstance(tokens, list) and number is not None and 0 <= number < len(tokens):
            words[name] = tokens[number]
    return words
