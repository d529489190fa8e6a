"""Which strings a String allows: whether it allows a given one, and whether it allows any at all."""

from __future__ import annotations

from sapwood.srt.grammar.automaton import FOUND, LOST, Automaton, State, lengths_of, surely_found
from sapwood.srt.grammar.charset import representatives
from sapwood.srt.grammar.form import String
from sapwood.srt.grammar.formats import FORMATS
from sapwood.srt.grammar.limits import Budget, TooMuch
from sapwood.srt.grammar.regex import parse, sets_of

_SEARCH_STEPS = 4_000
"""Steps of one search for a string of a kind; where they do not suffice there is taken to be one."""
_MAX_WORDS = 64


class Words:
    """Answers about strings, remembered; patterns must be ones that can be read."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._automata: dict[str, Automaton] = {}
        self._empty: dict[String, bool] = {}
        self._universal: dict[str, bool] = {}

    def holds(self, shape: String, text: str) -> bool:
        """Whether the shape allows the string."""
        if shape.values is not None:
            return text in shape.values
        if len(text) < shape.low or (shape.high is not None and len(text) > shape.high):
            return False
        if text in shape.excluded or any(self._automaton(p).holds(text) for p in shape.unlike):
            return False
        return all(self._automaton(p).holds(text) for p in (*shape.patterns, *_formats(shape)))

    def universal(self, pattern: str) -> bool:
        """Whether the pattern is found in every string."""
        if pattern not in self._universal:
            # Almost every pattern wants something of a string, so the empty one has it not.
            fits = self._automaton(pattern).holds("")
            self._universal[pattern] = fits and self.empty(String(unlike=(pattern,)))
        return self._universal[pattern]

    def empty(self, shape: String) -> bool:
        """Whether the shape allows no string; False too if that takes too long to tell."""
        patterns = (*shape.patterns, *_formats(shape))
        bounded = shape.low > 0 or shape.high is not None or shape.excluded
        if shape.values is not None or not (patterns or shape.unlike):
            return shape.values == ()
        single = len(patterns) == 1 and not shape.unlike and not bounded
        if single and surely_found(self._automaton(patterns[0]).node):
            return False
        if shape not in self._empty:
            self._empty[shape] = self._none_found(shape, patterns)
        return self._empty[shape]

    def _automaton(self, pattern: str) -> Automaton:
        if pattern not in self._automata:
            self._automata[pattern] = Automaton(parse(pattern), self._budget)
        return self._automata[pattern]

    def _none_found(self, shape: String, patterns: tuple[str, ...]) -> bool:
        budget = Budget(_SEARCH_STEPS)
        nodes = [self._automaton(p).node for p in patterns]
        if len(nodes) == 1 and not shape.unlike and not shape.excluded:
            nodes = [lengths_of(nodes[0])]
        wanted = [Automaton(node, budget) for node in nodes]
        unwanted = [Automaton(self._automaton(p).node, budget) for p in shape.unlike]
        try:
            return _Search(shape, wanted, unwanted, budget).none_found()
        except TooMuch:
            return False
        finally:
            self._budget.spend(1 + (_SEARCH_STEPS - max(0, budget.left)) // 2)


_Place = tuple[tuple[State, ...], str | None]
"""The automata's states, and the beginning of an excluded word that has been read, if all of it is one."""


class _Search:
    """A walk through all strings by the places that they lead to."""

    def __init__(
        self, shape: String, wanted: list[Automaton], unwanted: list[Automaton], budget: Budget
    ) -> None:
        self._low, self._high = shape.low, shape.high
        self._automata, self._wanted, self._budget = wanted + unwanted, len(wanted), budget
        words = shape.excluded if len(shape.excluded) <= _MAX_WORDS else frozenset()
        self._words = words
        self._starts = {word[:i] for word in words for i in range(len(word) + 1)}
        sets = {ranges for automaton in wanted + unwanted for ranges in sets_of(automaton.node)}
        self._chars = representatives(sets, {char for word in words for char in word})

    def none_found(self) -> bool:
        start: _Place = (tuple(a.start for a in self._automata), "")
        if self._low or self._high is not None:
            return self._none_by_length(start)
        # Where the length says nothing, one way to the end is as good as another: the latest is followed up.
        todo, seen = [(start, True)], {start}
        while todo:
            place, first = todo.pop()
            if self._ends(place, first):
                return False
            after = self._after(place, first) - seen
            seen |= after
            todo += [(one, False) for one in after]
        return True

    def _none_by_length(self, start: _Place) -> bool:
        layer, seen, length = {start}, {start}, 0
        while layer:
            if length >= self._low and any(self._ends(place, length == 0) for place in layer):
                return False
            if length == self._high:
                break
            after = {one for place in layer for one in self._after(place, length == 0)}
            length += 1
            # Up to `low` characters the same places may come again and matter; from then on only new ones do.
            layer = after if length <= self._low else after - seen
            seen = seen | layer if length >= self._low else set()
        return True

    def _after(self, place: _Place, first: bool) -> set[_Place]:
        states, word = place
        found = set()
        for char in self._chars:
            self._budget.spend(len(self._automata))
            moved = tuple(a.step(s, char, first) for a, s in zip(self._automata, states, strict=True))
            if LOST in moved[: self._wanted] or FOUND in moved[self._wanted :]:
                continue
            longer = word + char if word is not None and word + char in self._starts else None
            found.add((moved, longer))
        return found

    def _ends(self, place: _Place, first: bool) -> bool:
        states, word = place
        if word is not None and word in self._words:
            return False
        accepted = [a.accepts(s, first) for a, s in zip(self._automata, states, strict=True)]
        return all(accepted[: self._wanted]) and not any(accepted[self._wanted :])


def _formats(shape: String) -> tuple[str, ...]:
    return tuple(FORMATS[name] for name in shape.formats)
