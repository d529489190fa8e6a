"""unevaluatedProperties and unevaluatedItems, where no choice decides what the subschemas have looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sapwood.srt.grammar import assertions
from sapwood.srt.grammar.form import ANY, Array, Form, Object, Property
from sapwood.srt.grammar.limits import Inexact
from sapwood.srt.grammar.places import below

if TYPE_CHECKING:
    from sapwood.srt.grammar.schema import Reader

_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_OF_ARRAYS = ("prefixItems", "items", "contains", "unevaluatedItems")


def properties(reader: Reader, pointer: str, schema: dict[str, Any], form: Form) -> Object | None:
    """Objects whose properties that no subschema has looked at are as the form says; None if all have been.

    Raises Inexact if that depends on the value.
    """
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for place, part in _certain(reader, pointer, schema, _OF_OBJECTS):
        if "additionalProperties" in part or ("unevaluatedProperties" in part and place != pointer):
            return None
        names.update(dict.fromkeys(part.get("properties", {})))
        patterns.update(dict.fromkeys(part.get("patternProperties", {})))
    kinds = [(assertions.pattern(text, "patternProperties"), ANY) for text in patterns]
    declared = tuple(Property(name, ANY, False) for name in names)
    return Object(declared, assertions.kinds(kinds, form, reader.algebra))


def items(reader: Reader, pointer: str, schema: dict[str, Any], form: Form) -> Array | None:
    """Arrays whose items that no subschema has looked at are as the form says; None if all have been.

    Raises Inexact if that depends on the value.
    """
    count = 0
    for place, part in _certain(reader, pointer, schema, _OF_ARRAYS):
        if "contains" in part:
            raise Inexact("it is not supported beside contains")
        if isinstance(part.get("items"), list):
            count = max(count, len(part["items"]))
        elif "items" in part:
            return None
        if "additionalItems" in part or ("unevaluatedItems" in part and place != pointer):
            return None
        count = max(count, len(part.get("prefixItems", ())))
    return Array(prefix=(ANY,) * count, rest=form)


def _certain(
    reader: Reader, pointer: str, schema: dict[str, Any], keywords: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all that hold for the same value, whatever it is. Raises Inexact if others, which hold
    for some values only, have one of the keywords."""
    for place, part in _reached(reader, pointer, schema, sure=True):
        yield place, part
        for choice in _choices(place, part):
            inner = reader.places.at(choice)
            for _, deep in _reached(reader, choice, inner, sure=False):
                if any(keyword in deep for keyword in keywords):
                    raise Inexact("which parts have been looked at depends on the value: not supported")


def _reached(reader: Reader, pointer: str, schema: Any, sure: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    todo, seen = [(pointer, schema)], set()
    while todo:
        place, part = todo.pop()
        if place in seen or not isinstance(part, dict):
            continue
        seen.add(place)
        reader.check(place, part)
        reader.budget.spend()
        yield place, part
        nested = [below(place, "allOf", i) for i in range(len(part.get("allOf", ())))]
        if isinstance(part.get("$ref"), str):
            nested.append(reader.target(place, part["$ref"]))
        if not sure:
            nested += _choices(place, part)
        todo += [(found, reader.places.at(found)) for found in nested]


def _choices(place: str, part: dict[str, Any]) -> list[str]:
    found = [below(place, word, i) for word in ("anyOf", "oneOf") for i in range(len(part.get(word, ())))]
    found += [below(place, word) for word in ("if", "then", "else") if word in part]
    for word in ("dependentSchemas", "dependencies"):
        found += [
            below(place, word, name) for name, value in part.get(word, {}).items() if isinstance(value, dict)
        ]
    return found
