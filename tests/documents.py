"""Whether a Document allows a value, by the words of srt/grammar/form.py alone: a reference for readers."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

from sapwood.srt.grammar.form import (
    ANY_NAME,
    EVERYTHING,
    Array,
    Boolean,
    Document,
    Form,
    Null,
    Number,
    Object,
    Ref,
    String,
)
from sapwood.srt.grammar.formats import FORMATS


def loads(text: str) -> Any:
    """The value of a JSON text with its numbers as fractions."""
    return json.loads(text, parse_int=Fraction, parse_float=Fraction)


def allows(document: Document, value: Any, *, ordered: bool = False) -> bool:
    """Whether the Document allows the value; `ordered`: and its declared properties stand in their order."""
    return _Model(document, ordered).form(document.form, loads(json.dumps(value)))


class _Model:
    def __init__(self, document: Document, ordered: bool) -> None:
        self.rules = {ANY_NAME: EVERYTHING, **document.rules}
        self.ordered = ordered

    def form(self, form: Form, value: Any) -> bool:
        return any(self.shape(shape, value) for shape in form)

    def shape(self, shape: Any, value: Any) -> bool:
        if isinstance(shape, Ref):
            return self.form(self.rules[shape.name], value)
        if isinstance(shape, Null):
            return value is None
        if isinstance(shape, Boolean):
            return isinstance(value, bool) and value in shape.values
        if isinstance(shape, Number):
            return isinstance(value, Fraction) and _number(shape, value)
        if isinstance(shape, String):
            return isinstance(value, str) and string(shape, value)
        if isinstance(shape, Array):
            return isinstance(value, list) and self.array(shape, value)
        return isinstance(value, dict) and self.object(shape, value)

    def array(self, shape: Array, value: list[Any]) -> bool:
        assert not shape.needs
        if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
            return False
        if shape.unique and len({json.dumps(item, default=str) for item in value}) < len(value):
            return False
        forms = (*shape.prefix, *[shape.rest] * len(value))
        return all(self.form(form, item) for form, item in zip(forms, value, strict=False))

    def object(self, shape: Object, value: dict[str, Any]) -> bool:
        assert not shape.needs
        assert shape.low <= sum(prop.required for prop in shape.properties) + 1
        if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
            return False
        declared = {prop.name: prop for prop in shape.properties}
        if any(prop.required and prop.name not in value for prop in shape.properties):
            return False
        for name, part in value.items():
            kinds = [kind for kind in shape.others if string(kind.name, name)]
            assert len(kinds) <= 1, f"kinds of names overlap at {name!r}: {kinds}"
            form = declared[name].form if name in declared else kinds[0].form if kinds else ()
            if not self.form(form, part):
                return False
        places = [list(declared).index(name) if name in declared else len(declared) for name in value]
        return not self.ordered or places == sorted(places)


def _number(shape: Number, value: Fraction) -> bool:
    if shape.values is not None:
        return value in shape.values
    low_ok = shape.low is None or (value > shape.low if shape.low_open else value >= shape.low)
    high_ok = shape.high is None or (value < shape.high if shape.high_open else value <= shape.high)
    whole = value.denominator == 1
    kind_ok = (whole or not shape.integer) and not (whole and shape.fractional)
    steps_ok = all((value / step).denominator == 1 for step in shape.multiple_of)
    return low_ok and high_ok and kind_ok and steps_ok and value not in shape.excluded


def string(shape: String, value: str) -> bool:
    """Whether a String allows the value, by Python's own regular expressions."""
    if shape.values is not None:
        return value in shape.values
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return False
    wanted = [*shape.patterns, *(FORMATS[name] for name in shape.formats)]
    return (
        value not in shape.excluded
        and all(found(pattern, value) for pattern in wanted)
        and not any(found(pattern, value) for pattern in shape.unlike)
    )


def found(pattern: str, value: str) -> bool:
    """Whether an ECMA-262 pattern is found in the value; for those that mean the same in Python but for `$`
    and classes."""
    letters = "[^\\W\\d_]"
    ends = re.sub(r"(\\.|\[(?:\\.|[^\]\\])*\])|\$", lambda m: m[1] or r"\Z", pattern)
    python = ends.replace("\\p{Letter}", letters).replace("\\p{L}", letters)
    ascii_only = letters not in python
    return re.search(python, value, re.ASCII if ascii_only else 0) is not None
