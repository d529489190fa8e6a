"""Text that goes on after other tokens, to ids: no space is put before it."""

from __future__ import annotations

from collections.abc import Callable

ANCHORS = ("\n", ".", "a", "0", "|", "é", "\u2581")
"""What a text is put behind. One that a tokenizer joins with what follows is passed over for the next."""
PROBES = ("x", "1", "é")


class Continuation:
    """Encodes text as what follows other tokens.

    A SentencePiece-like tokenizer puts a space before a text's first word (its dummy prefix). There the text
    is encoded behind an anchor, whose ids are then cut off: those of anchor + text begin with the anchor's.
    If the text clings to every anchor, which is not known of any tokenizer, it is encoded as one that begins.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._anchors = [] if _is_plain(encode) else [(text, encode(text)) for text in ANCHORS]

    def __call__(self, text: str) -> list[int]:
        for anchor, known in self._anchors:
            ids = self._encode(anchor + text)
            if ids[: len(known)] == known:
                return ids[len(known) :]
        return self._encode(text)


def _is_plain(encode: Callable[[str], list[int]]) -> bool:
    """Whether a line's first word has the ids of a text's first word."""
    return all(encode("\n" + probe) == encode("\n") + encode(probe) for probe in PROBES)
