"""Typed outputs: the JSON schema that a type asks for, and the value that its text becomes.

A type is a pydantic model (known by its methods: pydantic is never imported), a dataclass, TypedDict,
msgspec.Struct, enum, Literal, or one that is made of such (`list[Point]`). A schema as a dict or a text is
taken as it is; its value is the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

from sapwood.lang.errors import LangError

T = TypeVar("T")


def schema_of(kind: Any) -> str:
    """The JSON schema, as a text, of what an output must be.

    >>> schema_of(dict[str, int])
    '{"type": "object", "additionalProperties": {"type": "integer"}}'

    Objects of a type have no properties but those that it names, unless it says otherwise (pydantic's
    `extra="allow"`). Raises TypeError for what is no type with a schema, ValueError for text that is no JSON.
    """
    if isinstance(kind, str):
        json.loads(kind)
        return kind
    if isinstance(kind, dict):
        return json.dumps(kind, ensure_ascii=False, allow_nan=False)
    schema = kind.model_json_schema() if _is_pydantic(kind) else _schema_of_type(kind)
    return json.dumps(_closed(schema), ensure_ascii=False)


@overload
def converter_of(kind: type[T]) -> Callable[[str], T]: ...
@overload
def converter_of(kind: str | dict[str, Any]) -> Callable[[str], str]: ...
@overload
def converter_of(kind: Any) -> Callable[[str], Any]: ...
def converter_of(kind: Any) -> Callable[[str], Any]:
    """What makes a value of type `kind` of a JSON text. It raises LangError, with the text, for one that is
    none (an output that `max_tokens` has cut, say)."""
    if isinstance(kind, (str, dict)):
        return str
    if _is_pydantic(kind):
        return functools.partial(_convert, name_of(kind), kind.model_validate_json)
    try:
        decoder = msgspec.json.Decoder(kind, dec_hook=_read_pydantic)
    except TypeError as e:
        raise _no_schema(kind, e) from None
    return functools.partial(_convert, name_of(kind), decoder.decode)


def name_of(kind: Any) -> str:
    """What a type is called in messages."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _is_pydantic(kind: Any) -> bool:
    return (
        isinstance(kind, type) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json")
    )


def _schema_of_type(kind: Any) -> dict[str, Any]:
    parts = _PydanticParts()
    try:
        schema = msgspec.json.schema(kind, schema_hook=parts.schema_of)
    except TypeError as e:
        raise _no_schema(kind, e) from None
    if parts.definitions:
        schema["$defs"] = schema.get("$defs", {}) | parts.definitions
    return schema


class _PydanticParts:
    """The pydantic models within another type. `definitions` are what their schemas refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._known: dict[type, dict[str, Any]] = {}

    def schema_of(self, kind: type) -> dict[str, Any]:
        """Raises NotImplementedError, as msgspec asks for, for what is no model."""
        if not _is_pydantic(kind):
            raise NotImplementedError
        if kind not in self._known:
            # Models of the same name, and msgspec's own types, must not share a definition.
            prefix = f"{len(self._known)}."
            schema = kind.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")  # type: ignore[attr-defined]
            for name, definition in schema.pop("$defs", {}).items():
                self.definitions[prefix + name] = definition
            self._known[kind] = schema
        return self._known[kind]


def _read_pydantic(kind: type, value: Any) -> Any:
    """As JSON, in which a model takes a text for a date, say, where it may not in Python."""
    if not _is_pydantic(kind):
        raise NotImplementedError
    return kind.model_validate_json(json.dumps(value))  # type: ignore[attr-defined]


def _no_schema(kind: Any, error: TypeError) -> TypeError:
    return TypeError(
        f"json_schema must be a pydantic model, a dataclass, a TypedDict, a msgspec.Struct, an enum, or a "
        f"schema as a dict or a text; {name_of(kind)} has no JSON schema: {error}"
    )


def _convert(name: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    # pydantic's errors are ValueErrors; msgspec's are not.
    except (ValueError, msgspec.MsgspecError) as e:
        raise LangError(f"the output is no {name}: {e}; it is {text!r}") from e


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_PARTS = ("items", "additionalProperties")


def _closed(schema: Any) -> Any:
    """The schema with objects that are closed where it does not say. What `allOf` joins stays as it is: each
    of its parts would shut the others' properties out."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            closed[name] = {key: _closed(value) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            closed[name] = [_closed(value) for value in schema[name]]
    for name in _PARTS:
        if name in schema:
            closed[name] = _closed(schema[name])
    if "properties" in schema and "allOf" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed
