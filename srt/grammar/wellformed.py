"""Whether what stands at a place is a schema: each keyword's value of the kind that the meta-schema says."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sapwood.srt.grammar.keywords import KEYWORDS, Value

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_WANTED: dict[Value, str] = {
    "any": "any value",
    "schema": "a schema, which is an object, true or false",
    "schemas": "an object of schemas",
    "list": "a list that is not empty",
    "names": "a list of strings",
    "number": "a number",
    "count": "a whole number from 0 to 2147483647",
    "flag": "true or false",
    "text": "a string",
}
_MAX_COUNT = 2**31


class Malformed(Exception):
    """What stands there is no schema: `keyword` (empty: the place itself) has a value of another kind."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.keyword = keyword


def check(schema: Any) -> None:
    """Raise Malformed if the value is no schema, as far as its own keywords go."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise Malformed(f"a schema is an object, true or false, got {shown(schema)}")
    for name, value in schema.items():
        keyword = KEYWORDS.get(name)
        if keyword is None:
            continue
        if not (_SPECIAL[name] if name in _SPECIAL else _KINDS[keyword.value])(value):
            wanted = _SPECIAL_WANTED.get(name) or _WANTED[keyword.value]
            raise Malformed(f"{name} must be {wanted}, got {shown(value)}", name)


def shown(value: Any) -> str:
    """A value as an error shows it: its JSON, cut."""
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: Any) -> Any:
    if value.denominator == 1:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return int(value)


def is_schema(value: Any) -> bool:
    return isinstance(value, (bool, dict))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1 and 0 <= value < _MAX_COUNT


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(is_schema(part) for part in value.values())


def _is_bound(value: Any) -> bool:
    return isinstance(value, (bool, Fraction))


_KINDS: dict[Value, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "schema": is_schema,
    "schemas": _is_schemas,
    "list": lambda value: isinstance(value, list) and bool(value) and all(map(is_schema, value)),
    "names": _is_names,
    "number": lambda value: isinstance(value, Fraction),
    "count": _is_count,
    "flag": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
}
_SPECIAL: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list),
    "multipleOf": lambda value: isinstance(value, Fraction) and value > 0,
    "exclusiveMinimum": _is_bound,
    "exclusiveMaximum": _is_bound,
    "items": lambda value: is_schema(value) or (isinstance(value, list) and all(map(is_schema, value))),
    "prefixItems": lambda value: isinstance(value, list) and all(map(is_schema, value)),
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
    "dependencies": lambda value: (
        isinstance(value, dict) and all(is_schema(part) or _is_names(part) for part in value.values())
    ),
}
_SPECIAL_WANTED = {
    "type": f"one or more of {', '.join(TYPES)}",
    "enum": "a list",
    "multipleOf": "a number above 0",
    "exclusiveMinimum": "a number, true or false",
    "exclusiveMaximum": "a number, true or false",
    "items": "a schema or a list of schemas",
    "prefixItems": "a list of schemas",
    "dependentRequired": "an object of lists of strings",
    "dependencies": "an object of schemas and lists of strings",
}
