"""Meets and complements of the shapes without parts: null, booleans, numbers and strings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from sapwood.srt.grammar.form import Boolean, Number, String
from sapwood.srt.grammar.limits import Inexact
from sapwood.srt.grammar.words import Words

_FEW = 64
"""A range with holes in it is written as its values if they are no more than this."""


def meet_boolean(a: Boolean, b: Boolean) -> Boolean | None:
    values = tuple(value for value in a.values if value in b.values)
    return Boolean(values) if values else None


def number_holds(shape: Number, value: Fraction) -> bool:
    """Whether the shape allows the number."""
    if shape.values is not None:
        return value in shape.values
    if shape.low is not None and (value < shape.low or (shape.low_open and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.high_open and value == shape.high)):
        return False
    whole = value.denominator == 1
    if (shape.integer and not whole) or (shape.fractional and whole) or value in shape.excluded:
        return False
    return all((value / step).denominator == 1 for step in shape.multiple_of)


def meet_number(a: Number, b: Number) -> Number | None:
    for one, other in ((a, b), (b, a)):
        if one.values is not None:
            values = tuple(value for value in one.values if number_holds(other, value))
            return Number(values=values) if values else None
    low, low_open = _tighter((a.low, a.low_open), (b.low, b.low_open), 1)
    high, high_open = _tighter((a.high, a.high_open), (b.high, b.high_open), -1)
    steps = tuple(dict.fromkeys(a.multiple_of + b.multiple_of))
    return tidy_number(
        Number(
            low=low, high=high, low_open=low_open, high_open=high_open,
            integer=a.integer or b.integer, fractional=a.fractional or b.fractional,
            multiple_of=steps, excluded=a.excluded | b.excluded,
        )
    )  # fmt: skip


def tidy_number(shape: Number) -> Number | None:
    """The one way to write the shape; None if no number is so."""
    if shape.values is not None:
        return shape if shape.values else None
    # A multiple of a whole number is whole, and a whole one is a multiple of a/b just if it is one of a.
    integer = shape.integer or any(step.denominator == 1 for step in shape.multiple_of)
    if integer and shape.fractional:
        return None
    steps = set(shape.multiple_of)
    if integer:
        steps = {Fraction(step.numerator) for step in steps} - {Fraction(1)}
    steps = {step for step in steps if not any(o != step and (o / step).denominator == 1 for o in steps)}
    shape = replace(shape, integer=integer, multiple_of=tuple(sorted(steps)))
    if integer:
        shape = _whole_bounds(shape)
    if shape.excluded:
        bare = replace(shape, excluded=frozenset())
        shape = replace(shape, excluded=frozenset(v for v in shape.excluded if number_holds(bare, v)))
    if shape.low is None or shape.high is None:
        return shape
    if shape.low > shape.high or (shape.low == shape.high and (shape.low_open or shape.high_open)):
        return None
    if shape.low == shape.high:
        return Number(values=(shape.low,)) if number_holds(shape, shape.low) else None
    return _listed(shape) if shape.multiple_of or (integer and shape.excluded) else shape


def _whole_bounds(shape: Number) -> Number:
    low, high = shape.low, shape.high
    if low is not None:
        low = Fraction(math.floor(low) + 1 if shape.low_open else math.ceil(low))
    if high is not None:
        high = Fraction(math.ceil(high) - 1 if shape.high_open else math.floor(high))
    return replace(shape, low=low, high=high, low_open=False, high_open=False)


def _listed(shape: Number) -> Number | None:
    """The shape as its values if they are few; None if there are none. It has both bounds, and steps."""
    assert shape.low is not None
    assert shape.high is not None
    step = max(shape.multiple_of, default=Fraction(1))
    first, last = math.ceil(shape.low / step), math.floor(shape.high / step)
    if last - first >= _FEW:
        return shape
    values = tuple(step * k for k in range(first, last + 1) if number_holds(shape, step * k))
    return Number(values=values) if values else None


def number_violations(shape: Number) -> list[Number]:
    """Numbers that the shape does not allow, all of them. Raises Inexact for what cannot be said."""
    if shape.values is not None:
        return [Number(excluded=frozenset(shape.values))]
    if shape.multiple_of:
        raise Inexact("what is no multiple of a number cannot be told", "multipleOf")
    out = []
    if shape.low is not None:
        out.append(Number(high=shape.low, high_open=not shape.low_open))
    if shape.high is not None:
        out.append(Number(low=shape.high, low_open=not shape.high_open))
    if shape.integer:
        out.append(Number(fractional=True))
    if shape.fractional:
        out.append(Number(integer=True))
    if shape.excluded:
        out.append(Number(values=tuple(sorted(shape.excluded))))
    return out


def _tighter(
    a: tuple[Fraction | None, bool], b: tuple[Fraction | None, bool], sign: int
) -> tuple[Fraction | None, bool]:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    if a[0] == b[0]:
        return a[0], a[1] or b[1]
    return a if (a[0] > b[0]) == (sign > 0) else b


def meet_string(a: String, b: String, words: Words) -> String | None:
    if a == b:
        return a
    for one, other in ((a, b), (b, a)):
        if one.values is not None:
            values = tuple(value for value in one.values if words.holds(other, value))
            return String(values=values) if values else None
    highs = [high for high in (a.high, b.high) if high is not None]
    shape = String(
        low=max(a.low, b.low),
        high=min(highs) if highs else None,
        patterns=_merged(a.patterns, b.patterns),
        unlike=_merged(a.unlike, b.unlike),
        formats=_merged(a.formats, b.formats),
        excluded=a.excluded | b.excluded,
    )
    return tidy_string(shape, words)


def tidy_string(shape: String, words: Words) -> String | None:
    """The one way to write the shape; None if no string is so (or, at worst, the shape as it is)."""
    if shape.values is not None:
        return shape if shape.values else None
    if shape.high is not None and shape.low > shape.high:
        return None
    shape = replace(shape, patterns=tuple(p for p in shape.patterns if not words.universal(p)))
    if shape.high == 0:
        return String(values=("",)) if words.holds(shape, "") else None
    if shape.excluded:
        bare = replace(shape, excluded=frozenset())
        shape = replace(shape, excluded=frozenset(v for v in shape.excluded if words.holds(bare, v)))
    return None if words.empty(shape) else shape


def string_violations(shape: String) -> list[String]:
    """Strings that the shape does not allow, all of them. Raises Inexact for what cannot be said."""
    if shape.values is not None:
        return [String(excluded=frozenset(shape.values))]
    if shape.formats:
        # An annotation forbids nothing, an assertion does: what is right by both has no such strings at all.
        raise Inexact("strings that are not of a format cannot be told", "format")
    out = []
    if shape.low:
        out.append(String(high=shape.low - 1))
    if shape.high is not None:
        out.append(String(low=shape.high + 1))
    out += [String(unlike=(pattern,)) for pattern in shape.patterns]
    out += [String(patterns=(pattern,)) for pattern in shape.unlike]
    if shape.excluded:
        out.append(String(values=tuple(sorted(shape.excluded))))
    return out


def string_within(a: String, b: String) -> bool:
    """Whether all strings of the first are of the second, as far as that is plain to see."""
    return (
        b.values is None
        and a.values is None
        and b.low <= a.low
        and (b.high is None or (a.high is not None and a.high <= b.high))
        and set(b.patterns) <= set(a.patterns)
        and set(b.unlike) <= set(a.unlike)
        and set(b.formats) <= set(a.formats)
        and b.excluded <= a.excluded
    )


def _merged(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*a, *b}))


def merge_values(shapes: Iterable[Number | String]) -> list[Number | String]:
    """The shapes with all those that are lists of values in one list a type, in order of appearance."""
    numbers: dict[Fraction, None] = {}
    strings: dict[str, None] = {}
    out: list[Number | String] = []
    for shape in shapes:
        if shape.values is None:
            out.append(shape)
        elif isinstance(shape, Number):
            numbers.update(dict.fromkeys(shape.values))
        else:
            strings.update(dict.fromkeys(shape.values))
    if numbers:
        out.append(Number(values=tuple(numbers)))
    if strings:
        out.append(String(values=tuple(strings)))
    return out
