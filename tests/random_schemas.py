"""Random JSON schemas of all keywords, and random values that are likely to matter to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from sapwood.srt.grammar.keywords import KEYWORDS

NAMES = ["a", "b", "c", "ab"]
_STRINGS = ["", "a", "b", "ab", "aab", "ba", "abc", "cc", "a1"]
_PATTERNS = ["a", "^a", "b$", "^[ab]+$", "^$", "[0-9]", "a|^b", "^(?:ab?)*$"]
_TYPES = [
    "null",
    "boolean",
    "integer",
    "number",
    "string",
    "array",
    "object",
    ["string", "null"],
    ["array", "object"],
]
_SCRAPS = [
    None, True, False, 0, 1, -1, 1.5, 2.0, 1e300, 10**20, "", "a", "~", "%", "(", "^a", "//", "#", "#/", "#a",
    "#/a", "#%ff", "#/%zz", "#/~", "http://[#x", "http://x/y#z", "urn:x", "date", "uri", "string", "object",
    "array",     "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema",
]  # fmt: skip
_NAME_SCHEMAS: list[Any] = [
    {"maxLength": 1},
    {"pattern": "a"},
    {"enum": ["a", "c"]},
    {"not": {"const": "a"}},
    {"anyOf": [{"const": "b"}, {"pattern": "^a"}]},
]
_NESTED = [
    "prefixItems", "items", "contains", "properties", "properties", "additionalProperties",
    "patternProperties", "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "if",
    "unevaluatedProperties", "unevaluatedItems",
]  # fmt: skip
_PLAIN = [
    "type", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "required", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "$ref",
]  # fmt: skip


def value(r: random.Random, depth: int = 3) -> Any:
    """A JSON value."""
    kind = r.randrange(9 if depth else 6)
    if kind < 2:
        return None if kind == 0 else r.random() < 0.5
    if kind == 2:
        return r.randrange(-3, 8)
    if kind == 3:
        return r.choice([0.5, 1.5, -2.5, 2.0, 3.25])
    if kind < 6:
        return r.choice(_STRINGS)
    if kind == 6:
        return [value(r, depth - 1) for _ in range(r.randrange(4))]
    return {name: value(r, depth - 1) for name in r.sample(NAMES, r.randrange(4))}


def schema(r: random.Random) -> dict[str, Any]:
    """A schema of draft 2020-12, recursive ones among them."""
    found = _schema(r, 3)
    found = found if isinstance(found, dict) else {}
    if "$ref" in json.dumps(found):
        properties = {"a": {"$ref": "#/$defs/x"}, "b": _schema(r, 1)}
        found["$defs"] = {
            "x": {"type": ["object", "integer"], "properties": properties},
            "y": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/y"}}, {"type": "string"}]},
        }
    return found


def junk(r: random.Random, depth: int = 3) -> Any:
    """What may be sent instead of a schema: keywords and values at random."""
    kind = r.randrange(12)
    if depth and kind < 4:
        return {r.choice([*KEYWORDS, "a", ""]): junk(r, depth - 1) for _ in range(r.randrange(4))}
    if depth and kind < 6:
        return [junk(r, depth - 1) for _ in range(r.randrange(3))]
    return r.choice(_SCRAPS)


def mutated(r: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of the schema with something else at one place in it."""
    schema = json.loads(json.dumps(schema))
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        found = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        places += [(part, key) for key, _ in found]
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    if places:
        part, key = r.choice(places)
        part[key] = r.choice([junk(r), 10**390, -(10**390), 1e-300])
    return schema


def _schema(r: random.Random, depth: int) -> Any:
    if r.random() < 0.08:
        return r.random() < 0.7
    words = _PLAIN + _NESTED if depth else _PLAIN
    found: dict[str, Any] = {}
    for _ in range(r.choice([1, 1, 2, 2, 3])):
        word = r.choice(words)
        found[word] = _nested(r, word, depth) if word in _NESTED else _plain(r, word)
        if word == "if":
            found.update({branch: _schema(r, depth - 1) for branch in ("then", "else") if r.random() < 0.7})
    return found


def _plain(r: random.Random, word: str) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "type": lambda: r.choice(_TYPES),
        "enum": lambda: [value(r, 1) for _ in range(r.randrange(1, 4))],
        "const": lambda: value(r, 2),
        "multipleOf": lambda: r.choice([1, 2, 3, 0.5]),
        "pattern": lambda: r.choice(_PATTERNS),
        "uniqueItems": lambda: True,
        "required": lambda: r.sample(NAMES, r.randrange(1, 3)),
        "propertyNames": lambda: r.choice(_NAME_SCHEMAS),
        "dependentRequired": lambda: {r.choice(NAMES): r.sample(NAMES, r.randrange(1, 3))},
        "$ref": lambda: r.choice(["#/$defs/x", "#/$defs/y"]),
    }
    if word in makers:
        return makers[word]()
    return r.randrange(4) if word[3].isupper() else r.choice([-1, 0, 1, 2, 2.5, 4])


def _nested(r: random.Random, word: str, depth: int) -> Any:
    def inner() -> Any:
        return _schema(r, depth - 1)

    if word in ("prefixItems", "allOf", "anyOf", "oneOf"):
        return [inner() for _ in range(r.randrange(1, 4))]
    if word in ("properties", "dependentSchemas"):
        return {name: inner() for name in r.sample(NAMES, r.randrange(1, 3))}
    if word == "patternProperties":
        return {pattern: inner() for pattern in r.sample(["a", "^a", "b$", "c"], r.randrange(1, 3))}
    return inner()
