"""Sizes and switches of a GGUF file's metadata under the keys of a Hugging Face config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_names import family_of
from sapwood.srt.loader.gguf_parts import GgufFile

GEMMA_PATTERN = 6
"""Gemma 3: of so many layers the last one sees everything, the others a window. Files need not say it."""

_GEMMA_27B_LAYERS = 62


def sizes(gguf: GgufFile, arch: str) -> dict[str, Any]:
    """The entries that every family has; ModelError names a key that is missing or no number."""

    def own(key: str, default: Any = None) -> Any:
        return number(gguf, f"{arch}.{key}", default)

    heads, hidden = own("attention.head_count"), own("embedding_length")
    head_dim = own("attention.key_length", _quotient(hidden, heads))
    rotary, value_dim = own("rope.dimension_count", head_dim), own("attention.value_length", head_dim)
    partial = rotary != head_dim and head_dim > 0 and family_of(gguf).partial_rotary
    if value_dim != head_dim or (rotary != head_dim and not partial):
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
        **({"partial_rotary_factor": rotary / head_dim} if partial else {}),
    }


def special(gguf: GgufFile, arch: str) -> dict[str, Any]:
    """The entries that only some families have: activation, sliding windows, scale of the scores."""
    entries: dict[str, Any] = {}
    if arch == "gemma3":
        entries = _gemma3(gguf)
    else:
        entries["hidden_act"] = family_of(gguf).act
    if gguf.scalar(f"{arch}.attention.sliding_window"):  # 0 means none
        entries["sliding_window"] = number(gguf, f"{arch}.attention.sliding_window")
    return entries


def number(gguf: GgufFile, key: str, default: Any = None) -> Any:
    """One number of the metadata; ModelError if it is missing, no number, or a list of one per layer."""
    value = gguf.metadata.get(key, default)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"{gguf.path}: {key} is {value!r}; one number for all layers is needed")
    return value


def _quotient(hidden: Any, heads: Any) -> Any:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    return hidden // heads


def _gemma3(gguf: GgufFile) -> dict[str, Any]:
    layers, hidden = number(gguf, "gemma3.block_count"), number(gguf, "gemma3.embedding_length")
    heads = number(gguf, "gemma3.attention.head_count")
    head_dim = number(gguf, "gemma3.attention.key_length", _quotient(hidden, heads))
    capped = [k for k in ("attn", "final") if gguf.scalar(f"gemma3.{k}_logit_softcapping")]
    return {
        "hidden_activation": family_of(gguf).act,
        "layer_types": _layer_types(gguf, layers),
        # What the scores are divided by: a file does not say it, but one model alone departs from the head's
        # size.
        "query_pre_attn_scalar": _quotient(hidden, heads) if layers == _GEMMA_27B_LAYERS else head_dim,
        **{f"{k}_logit_softcapping": number(gguf, f"gemma3.{k}_logit_softcapping") for k in capped},
    }


def _layer_types(gguf: GgufFile, layers: Any) -> list[str]:
    """Full or sliding attention, layer by layer: a list in the file, a period in it, or the usual period."""
    given = gguf.metadata.get("gemma3.attention.sliding_window_pattern", GEMMA_PATTERN)
    if not isinstance(layers, int) or not 0 < layers <= 4096:
        raise ModelError(f"{gguf.path}: gemma3.block_count is {layers!r}, not from 1 to 4096")
    if isinstance(given, np.ndarray) and len(given) == layers:
        slides = [bool(entry) for entry in given]
    elif isinstance(given, int) and given > 0:
        slides = [bool((index + 1) % given) for index in range(layers)]
    else:
        raise ModelError(
            f"{gguf.path}: gemma3.attention.sliding_window_pattern is {given!r}; a period or one entry for "
            f"each of the {layers} layers is needed"
        )
    return ["sliding_attention" if slide else "full_attention" for slide in slides]
