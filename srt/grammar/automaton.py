"""A pattern as an automaton over characters, made as far as it is walked.

A state is the set of what may still come: parts of the pattern's tree (partial derivatives, Antimirov 1996),
so a counted repeat takes no more room than its count. `^` and `$` mean the ends of the string, wherever they
stand. Parts are numbered, equal ones once, so that states are sets of numbers.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from sapwood.srt.grammar.charset import ALL, representatives
from sapwood.srt.grammar.limits import Budget
from sapwood.srt.grammar.regex import (
    Anchor,
    Chars,
    Choice,
    Node,
    Repeat,
    Sequence,
    rebuilt,
    sets_of,
)

State = frozenset[int]
Part = tuple[int, tuple[int, ...], Any]
"""Its kind, the parts in it, and the set of a character, or the bounds of a repeat."""

_EMPTY, _CHARS, _BEGIN, _END, _REPEAT, _CHOICE, _THEN = range(7)
_NOTHING_LEFT = 0
FOUND: State = frozenset((_NOTHING_LEFT,))
"""The state after the pattern has been found: whatever comes next."""
LOST: State = frozenset()
"""The state after which it cannot be found."""


class Automaton:
    """Tells strings in which the pattern is found. Each step spends the budget by the size of its state."""

    def __init__(self, node: Node, budget: Budget) -> None:
        self.node = node
        self._budget = budget
        self._parts: list[Part] = []
        self._numbers: dict[Part, int] = {}
        self._number(_EMPTY)
        self._empties: dict[tuple[int, bool, bool], bool] = {}
        root = self._added(node)
        self._again = () if _at_beginning(node) else (root,)
        self._steps: dict[tuple[State, str, bool], State] = {}
        self.start = self._settled(frozenset((root,)), first=True)

    def step(self, state: State, char: str, first: bool) -> State:
        """The state after one more character; `first`: it is the string's first one."""
        if state == FOUND:
            return state
        key = (state, char, first)
        if key not in self._steps:
            self._budget.spend(1 + len(state) // 8)
            after = set(self._again)
            for part in state:
                after |= self._after(part, ord(char), first)
            self._steps[key] = self._settled(frozenset(after), first=False)
        return self._steps[key]

    def accepts(self, state: State, first: bool) -> bool:
        """Whether the string may end here; `first`: it is empty."""
        return state == FOUND or any(self._empty(part, first, last=True) for part in state)

    def holds(self, text: str) -> bool:
        """Whether the pattern is found in the text."""
        state = self.start
        for i, char in enumerate(text):
            state = self.step(state, char, i == 0)
            if state == FOUND:
                return True
        return self.accepts(state, not text)

    def _settled(self, state: State, first: bool) -> State:
        return FOUND if any(self._empty(part, first, last=False) for part in state) else state

    def _number(self, kind: int, inner: tuple[int, ...] = (), extra: Any = None) -> int:
        part = (kind, inner, extra)
        if part not in self._numbers:
            self._numbers[part] = len(self._parts)
            self._parts.append(part)
        return self._numbers[part]

    def _added(self, node: Node) -> int:
        if isinstance(node, Chars):
            return self._number(_CHARS, (), node.ranges)
        if isinstance(node, Anchor):
            return self._number(_END if node.end else _BEGIN)
        if isinstance(node, Repeat):
            return self._number(_REPEAT, (self._added(node.node),), (node.low, node.high))
        if isinstance(node, Choice):
            return self._number(_CHOICE, tuple(self._added(option) for option in node.options))
        parts = [self._added(part) for part in node.parts]
        return reduce(lambda rest, part: self._then(part, rest), reversed(parts), _NOTHING_LEFT)

    def _then(self, part: int, rest: int) -> int:
        if part == _NOTHING_LEFT or rest == _NOTHING_LEFT:
            return part or rest
        return self._number(_THEN, (part, rest))

    def _empty(self, number: int, first: bool, last: bool) -> bool:
        """Whether the part matches nothing at all, at the beginning and at the end or not."""
        key = (number, first, last)
        if key not in self._empties:
            self._empties[key] = self._is_empty(number, first, last)
        return self._empties[key]

    def _is_empty(self, number: int, first: bool, last: bool) -> bool:
        kind, inner, extra = self._parts[number]
        while kind == _THEN:
            if not self._empty(inner[0], first, last):
                return False
            kind, inner, extra = self._parts[inner[1]]
        if kind == _CHOICE:
            return any(self._empty(option, first, last) for option in inner)
        if kind == _REPEAT:
            return extra[0] == 0 or self._empty(inner[0], first, last)
        return kind == _EMPTY or (kind == _BEGIN and first) or (kind == _END and last)

    def _after(self, number: int, point: int, first: bool) -> set[int]:
        found: set[int] = set()
        kind, inner, extra = self._parts[number]
        while kind == _THEN:
            found |= {self._then(left, inner[1]) for left in self._after(inner[0], point, first)}
            if not self._empty(inner[0], first, last=False):
                return found
            kind, inner, extra = self._parts[inner[1]]
        if kind == _CHARS:
            if any(low <= point <= high for low, high in extra):
                found.add(_NOTHING_LEFT)
        elif kind == _REPEAT:
            found |= self._repeated(inner[0], extra[0], extra[1], self._after(inner[0], point, first))
        else:
            for option in inner:
                found |= self._after(option, point, first)
        return found

    def _repeated(self, part: int, low: int, high: int | None, after: set[int]) -> set[int]:
        if high == 0:
            return set()
        more = None if high is None else high - 1
        rest = _NOTHING_LEFT if more == 0 else self._number(_REPEAT, (part,), (max(0, low - 1), more))
        return {self._then(left, rest) for left in after}


def whole(node: Node, budget: Budget) -> Automaton:
    """Tells the strings that a tree stands for, which has no anchors itself."""
    return Automaton(Sequence((Anchor(end=False), node, Anchor(end=True))), budget)


def ends_itself(node: Node, budget: Budget) -> bool:
    """Whether no string of a tree (without anchors) goes on as another one does: what follows cannot be taken
    for more of it. Raises TooMuch."""
    automaton, chars = whole(node, budget), representatives(sets_of(node))
    seen: set[State] = {automaton.start}
    layer, first = seen, True
    while layer:
        new: set[State] = set()
        for state in layer:
            budget.spend(len(chars))
            after = {automaton.step(state, char, first) for char in chars} - {LOST}
            if after and automaton.accepts(state, first):
                return False
            new |= after
        layer = new - seen
        seen = seen | new
        first = False
    return True


def _at_beginning(node: Node) -> bool:
    """Whether the pattern is found at the beginning of a string only, as far as that is plain."""
    if isinstance(node, Choice):
        return all(map(_at_beginning, node.options))
    parts = node.parts if isinstance(node, Sequence) else (node,)
    return any(isinstance(part, Anchor) and not part.end for part in parts[:1])


def lengths_of(node: Node) -> Node:
    """A pattern that is found in strings of the same lengths, whatever their characters."""
    if isinstance(node, Chars):
        return Chars(ALL) if node.ranges else node
    return rebuilt(node, lengths_of)


def surely_found(node: Node) -> bool:
    """Whether some string has the pattern, as far as is plain: no empty sets, anchors only at the ends."""
    if isinstance(node, Choice):
        return any(surely_found(option) for option in node.options)
    parts = node.parts if isinstance(node, Sequence) else (node,)
    if parts and isinstance(parts[0], Anchor) and not parts[0].end:
        parts = parts[1:]
    if parts and isinstance(parts[-1], Anchor) and parts[-1].end:
        parts = parts[:-1]
    return all(_plain(part) for part in parts)


def _plain(node: Node) -> bool:
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Repeat):
        return _plain(node.node)
    if isinstance(node, Choice):
        return bool(node.options) and all(_plain(option) for option in node.options)
    return isinstance(node, Sequence) and all(_plain(part) for part in node.parts)
