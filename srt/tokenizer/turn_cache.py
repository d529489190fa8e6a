"""What is known of chats' beginnings: the tokens of their messages, so that only what is new is rendered."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Ids

CACHE_BYTES = 32 * 2**20
ENTRY_BYTES = 512
"""About what an entry takes beside its ids."""


class Shown(NamedTuple):
    """The template's text of all messages up to one, by which a longer one is known to begin with it."""

    size: int
    digest: bytes

    @staticmethod
    def of(text: str) -> Shown:
        return Shown(len(text), hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest())

    def begins(self, text: str) -> bool:
        return len(text) >= self.size and Shown.of(text[: self.size]) == self


class Trail:
    """The template's text of a chat as it grows from message to message. Of what begins with what was there
    before only the rest is hashed."""

    def __init__(self, shown: Shown | None) -> None:
        self._shown = shown or Shown.of("")
        self._text: str | None = None if shown else ""
        self._hash = hashlib.blake2b()

    @property
    def text(self) -> str:
        """What is there; not before `begins` has found it in another, if it was known only as Shown."""
        return self._text or ""

    def begins(self, text: str) -> bool:
        if self._text is not None:
            return text.startswith(self._text)
        if self._shown.begins(text):
            self.reach(text[: self._shown.size])
        return self._text is not None

    def reach(self, text: str) -> Shown:
        """Have `text` there now."""
        known = self._text or ""
        if not text.startswith(known):
            known, self._hash = "", hashlib.blake2b()
        self._hash.update(text[len(known) :].encode("utf-8", "surrogatepass"))
        self._text = text
        return Shown(len(text), self._hash.digest())


class Turn(NamedTuple):
    """A message's tokens; if `rewritten`, those of all messages up to it. They are None where a longer chat
    has been rewritten, and nobody has asked for this one.

    Without `shown` the template refuses to end there: the tokens are in the next turn that has some.
    """

    ids: Ids | None = b""
    rewritten: bool = False
    shown: Shown | None = None
    refusal: ErrorInfo | None = None


class TurnCache:
    """Turns by the name of a chat's beginning. Of the least recently used the longest are forgotten first."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, names: Sequence[bytes]) -> list[Turn]:
        """The turns of the longest beginning of which all are there."""
        turns: list[Turn] = []
        with self._lock:
            for name in names:
                turn = self._turns.get(name)
                if turn is None:
                    break
                turns.append(turn)
            for name in reversed(names[: len(turns)]):
                self._turns.move_to_end(name)
        return turns

    def put(self, names: Sequence[bytes], turns: Sequence[Turn]) -> None:
        """Keep the turns of a whole beginning: what is longer without what is shorter is of no use."""
        with self._lock:
            for name, turn in reversed([*zip(names, turns, strict=False)]):
                old = self._turns.get(name)
                self._bytes += _size(turn) - (0 if old is None else _size(old))
                self._turns[name] = turn
                self._turns.move_to_end(name)
            while self._bytes > self._limit:
                _, turn = self._turns.popitem(last=False)
                self._bytes -= _size(turn)


def _size(turn: Turn) -> int:
    return ENTRY_BYTES + len(turn.ids or b"")
