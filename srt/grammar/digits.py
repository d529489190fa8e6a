"""Ranges of decimal digits as regexes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Border:
    """Where a range ends; `open`: not at the value itself, but next to it."""

    value: Fraction
    open: bool


def joined(alternatives: list[str]) -> str:
    """Alternatives as one atom or sequence."""
    return alternatives[0] if len(alternatives) == 1 else "(?:" + "|".join(alternatives) + ")"


def any_digits(low: int, high: int) -> str:
    """`low` to `high` digits."""
    if high == 0:
        return ""
    if low == high:
        return "[0-9]" if low == 1 else f"[0-9]{{{low}}}"
    return f"[0-9]{{{low},{high}}}" if (low, high) != (0, 1) else "[0-9]?"


def integers(low: int, high: int) -> list[str]:
    """Alternatives for the whole numbers from `low` to `high` (0 <= low), without leading zeros."""
    found: list[str] = []
    full: list[int] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = 0 if length == 1 else 10 ** (length - 1)
        a, b = max(low, first), min(high, 10**length - 1)
        if length > 1 and (a, b) == (first, 10**length - 1):
            full.append(length)
        elif a <= b:
            found.append(_same_length(str(a), str(b)))
    if full:
        found.append("[1-9]" + any_digits(full[0] - 1, full[-1] - 1))
    return found


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return any_digits(len(low), len(low))
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(_class(first, last) + any_digits(rest, rest))
    return joined(parts)


def _class(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


@dataclass(frozen=True, slots=True)
class Digits:
    """Strings of digits: a regex of those not empty (None: no such), and whether the empty one is one."""

    some: str | None
    none: bool

    def behind_point(self) -> str | None:
        """The fraction with its point, if there is one; None if no string is among these."""
        if self.some is None:
            return "" if self.none else None
        return rf"(?:\.{self.some})?" if self.none else rf"\.{self.some}"


_Limit = tuple[str, bool] | None


def fraction(low: Border, high: Border | None, count: int) -> Digits:
    """At most `count` digits behind the point of a fraction from `low` to `high` (None: below 1).

    Raises ValueError if a border's digits do not end.
    """
    above = None if high is None else (digits_of(high.value), high.open)
    return _fraction((digits_of(low.value), low.open), above, count)


def digits_of(value: Fraction) -> str:
    """The digits behind the point of a fraction from 0 to 1, without zeros at the end.

    Raises ValueError if they do not end.
    """
    found = ""
    while value:
        value *= 10
        found += str(int(value))
        value -= int(value)
        if len(found) > 400:
            raise ValueError("a bound whose decimal digits do not end is not supported")
    return found


def _fraction(low: _Limit, high: _Limit, count: int) -> Digits:
    none = (low is None or low == ("", False)) and (high is None or high != ("", True))
    if count == 0:
        return Digits(None, none)
    if low is None and high in (None, ("", False)):
        return Digits(any_digits(1, count) if high is None else f"0{{1,{count}}}", none)
    ways: dict[tuple[_Limit, _Limit], list[int]] = {}
    for digit in range(10):
        state = _below(low, digit), _above(high, digit)
        if state[0] != _DEAD and state[1] != _DEAD:
            ways.setdefault(state, []).append(digit)
    parts = []
    for state, digits in ways.items():
        rest = _fraction(*state, count - 1)
        head = _class(digits[0], digits[-1])
        if state == (None, None):
            parts.append(head + any_digits(0, count - 1))
        elif rest.some is not None:
            parts.append(head + (f"(?:{rest.some})?" if rest.none else rest.some))
        elif rest.none:
            parts.append(head)
    return Digits(joined(parts) if parts else None, none)


_DEAD: _Limit = ("dead", True)


def _below(low: _Limit, digit: int) -> _Limit:
    """What the lower border says after one more digit."""
    if low is None or low == ("", False):
        return None
    first = int(low[0][0]) if low[0] else 0
    if digit != first:
        return None if digit > first else _DEAD
    rest = (low[0][1:], low[1])
    return None if rest == ("", False) else rest


def _above(high: _Limit, digit: int) -> _Limit:
    if high is None or high == ("", True):
        return high if high is None else _DEAD
    first = int(high[0][0]) if high[0] else 0
    if digit != first:
        return None if digit < first else _DEAD
    return (high[0][1:], high[1])
