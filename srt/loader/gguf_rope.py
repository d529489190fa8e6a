"""The position encoding of a GGUF file under the keys of a Hugging Face config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_config import number
from sapwood.srt.loader.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from sapwood.srt.loader.gguf_parts import GgufFile

KINDS = ("none", "linear", "yarn", "longrope")
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def rope(gguf: GgufFile, arch: str) -> dict[str, Any]:
    """`rope_parameters` or, for Gemma 3, which has two encodings, the older keys for them.

    Raises ModelError for a kind that is not known, or a table of factors that is no F32 vector.
    """
    theta = number(gguf, f"{arch}.rope.freq_base", 10000.0)
    scaling = _scaling(gguf, arch)
    if arch != "gemma3":
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    entries = {
        "rope_theta": theta,
        "rope_local_base_freq": number(gguf, "gemma3.rope.freq_base_swa", 10000.0),
    }
    # The sliding layers' encoding is never scaled.
    return entries if scaling["rope_type"] == "default" else {**entries, "rope_scaling": scaling}


def _scaling(gguf: GgufFile, arch: str) -> dict[str, Any]:
    stem = f"{arch}.rope.scaling"
    kind = gguf.scalar(f"{stem}.type", "none")
    # Older files say a linear factor only, under another key.
    if kind == "none" and gguf.scalar(f"{arch}.rope.scale_linear"):
        return _linear(number(gguf, f"{arch}.rope.scale_linear"))
    if kind not in KINDS:
        raise ModelError(
            f"{gguf.path}: the rope scaling {kind!r} ({stem}.type) is not supported; "
            f"supported: {', '.join(KINDS)}"
        )
    if ROPE_FACTORS in gguf.tensors:
        if kind != "none":
            raise ModelError(f"{gguf.path}: has both {ROPE_FACTORS} and the rope scaling {kind!r}")
        return {"rope_type": "factors", "factors": _floats(gguf, ROPE_FACTORS)}
    if LONG_FACTORS in gguf.tensors or SHORT_FACTORS in gguf.tensors:
        return _longrope(gguf, stem)
    if kind == "linear":
        return _linear(number(gguf, f"{stem}.factor"))
    if kind == "yarn":
        return _yarn(gguf, stem)
    return {"rope_type": "default"}


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(gguf: GgufFile, stem: str) -> dict[str, Any]:
    metadata, factor = gguf.metadata, number(gguf, f"{stem}.factor")
    entries: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if f"{stem}.original_context_length" in metadata:
        entries["original_max_position_embeddings"] = number(gguf, f"{stem}.original_context_length")
    entries |= {hf: number(gguf, f"{stem}.{key}") for hf, key in _YARN.items() if f"{stem}.{key}" in metadata}
    scale = gguf.scalar(f"{stem}.attn_factor", 1.0)
    if scale != 1.0 and factor > 1:
        # The file's factor comes on top of YaRN's own; the config's replaces it.
        entries["attention_factor"] = number(gguf, f"{stem}.attn_factor") * (0.1 * math.log(factor) + 1)
    return entries


def _longrope(gguf: GgufFile, stem: str) -> dict[str, Any]:
    entries = {
        "rope_type": "longrope",
        "short_factor": _floats(gguf, SHORT_FACTORS),
        "long_factor": _floats(gguf, LONG_FACTORS),
        "original_max_position_embeddings": number(gguf, f"{stem}.original_context_length"),
    }
    if f"{stem}.attn_factor" in gguf.metadata:
        entries["attention_factor"] = number(gguf, f"{stem}.attn_factor")
    return entries


def _floats(gguf: GgufFile, name: str) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path}: has no tensor {name}")
    if tensor.kind != "f32" or len(tensor.shape) != 1:
        raise ModelError(
            f"{gguf.path}: tensor {name} must be an F32 vector, not {tensor.kind.upper()} of shape "
            f"{list(tensor.shape)}"
        )
    return [float(x) for x in gguf.raw(name).view(np.dtype("<f4"))]
