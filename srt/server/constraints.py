"""Fields by which a request says what its output must be: ours, SGLang's and vLLM's; at most one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import Constraint
from sapwood.srt.server.refused import widened

T = TypeVar("T", bound=msgspec.Struct)

MAX_WHITESPACE = 64
Kind = Literal["json_schema", "regex", "ebnf", "choices", "structural_tag"]
Schema = str | dict[str, Any] | bool
"""A JSON schema as a value, or as its text."""
Tag = str | dict[str, Any]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's object of constraints: exactly one of the first six. The others say what is so anyway; what
    they could ask for else is refused."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


_FIELDS: tuple[tuple[str, Any], ...] = (
    ("json_schema", Schema | None),
    ("regex", str | None),
    ("ebnf", str | None),
    ("choices", list[str] | None),
    ("structural_tag", Tag | None),
    ("json_whitespace", int | None),
    ("guided_json", Schema | None),
    ("guided_regex", str | None),
    ("guided_choice", list[str] | None),
    ("guided_grammar", str | None),
    ("structured_outputs", StructuredOutputs | None),
)

KINDS: dict[str, Kind] = {
    "json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf", "choices": "choices",
    "structural_tag": "structural_tag", "guided_json": "json_schema", "guided_regex": "regex",
    "guided_choice": "choices", "guided_grammar": "ebnf",
}  # fmt: skip
"""What each field of constraints holds."""

_STRUCTURED: dict[str, Kind] = {
    "json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "ebnf",
    "structural_tag": "structural_tag",
}  # fmt: skip
"""The same of vLLM's object."""

_INSTEAD = {
    "whitespace_pattern": "json_whitespace bounds white space",
    "disable_additional_properties": "a schema says additionalProperties: false itself",
}

HOLDS: dict[str, str] = {
    **KINDS,
    **{f"structured_outputs.{name}": kind for name, kind in _STRUCTURED.items()},
    "structured_outputs.json_object": "json_schema",
    "response_format": "json_schema or structural_tag",
}
"""What each place of a request for constraints holds."""

_SPACED: tuple[Kind, ...] = ("json_schema", "structural_tag")
"""Kinds in which `json_whitespace` has a meaning."""

_RESPONSE_KEYS: dict[str, frozenset[str]] = {
    "text": frozenset(("type",)),
    "json_object": frozenset(("type",)),
    "json_schema": frozenset(("type", "json_schema")),
}
_SCHEMA_TYPES: dict[str, type | tuple[type, ...]] = {
    "name": str, "description": (str, type(None)), "strict": (bool, type(None)), "schema": object,
}  # fmt: skip
ANY_OBJECT = '{"type": "object"}'


class Found(NamedTuple):
    """A constraint as a request has it: where, and what."""

    field: str
    kind: Kind
    text: str


def fields(kind: type[T]) -> type[T]:
    """Adds the fields of constraints to a request's struct."""
    return widened(kind, [(name, of, None) for name, of in _FIELDS])


def read(
    body: msgspec.Struct,
    *,
    whitespace: int,
    response_format: dict[str, Any] | None = None,
    max_tokens: int | None = None,
    calls: bool = False,
) -> Constraint | None:
    """The one constraint of a request that has these fields; None if it has none.

    `whitespace` counts where the request does not say; what it says may be meant for constrained `calls` of
    tools. Raises BadRequest naming the field, or both, and if the constraint is too long.
    """
    found = [*_of_fields(body), *_of_response_format(response_format)]
    structured: StructuredOutputs | None = getattr(body, "structured_outputs", None)
    if structured is not None:
        found += _of_structured(structured)
    if len(found) > 1:
        raise BadRequest(
            f"{found[0].field} and {found[1].field} are two constraints; a request may have one",
            param=found[1].field,
        )
    given = _whitespace(body, structured, calls or any(one.kind in _SPACED for one in found))
    if not found:
        return None
    (one,) = found
    if max_tokens == 0:
        raise BadRequest(f"{one.field} needs an output: max_tokens must be above 0", param=one.field)
    return Constraint(one.kind, one.text, one.field, whitespace if given is None else given).check()


def _whitespace(body: msgspec.Struct, structured: StructuredOutputs | None, spaced: bool) -> int | None:
    """What the request says of white space, which has a meaning in a `spaced` output. Raises BadRequest."""
    given: int | None = getattr(body, "json_whitespace", None)
    if given is not None and not 0 <= given <= MAX_WHITESPACE:
        raise BadRequest(
            f"json_whitespace must be from 0 to {MAX_WHITESPACE}, got {given}", param="json_whitespace"
        )
    if given is not None and not spaced:
        raise BadRequest("json_whitespace needs a constraint to JSON", param="json_whitespace")
    if structured is None or not structured.disable_any_whitespace:
        return given
    if given:
        raise BadRequest(
            f"json_whitespace is {given}, but structured_outputs.disable_any_whitespace is true",
            param="json_whitespace",
        )
    return 0


def _of_fields(body: msgspec.Struct) -> Iterator[Found]:
    for name, _of in _FIELDS:
        value = getattr(body, name)
        if value is not None and name in KINDS:
            yield Found(name, KINDS[name], text_of(value, name))


def _of_structured(given: StructuredOutputs) -> list[Found]:
    for name, instead in _INSTEAD.items():
        if getattr(given, name) not in (None, False):
            where = f"structured_outputs.{name}"
            raise BadRequest(f"{where} is not supported: {instead}", param=where, code="unsupported")
    found = []
    for name, kind in _STRUCTURED.items():
        value, where = getattr(given, name), f"structured_outputs.{name}"
        if value is not None:
            found.append(Found(where, kind, text_of(value, where)))
    if given.json_object:
        found.append(Found("structured_outputs.json_object", "json_schema", ANY_OBJECT))
    if not found:
        raise BadRequest("structured_outputs holds no constraint", param="structured_outputs")
    return found


def _of_response_format(value: dict[str, Any] | None) -> Iterator[Found]:
    if value is None:
        return
    kind, where = value.get("type"), "response_format"
    if kind == "structural_tag":
        yield Found(where, "structural_tag", text_of(value, where))
        return
    if not isinstance(kind, str) or kind not in _RESPONSE_KEYS:
        raise BadRequest(
            "response_format.type must be text, json_object, json_schema or structural_tag, got "
            f"{str(kind)[:100]!r}",
            param="response_format",
        )
    _only(value, _RESPONSE_KEYS[kind], where)
    if kind == "json_object":
        yield Found(where, "json_schema", ANY_OBJECT)
    elif kind == "json_schema":
        yield _of_json_schema(value.get("json_schema"), f"{where}.json_schema")


def _of_json_schema(value: Any, where: str) -> Found:
    """OpenAI's object around a schema. It is enforced whether it says strict or not."""
    if not isinstance(value, dict) or "schema" not in value:
        raise BadRequest(f"{where}.schema is required with type json_schema", param=f"{where}.schema")
    _only(value, _SCHEMA_TYPES.keys(), where)
    for name, types in _SCHEMA_TYPES.items():
        if name in value and not isinstance(value[name], types):
            wanted = "true or false" if name == "strict" else "a text"
            raise BadRequest(f"{where}.{name} must be {wanted}", param=f"{where}.{name}")
    schema = value["schema"]
    # As a value only: a text here is no schema.
    return Found(f"{where}.schema", "json_schema", encoded(schema, f"{where}.schema"))


def _only(value: dict[str, Any], known: Any, where: str) -> None:
    for name in value:
        if name not in known:
            raise BadRequest(
                f"{where} has the unknown field {name[:100]!r}",
                param=f"{where}.{name[:100]}",
                code="unknown_field",
            )


def text_of(value: Any, where: str) -> str:
    """A constraint as a text: what is one already is taken as it is. Raises BadRequest."""
    if isinstance(value, list) and not value:
        raise BadRequest(f"{where} must hold at least one text", param=where)
    return value if isinstance(value, str) else encoded(value, where)


def encoded(value: Any, where: str) -> str:
    """A JSON value as its text, keys in their order. Raises BadRequest for what is none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise BadRequest(f"{where} is nested too deeply", param=where) from None
    except (TypeError, ValueError) as e:
        raise BadRequest(f"{where} is no JSON value: {e}", param=where) from None


def decoded(text: str, where: str) -> Any:
    """The value of a JSON text. Raises BadRequest if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRequest(f"{where} is nested too deeply", param=where) from None
    except ValueError as e:
        raise BadRequest(f"{where} is not JSON: {e}", param=where) from None
