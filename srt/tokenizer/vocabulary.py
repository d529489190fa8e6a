"""The model's tokenizer as this process uses it: loading, the text of ids, the ids of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sapwood.srt.errors import ModelError
from sapwood.srt.tokenizer.detokenizer import ByteStream, Pieces, TextStream, Windows, WindowStream


def load(path: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its padding and truncation. Raises ModelError."""
    if not Path(path).is_file():
        raise ModelError(f"{path}: no such tokenizer file")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as e:  # the library raises nothing narrower
        raise ModelError(f"{path} is not a tokenizer that can be loaded: {e}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class Vocabulary:
    """Ids to text and bytes, for streams and for single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        kinds = _kinds(tokenizer.decoder)
        self.byte_level = kinds in (["ByteLevel"], ["ByteLevel", "Fuse"])
        self.kind = "byte-level" if self.byte_level else " + ".join(kinds) or "plain"
        self._byte_tokens = self._fallback_bytes() if "ByteFallback" in kinds else {}
        self._described: dict[int, tuple[str, bytes]] = {}
        self._anchor = None if self.byte_level else self._find_anchor()
        self._unfinished = "ByteLevel" in kinds
        # By the ids that are not shown: all that streams of one kind share.
        self._pieces: dict[frozenset[int], Pieces] = {}
        self._windows: dict[frozenset[int], Windows] = {}

    def stream(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> TextStream:
        """The text of a new choice; of special tokens that are skipped, those in `shown` are not."""
        hidden = self._hidden(skip_special_tokens, shown)
        if self.byte_level:
            if hidden not in self._pieces:
                self._pieces[hidden] = Pieces(self._level_bytes, hidden)
            return ByteStream(self._pieces[hidden])
        if hidden not in self._windows:
            byte_tokens = frozenset(self._byte_tokens)
            self._windows[hidden] = Windows(self._decode, self._knows, hidden, byte_tokens, self._unfinished)
        return WindowStream(self._windows[hidden])

    def _hidden(self, skip_special_tokens: bool, shown: frozenset[str]) -> frozenset[int]:
        if not skip_special_tokens:
            return frozenset()
        ids = (self._tokenizer.token_to_id(text) for text in shown)
        return self.special.difference(token for token in ids if token is not None)

    def describe(self, token: int) -> tuple[str, bytes]:
        """One token's text, with its leading space and special tokens shown, and its bytes."""
        known = self._described.get(token)
        if known is None:
            known = self._described[token] = self._describe(token)
        return known

    def _describe(self, token: int) -> tuple[str, bytes]:
        if not self._knows(token):
            return "", b""
        if self.byte_level:
            raw = self._level_bytes(token)
        elif token in self._byte_tokens:
            raw = self._byte_tokens[token]
        elif self._anchor is None:
            raw = self._decode([token]).encode()
        else:
            start = len(self._decode([self._anchor]))
            raw = self._decode([self._anchor, token])[start:].encode()
        return raw.decode(errors="replace"), raw

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _knows(self, token: int) -> bool:
        return token >= 0 and self._tokenizer.id_to_token(token) is not None

    def _level_bytes(self, token: int) -> bytes:
        """A byte-level token's bytes. An added token that is not spelt in that alphabet is its own text."""
        text = self._tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        try:
            return bytes(LEVEL_BYTES[char] for char in text)
        except KeyError:
            return text.encode()

    def _fallback_bytes(self) -> dict[int, bytes]:
        ids = {byte: self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        return {token: bytes([byte]) for byte, token in ids.items() if token is not None}

    def _find_anchor(self) -> int | None:
        """A plain word, after which another token's text shows its leading space."""
        for token in range(self.size):
            if token not in self.special and token not in self._byte_tokens and self._knows(token):
                text = self._decode([token])
                if text.isascii() and text.isalnum():
                    return token
        return None


def _kinds(decoder: Any) -> list[str]:
    """The types of a decoder's parts, in order."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _level_bytes() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for U+0100 and up (GPT-2)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


LEVEL_BYTES = _level_bytes()
