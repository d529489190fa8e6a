"""What has come of constraints, kept by their content: the ones asked for last, up to some bytes."""

from __future__ import annotations

import hashlib

import msgspec

from sapwood.srt.grammar.child import Outcome
from sapwood.srt.messages import Grammar
from sapwood.srt.params import Constraint

KEEP_BYTES = 64 * 2**20
_OVERHEAD = 512
"""About what an entry takes beside its text."""


def content(constraint: Constraint, field: str = "") -> bytes:
    """The same for constraints that mean the same, wherever the request had them. (What is wrong with one, or
    not enforced, is told with its field.)"""
    same = msgspec.structs.replace(constraint, field=field)
    return hashlib.sha256(msgspec.msgpack.encode(same)).digest()


class Kept:
    """A least recently used cache of outcomes, at most `limit` bytes."""

    def __init__(self, limit: int = KEEP_BYTES) -> None:
        self._limit = limit
        self._held = 0
        self._outcomes: dict[bytes, Outcome] = {}

    def find(self, constraint: Constraint) -> Outcome | None:
        for key in (content(constraint), content(constraint, constraint.field)):
            if (outcome := self._outcomes.pop(key, None)) is not None:
                self._outcomes[key] = outcome  # now the last of all
                return outcome
        return None

    def keep(self, constraint: Constraint, outcome: Outcome) -> None:
        """Only what would come out the same again: no failure that was not the constraint's."""
        if not tells_field(outcome):
            key = content(constraint)
        elif outcome.error is None or outcome.error.status == 400:
            key = content(constraint, constraint.field)
        else:
            return
        if key not in self._outcomes:
            self._outcomes[key] = outcome
            self._held += _size(outcome)
        while self._held > self._limit:
            self._held -= _size(self._outcomes.pop(next(iter(self._outcomes))))


def tells_field(outcome: Outcome) -> bool:
    """Whether an outcome names the field that the constraint was in."""
    return outcome.grammar is None or bool(outcome.grammar.warnings)


def _size(outcome: Outcome) -> int:
    grammar: Grammar | None = outcome.grammar
    texts = [outcome.error.message] if outcome.error is not None else []
    if grammar is not None:
        texts = [grammar.text, *grammar.warnings]
    return _OVERHEAD + sum(len(text) for text in texts)
