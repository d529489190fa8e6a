"""The text of a schema as a tree of places, named by JSON pointers, and where its references lead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import limits

_DECLARED = {"draft-03": "4", "draft-04": "4", "draft-06": "6", "draft-07": "7", "draft/2019-09": "2019-09"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_DATA = ("enum", "const", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def decode(text: str, field: str) -> Any:
    """The value of a JSON text, its numbers exact. Raises BadRequest naming `field` and the limit broken."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.MAX_TEXT:
        raise BadRequest(f"{field} has {size} bytes, above the limit {limits.MAX_TEXT}", param=field)
    try:
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_constant)
    except RecursionError:
        raise BadRequest(f"{field} is nested deeper than {limits.MAX_DEPTH}", param=field) from None
    except ValueError as error:
        raise BadRequest(f"{field} is no JSON: {error}", param=field) from None
    _check(value, field)
    return value


def _number(digits: str) -> Fraction:
    # A few digits can write a number that fills the memory.
    value = Decimal(digits) if len(digits) <= limits.MAX_DIGITS else Decimal("Infinity")
    if not value.is_finite() or (value and not -limits.MAX_DIGITS <= value.adjusted() <= limits.MAX_DIGITS):
        raise ValueError(f"the number {digits[:40]} has more than {limits.MAX_DIGITS} digits")
    return Fraction(value)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check(value: Any, field: str) -> None:
    layer, depth = [value], 0
    while layer:
        if depth > limits.MAX_DEPTH:
            raise BadRequest(f"{field} is nested deeper than {limits.MAX_DEPTH}", param=field)
        texts = [part for part in layer if isinstance(part, str)]
        texts += [name for part in layer if isinstance(part, dict) for name in part]
        if any(not text.isascii() and _SURROGATE.search(text) for text in texts):
            raise BadRequest(f"{field} has a lone surrogate, which no text may have", param=field)
        layer = [
            child
            for part in layer
            if isinstance(part, (dict, list))
            for child in (part.values() if isinstance(part, dict) else part)
        ]
        depth += 1


def below(pointer: str, *tokens: str | int) -> str:
    """The pointer of a place below this one."""
    for token in tokens:
        text = str(token)
        pointer += "/" + (text.replace("~", "~0").replace("/", "~1") if "~" in text or "/" in text else text)
    return pointer


class Places:
    """All places of one document. `draft`: the one it declares, or the newest. `old`: what stands beside a
    $ref is ignored, as up to draft 7."""

    def __init__(self, root: Any) -> None:
        self.root = root
        declared = root.get("$schema") if isinstance(root, dict) else None
        named = declared.partition("json-schema.org/")[2] if isinstance(declared, str) else ""
        self.draft = next((draft for part, draft in _DECLARED.items() if named.startswith(part)), "2020-12")
        self.old = self.draft in ("4", "6", "7")
        self._identifier = "id" if self.draft == "4" else "$id"
        self._values: dict[str, Any] = {}
        self._resources: dict[str, str] = {"": ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._bases: dict[str, str] = {}
        self._index()

    def at(self, pointer: str) -> Any:
        """The value at a place. Raises KeyError if there is none."""
        if pointer not in self._values:
            self._values[pointer] = self._walked(pointer)
        return self._values[pointer]

    def _walked(self, pointer: str) -> Any:
        value = self.root
        for token in pointer.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 8:
                if int(name) >= len(value) or (name[0] == "0" and name != "0"):
                    raise KeyError(pointer)
                value = value[int(name)]
            else:
                raise KeyError(pointer)
        return value

    def resolve(self, pointer: str, reference: str) -> str:
        """The place that a $ref at this place leads to. Raises KeyError if it is none in the document."""
        target, fragment = urldefrag(reference)
        base = self._base(pointer)
        address = _joined(base, target) if target else base
        start = self._resources[address]
        name = unquote(fragment, errors="strict")
        if name and not name.startswith("/"):
            return self._anchors[(address, name)]
        found = start + name
        self.at(found)
        return found

    def _base(self, pointer: str) -> str:
        while pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases[pointer]

    def _index(self) -> None:
        self._bases[""] = ""
        todo: list[tuple[Any, str, str]] = [(self.root, "", "")]
        while todo:
            schema, pointer, base = todo.pop()
            if not isinstance(schema, dict):
                continue
            identifier = schema.get(self._identifier)
            if isinstance(identifier, str) and not (self.old and "$ref" in schema):
                base = self._named(pointer, base, identifier)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    self._anchors.setdefault((base, schema[keyword]), pointer)
            todo += [(child, below(pointer, *path), base) for child, path in _schemas_in(schema)]

    def _named(self, pointer: str, base: str, identifier: str) -> str:
        try:
            address, fragment = urldefrag(identifier)
        except ValueError:
            return base
        if address:
            base = _joined(base, address)
            self._resources.setdefault(base, pointer)
            self._bases[pointer] = base
        if fragment and not fragment.startswith("/"):
            self._anchors.setdefault((base, fragment), pointer)
        return base


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[Any, tuple[str | int, ...]]]:
    """Whatever may be a schema within one, with its path: unknown keywords too, as a $ref may lead there."""
    for keyword, value in schema.items():
        if keyword in _DATA:
            continue
        if isinstance(value, list):
            yield from ((child, (keyword, i)) for i, child in enumerate(value))
        elif isinstance(value, dict) and keyword in _NAMED:
            yield from ((child, (keyword, name)) for name, child in value.items())
        elif isinstance(value, dict):
            yield value, (keyword,)
