"""Ids to text, token by token: what all `push`es and `finish` return, joined, is the batch decode of the ids.

Two ways to the same promise. A byte-level tokenizer's tokens are bytes whatever stands around them, so a
table and an incremental UTF-8 decoder are enough. For all others the tokenizer itself decodes a short window
of the last tokens, and what is new in it goes out. In both, ids that the tokenizer does not know (a model's
head may be wider than its tokenizer) and skipped special tokens are nothing: they do not even break a
character.
"""

from __future__ import annotations

import contextlib
from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Tokens after which a window is cut back to its last few."""


class TextStream(Protocol):
    """One choice's output as text. Never raises, whatever the ids are."""

    def push(self, token: int) -> str:
        """The text that this token makes certain."""

    def pending(self) -> str | None:
        """What `finish` would return now; None if that takes too much to tell."""

    def finish(self) -> str:
        """What is left; bytes that never became a character are U+FFFD, as in a batch decode."""


class NoText:
    """The stream without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def pending(self) -> str | None:
        return ""

    def finish(self) -> str:
        return ""


class Pieces(dict[int, "str | bytes"]):
    """Each token's text, or its bytes where they are not whole characters; made at first use."""

    def __init__(self, raw: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._raw = raw
        self._skipped = skipped

    def __missing__(self, token: int) -> str | bytes:
        piece: str | bytes = "" if token in self._skipped else self._raw(token)
        if isinstance(piece, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        self[token] = piece
        return piece


class ByteStream:
    """Text of a byte-level tokenizer: a table lookup a token, unless characters are split between tokens."""

    __slots__ = ("_incomplete", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._incomplete = b""

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if isinstance(piece, str):
            if not self._incomplete:
                return piece
            piece = piece.encode()
        data = self._incomplete + piece
        text, used = utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return text

    def pending(self) -> str | None:
        return utf_8_decode(self._incomplete, "replace", True)[0] if self._incomplete else ""

    def finish(self) -> str:
        text, _ = utf_8_decode(self._incomplete, "replace", True)
        self._incomplete = b""
        return text


class Windows:
    """What all WindowStreams of a tokenizer share: its decode, and which tokens need care.

    `byte_tokens` are those of a byte-fallback decoder (`<0xE2>`): it turns a run of them into text as a
    whole, so that one wrong byte at the end makes U+FFFD of all. `unfinished`: decoding may end in an
    incomplete character.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        knows: Callable[[int], bool],
        skipped: frozenset[int],
        byte_tokens: frozenset[int],
        unfinished: bool,
    ) -> None:
        self.decode = decode
        self.byte_tokens = byte_tokens
        self.unfinished = unfinished
        self._knows = knows
        self._skipped = skipped
        self._visible: dict[int, bool] = {}

    def visible(self, token: int) -> bool:
        known = self._visible.get(token)
        if known is None:
            known = self._visible[token] = token not in self._skipped and self._knows(token)
        return known


class WindowStream:
    """Text of any tokenizer, by decoding its last tokens again.

       ids    [ . . . . | . . . | . ]      `_ids`: the window
                        ^ `_clean`         everything before was out, whole, at the last but one emission
       text   [ t e x t   t e x t ]        decode of the window
                          ^ `_sent`        out already

    A window is cut only at such a place, and only if what stays has text of its own, so that what a decoder
    does at the very start (strip a space, keep a `##`) is done alike in the old and in the new window.
    """

    __slots__ = ("_clean", "_ids", "_pending", "_sent", "_windows")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._ids: list[int] = []
        self._clean = 0
        self._sent = 0
        self._pending: str | None = ""

    def push(self, token: int) -> str:
        windows = self._windows
        if not windows.visible(token):
            return ""
        self._ids.append(token)
        if token in windows.byte_tokens:
            self._pending = None
            return ""
        text = windows.decode(self._ids)
        end = len(text) - (windows.unfinished and text.endswith(REPLACEMENT))
        self._pending = text[max(end, self._sent) :]
        if end <= self._sent:
            return ""
        new = text[self._sent : end]
        self._sent = end
        if end == len(text):
            self._cut()
        return new

    def _cut(self) -> None:
        if len(self._ids) >= WINDOW:
            rest = self._ids[self._clean :]
            text = self._windows.decode(rest)
            if text:
                self._ids, self._sent = rest, len(text)
        self._clean = len(self._ids)

    def pending(self) -> str | None:
        if self._pending is None and len(self._ids) <= 2 * WINDOW:
            self._pending = self._windows.decode(self._ids)[self._sent :]
        return self._pending

    def finish(self) -> str:
        text = self._windows.decode(self._ids)
        new = text[self._sent :]
        self._ids, self._clean, self._sent, self._pending = [], 0, 0, ""
        return new
