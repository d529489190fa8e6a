"""The vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.srt.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens, as `tokenizer.ggml.token_type` numbers them."""


def tokens_of(metadata: Mapping[str, Any], source: Path) -> list[str]:
    """The tokens in the order of their ids; ModelError if there are none."""
    return strings(metadata, "tokenizer.ggml.tokens", source)


def token_kinds(metadata: Mapping[str, Any], source: Path) -> Sequence[float]:
    """The kind of every token; all are normal if the file does not say."""
    count = len(tokens_of(metadata, source))
    kinds = numbers(metadata, "tokenizer.ggml.token_type", count, source)
    return [NORMAL] * count if kinds is None else kinds


def numbers(metadata: Mapping[str, Any], key: str, count: int, source: Path) -> list[float] | None:
    """One number for each of `count` tokens, None if the file has none; ModelError if they do not fit."""
    values = metadata.get(key)
    if values is None or (isinstance(values, (list, np.ndarray)) and not len(values)):
        return None
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(listed, list) or len(listed) != count:
        given = len(listed) if isinstance(listed, list) else repr(listed)
        raise ModelError(f"{source}: has {count} tokens but {given} entries in {key}")
    if not all(isinstance(value, (int, float)) for value in listed):
        raise ModelError(f"{source}: {key} holds what is no number")
    return listed


def strings(metadata: Mapping[str, Any], key: str, source: Path) -> list[str]:
    """A list of strings; ModelError if there is none."""
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelError(f"{source}: has no {key}, which its tokenizer needs")
    return values
