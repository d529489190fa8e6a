"""Keywords that say something of values of one type, as shapes of that type."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sapwood.srt.grammar.algebra import Algebra
from sapwood.srt.grammar.form import (
    ANY,
    Array,
    Boolean,
    Form,
    Null,
    Number,
    Object,
    Others,
    Property,
    Shape,
    String,
)
from sapwood.srt.grammar.formats import FORMATS
from sapwood.srt.grammar.language import searched
from sapwood.srt.grammar.limits import Inexact
from sapwood.srt.grammar.objects import FREE, remaining
from sapwood.srt.grammar.regex import NoPattern, parse
from sapwood.srt.grammar.scalars import meet_string
from sapwood.srt.grammar.wellformed import Malformed, shown

Child = Callable[..., Form]
"""The form of the subschema below this place (keyword, and name or index)."""

_MAX_KINDS = 64
_BY_TYPE: dict[str, Shape] = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "integer": Number(integer=True),
    "string": String(),
    "array": Array(rest=ANY),
    "object": Object(others=FREE),
}


def types(value: str | list[str]) -> list[Shape]:
    """The free shapes of a `type`."""
    names = [value] if isinstance(value, str) else value
    return [_BY_TYPE[name] for name in names]


def constant(value: Any) -> Shape:
    """The shape of one value alone."""
    if value is None:
        return Null()
    if isinstance(value, bool):
        return Boolean((value,))
    if isinstance(value, Fraction):
        return Number(values=(value,))
    if isinstance(value, str):
        return String(values=(value,))
    if isinstance(value, list):
        return Array(prefix=tuple((constant(part),) for part in value), low=len(value), high=len(value))
    return Object(tuple(Property(name, (constant(part),), True) for name, part in value.items()))


def bounds(schema: dict[str, Any]) -> Number:
    """minimum, maximum and the exclusive ones, as numbers or as the flags of draft 4."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low_open, high_open = above is True, below is True
    if isinstance(above, Fraction) and (low is None or above >= low):
        low, low_open = above, True
    if isinstance(below, Fraction) and (high is None or below <= high):
        high, high_open = below, True
    return Number(
        low=low, high=high, low_open=low_open and low is not None, high_open=high_open and high is not None
    )


def count(schema: dict[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    return None if value is None else int(value)


def pattern(text: str, keyword: str = "pattern") -> String:
    """Strings in which the pattern is found. Raises Inexact naming the construct that is not supported, or
    Malformed if the pattern is none."""
    try:
        searched(parse(text))
    except NoPattern as error:
        raise Malformed(f"{shown(text)} is {error}", keyword) from None
    except ValueError as error:
        raise Inexact(f"{shown(text)}: {error}", keyword) from None
    return String(patterns=(text,))


def format_of(name: str) -> String:
    """Strings of a format; all of them if it is an annotation here."""
    return String(formats=(name,)) if name in FORMATS else String()


def items(schema: dict[str, Any], child: Child) -> Array:
    """prefixItems and items; or a list of items, and additionalItems."""
    prefix: list[Form] = []
    rest = ANY
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise Malformed("items is no list beside prefixItems, which is the newer name of one", "items")
        prefix = [child("items", i) for i in range(len(schema["items"]))]
        rest = child("additionalItems") if "additionalItems" in schema else ANY
    elif "items" in schema:
        rest = child("items")
    if "prefixItems" in schema:
        prefix = [child("prefixItems", i) for i in range(len(schema["prefixItems"]))]
    return Array(prefix=tuple(prefix), rest=rest)


def contains(schema: dict[str, Any], child: Child) -> Array:
    """contains, with a minContains of 0 or 1."""
    if count(schema, "minContains") == 0:
        return Array(rest=ANY)
    return Array(rest=ANY, low=1, needs=((0, child("contains")),))


def properties(schema: dict[str, Any], names: dict[str, String], child: Child, algebra: Algebra) -> Object:
    """properties, those of patternProperties whose `names` are given, and additionalProperties.

    Raises Inexact if the combinations of patterns are too many.
    """
    other = child("additionalProperties") if "additionalProperties" in schema else ANY
    patterns = []
    for text, shape in names.items():
        form = child("patternProperties", text)
        if form != ANY or other != ANY:
            patterns.append((shape, form))
    declared = []
    for name in schema.get("properties", {}):
        form = child("properties", name)
        for kind, further in patterns:
            if algebra.words.holds(kind, name):
                form = algebra.both(form, further)
        declared.append(Property(name, form, False))
    return Object(tuple(declared), kinds(patterns, other, algebra))


def kinds(patterns: list[tuple[String, Form]], other: Form, algebra: Algebra) -> tuple[Others, ...]:
    """Properties by name: those with a pattern as its form says (with several: as all of them say), others as
    `other`. Raises Inexact if the combinations are too many."""
    parts: list[tuple[String, Form | None]] = [(String(), None)]
    for name, form in patterns:
        split: list[tuple[String, Form | None]] = []
        for kind, known in parts:
            algebra.budget.spend()
            inside = meet_string(kind, name, algebra.words)
            outside = meet_string(kind, String(unlike=name.patterns), algebra.words)
            if inside is not None:
                split.append((inside, form if known is None else algebra.both(known, form)))
            if outside is not None:
                split.append((outside, known))
        parts = split
        if len(parts) > _MAX_KINDS:
            raise Inexact(f"the patterns divide names into more than {_MAX_KINDS} kinds", "patternProperties")
    found = [(name, other if form is None else form) for name, form in parts]
    return tuple(Others(name, form) for name, form in found if form)


def property_names(form: Form, algebra: Algebra) -> Object:
    """Properties whose names are as the form says."""
    kinds: list[String] = []
    for shape in form:
        if isinstance(shape, String):
            kinds += remaining(shape, kinds, algebra)
    return Object(others=tuple(Others(name, ANY) for name in kinds))


def required(names: list[str]) -> Object:
    """Properties that are there, whatever they are."""
    return Object(tuple(Property(name, ANY, True) for name in dict.fromkeys(names)), FREE)


def absent(name: str) -> Object:
    return Object((Property(name, (), False),), FREE)
