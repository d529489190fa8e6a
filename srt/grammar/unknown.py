"""What stands in a schema and means nothing here: names that are no keywords, formats that are not enforced.

JSON Schema takes both for annotations, so they are no errors; but most of them are slips of the pen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from sapwood.srt.grammar.formats import FORMATS
from sapwood.srt.grammar.keywords import KEYWORDS, LENIENT
from sapwood.srt.grammar.places import Places, below

_SHOWN = 40
"""Characters of a name in a warning."""
_QUIET = frozenset(("discriminator", "example", "externalDocs", "xml"))
"""Annotations of OpenAPI, which writers of schemas put into them."""
_HINTED = 16
"""So many are looked up among the keywords: that takes a millisecond each."""

Found = tuple[str, str, str]
"""(pointer of a schema, keyword, why it has no effect)"""


def unknown(places: Places) -> Iterator[Found]:
    """All that means nothing, in the order of the schema; of what a reference leads to, too."""
    targets = set(_targets(places))
    ways = _ways(targets)
    seen: set[str] = set()
    hinted = 0
    todo = [*sorted(targets, reverse=True), ""]
    while todo:
        pointer = todo.pop()
        schema = places.at(pointer)
        if pointer in seen or not isinstance(schema, dict):
            continue
        seen.add(pointer)
        for name, value in schema.items():
            reason, known = _reason(name, value, at_top=not pointer)
            # What a reference leads through is a place for schemas, whatever it is called.
            if not reason or below(pointer, name) in ways:
                continue
            if known and hinted < _HINTED:
                reason += _hint(value if name == "format" else name, known)
                hinted += 1
            yield pointer, name, reason
        todo += reversed([below(pointer, *path) for path in _parts(schema)])


def _reason(name: str, value: Any, at_top: bool) -> tuple[str, Mapping[str, Any]]:
    """Why a member has no effect (empty if it has one, or is meant to have none), and what may be meant."""
    if name == LENIENT:
        return ("" if at_top else "it counts at the schema's top only"), {}
    if name == "format":
        known = not isinstance(value, str) or value in FORMATS
        return ("" if known else f"the format {_quoted(value)} is none of those that are enforced"), FORMATS
    if name in KEYWORDS or name in _QUIET or name.startswith("x-"):
        return "", {}
    return "it is no keyword", KEYWORDS


def _hint(name: str, known: Mapping[str, Any]) -> str:
    lowered = {one.lower(): one for one in known}
    near = get_close_matches(name.lower()[:_SHOWN], lowered, 1, 0.75)
    return f" (is {lowered[near[0]]} meant?)" if near else ""


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """The paths of the schemas that a schema's keywords hold."""
    for name, value in schema.items():
        keyword = KEYWORDS.get(name)
        kind = "" if keyword is None or keyword.status == "annotation" else keyword.value
        if isinstance(value, list) and (kind == "list" or name == "items") and name != "enum":
            yield from ((name, i) for i in range(len(value)))
        elif isinstance(value, dict) and (kind == "schemas" or name == "dependencies"):
            yield from ((name, key) for key in value)
        elif isinstance(value, dict) and (kind == "schema" or name == "items"):
            yield (name,)


def _ways(targets: Iterable[str]) -> set[str]:
    """The pointers of some places, and of all that these are in."""
    found: set[str] = set()
    for pointer in targets:
        while pointer and pointer not in found:
            found.add(pointer)
            pointer = pointer.rpartition("/")[0]
    return found


def _targets(places: Places) -> Iterator[str]:
    """The places that references lead to, as far as these are places."""
    todo: list[tuple[str, Any]] = [("", places.root)]
    while todo:
        pointer, value = todo.pop()
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                with suppress(KeyError, ValueError):  # refused where it is read
                    yield places.resolve(pointer, reference)
            todo += [(below(pointer, name), part) for name, part in value.items()]
        elif isinstance(value, list):
            todo += [(below(pointer, i), part) for i, part in enumerate(value)]
