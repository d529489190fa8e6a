"""The members of an object as a rule: declared ones in their order, then others, counted where that matters.

A state is how many declared properties have been passed and how many members stand written; without counts
all numbers of these are the same. What follows a state is a member, or, behind a comma, one more or none:

    next(i, n)  ──  member i, more(i + 1, n + 1)  or, if i is optional, next(i + 1, n)
    more(i, n)  ──  "," next(i, n)  or, if none must come, nothing
"""

from __future__ import annotations

from dataclasses import dataclass

from sapwood.srt.grammar.rules import Rules, repeated

MAX_STATES = 5_000
MAX_OPTIONAL = 200
"""Optional properties one after the other: after a comma the parser keeps two items of each of them."""
State = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A declared member's text in the grammar, its name and its value."""

    text: str
    required: bool


class Members:
    """Writes members: at least `low` and at most `high` (None: any number) of them, the `others` as often as
    one likes. Raises ValueError if that takes too many states."""

    def __init__(
        self, rules: Rules, comma: str, declared: list[Member], others: str | None, low: int, high: int | None
    ) -> None:
        needed = sum(member.required for member in declared)
        if others is None and high is not None and high >= len(declared):
            high = None
        self._rules, self._comma = rules, comma
        self._declared, self._others = declared, others
        self._low, self._high = (0 if low <= needed else low), high
        self._top = self._low if high is None else high + 1
        self._needed = [sum(member.required for member in declared[at:]) for at in range(len(declared) + 1)]
        if len(declared) * self._top > MAX_STATES:
            raise ValueError(f"counting its properties takes more than {MAX_STATES} states")
        run = 0
        for member in declared:
            run = 0 if member.required else run + 1
            if run > MAX_OPTIONAL:
                raise ValueError(f"more than {MAX_OPTIONAL} optional properties one after the other")

    def alternatives(self) -> list[str]:
        """Sequences, an empty one for no members at all; none if no object is so."""
        next_at: dict[State, str | None] = {}
        for index in range(len(self._declared), -1, -1):
            for count in range(min(index, self._top) + 1):
                next_at[(index, count)] = self._next(index, count, next_at)
        first = next_at[(0, 0)]
        found = [] if first is None else [first]
        return [*found, ""] if self._may_end(0, 0) else found

    def _may_end(self, index: int, count: int) -> bool:
        return self._needed[index] == 0 and count >= self._low

    def _next(self, index: int, count: int, next_at: dict[State, str | None]) -> str | None:
        """At least one more member; None if there can be none."""
        if self._high is not None and count >= self._high:
            return None
        if index == len(self._declared):
            return self._rest(count)
        member = self._declared[index]
        taken = self._more(index + 1, min(count + 1, self._top), next_at)
        skipped = None if member.required else next_at[(index + 1, count)]
        found = [] if taken is None else [f"{member.text} {taken}"]
        if skipped is not None:
            found.append(skipped)
        if not found:
            return None
        return found[0] if member.required else self._rules.rule(" | ".join(found))

    def _more(self, index: int, count: int, next_at: dict[State, str | None]) -> str | None:
        following = next_at[(index, count)]
        if following is None:
            return "" if self._may_end(index, count) else None
        more = f"{self._comma} {following}"
        return f"({more})?" if self._may_end(index, count) else more

    def _rest(self, count: int) -> str | None:
        if self._others is None:
            return None
        low = max(0, self._low - count - 1)
        high = None if self._high is None else self._high - count - 1
        return f"{self._others} {repeated(f'{self._comma} {self._others}', low, high)}"
