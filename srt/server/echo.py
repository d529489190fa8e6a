"""Where a prompt's tokens stand in its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

NEAR = 64
"""Bytes within which a token is looked for that is not where the one before it ended."""


def text_offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """The offset of each of a prompt's tokens in its text, in characters, never decreasing.

    A token that begins within a character has the offset of that character. One that is not in the text (a
    BOS put before it, a character that the tokenizer has normalised) has the offset of what comes next.
    """
    data = np.frombuffer(text.encode(), np.uint8)
    begins = (data & 0xC0) != 0x80
    before = np.concatenate(([0], np.cumsum(begins)))
    whole = np.append(begins, True)
    return [int(before[at]) - (not whole[at]) for at in _places(data.tobytes(), tokens)]


def _places(text: bytes, tokens: Sequence[bytes]) -> Iterator[int]:
    at = 0
    for token in tokens:
        start, end = _find(text, at, token)
        yield start
        at = end


def _find(text: bytes, at: int, token: bytes) -> tuple[int, int]:
    """Where `token` begins and ends, if what comes before `at` is taken."""
    if text.startswith(token, at):
        return at, at + len(token)
    if at == 0 and token[:1] == b" " and text.startswith(token[1:]):
        return 0, len(token) - 1  # the tokenizer has put a space in front
    found = text.find(token, at, at + len(token) + NEAR)
    return (at, at) if found < 0 else (found, found + len(token))
