"""A GGUF file as a model: what it says of itself, under the keys and names of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.found import Found, sampling_defaults, token_ids
from sapwood.srt.loader.gguf_config import sizes, special
from sapwood.srt.loader.gguf_kinds import group_of
from sapwood.srt.loader.gguf_names import family_of
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.gguf_rope import rope
from sapwood.srt.loader.gguf_tokenizer import write_tokenizer
from sapwood.srt.loader.vocabulary import CONTROL

_WORDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_OUT = ".attn_output.weight"
_ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}  # fmt: skip


def describe(path: Path, cache: Path, *, tokenizer: bool) -> Found:
    """What a GGUF file says of itself; its tokenizer.json is made in `cache` on first use.

    Raises ModelError naming the key or tensor that is missing or not supported.
    """
    gguf = GgufFile(path)
    metadata = gguf.metadata
    config = config_of(gguf)  # of all that can be wrong, what helps most to know first
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    file = write_tokenizer(metadata, gguf.path, cache / "tokenizers") if tokenizer else None
    own = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return Found(
        name=path.stem,
        format="gguf",
        path=gguf.path,
        files=gguf.files,
        config=config,
        eos_ids=token_ids(*(_id(metadata, key) for key in _ENDS), *_turn_ends(metadata, template)),
        tokenizer_file=file,
        chat_template=template,
        template_vars=_template_vars(metadata),
        sampling_defaults=sampling_defaults(own),
        group=max((group_of(t.kind) for name, t in gguf.tensors.items() if name.endswith(_OUT)), default=1),
    )


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """The file's metadata under the keys of a Hugging Face config.json."""
    metadata, tensors = gguf.metadata, gguf.tensors
    family, arch = family_of(gguf), str(metadata["general.architecture"])
    if gguf.scalar(f"{arch}.expert_count"):
        raise ModelError(f"{gguf.path}: is a mixture of experts ({arch}.expert_count), not supported yet")
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{gguf.path}: has no matrix token_embd.weight")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **sizes(gguf, arch),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": _id(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _id(metadata, "tokenizer.ggml.eos_token_id"),
        **rope(gguf, arch),
        **special(gguf, arch),
    }


def _id(metadata: Mapping[str, Any], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _turn_ends(metadata: Mapping[str, Any], template: str | None) -> list[int]:
    """Control tokens with which the file's own chat template ends a turn: not every file lists them."""
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if template is None or not isinstance(tokens, list) or not isinstance(kinds, np.ndarray):
        return []
    ends = [text for text in _TURN_ENDS if text in template]
    pairs = enumerate(zip(tokens, kinds.tolist(), strict=False)) if ends else ()
    return [i for i, (text, kind) in pairs if text in ends and kind == CONTROL]


def _template_vars(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    words = {}
    for name, key in _WORDS.items():
        number = _id(metadata, key)
        if isinstance(tokens, list) and number is not None and 0 <= number < len(tokens):
            words[name] = tokens[number]
    return words
