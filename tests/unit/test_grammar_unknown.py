"""What means nothing in a schema is told: no keyword, format or flag is dropped without a word."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sapwood.srt.grammar.compile import MAX_WARNINGS, compile_constraint
from sapwood.srt.grammar.schema import read
from sapwood.srt.params import Constraint
from tests.grammars import engine
from tests.unit.test_grammar_schema import front, refusal


def test_a_misspelt_keyword_is_named_with_its_place_and_the_one_that_may_be_meant() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxlength": 3}}, "foo": 1}
    assert front(schema).warnings == (
        "schema at /foo: it is no keyword; not enforced",
        "schema at /properties/a/maxlength: it is no keyword (is maxLength meant?); not enforced",
    )


def test_a_format_that_is_not_enforced_is_named() -> None:
    (near,) = front({"type": "string", "format": "datetime"}).warnings
    assert near.startswith("schema at /format: the format 'datetime' is none of those that are enforced")
    assert near.endswith(" (is date-time meant?); not enforced")
    (far,) = front({"items": {"format": "x" * 100}}).warnings
    assert far.startswith(f"schema at /items/format: the format '{'x' * 40}...' is none")
    assert front({"type": "string", "format": "date-time"}).warnings == ()


@pytest.mark.parametrize(
    "place",
    [
        "properties/a", "patternProperties/^a", "$defs/a", "definitions/a", "items", "items/0",
        "prefixItems/0", "additionalProperties", "propertyNames", "contains", "allOf/0", "anyOf/0", "oneOf/0",
        "not", "if", "then", "else", "dependentSchemas/a", "dependencies/a", "unevaluatedProperties",
        "additionalItems", "unevaluatedItems",
    ],
)  # fmt: skip
def test_every_place_of_a_schema_is_looked_at(place: str) -> None:
    inner: Any = {"type": "string", "maxlength": 3}
    for step in reversed(place.split("/")):
        inner = [inner] if step == "0" else {step: inner}
    document = front({**inner, "x-lenient": True})
    assert any(f"schema at /{place}/maxlength: it is no keyword" in text for text in document.warnings)


def test_what_is_data_or_an_annotation_is_quiet() -> None:
    quiet = {
        "title": "t", "description": "d", "default": {"maxlength": 1}, "examples": [{"maxlength": 1}],
        "$comment": "c", "deprecated": True, "readOnly": True, "writeOnly": True, "contentEncoding": "base64",
        "contentMediaType": "text/plain", "contentSchema": {"maxlength": 1}, "x-mine": {"maxlength": 1},
        "discriminator": {"propertyName": "kind"}, "example": 1, "const": {"maxlength": 1},
    }  # fmt: skip
    assert front(quiet).warnings == ()
    assert front({"enum": [{"maxlength": 1}]}).warnings == ()
    assert front({"properties": {"maxlength": {"type": "null"}, "default": {"$ref": "#"}}}).warnings == ()


def test_what_a_reference_leads_through_is_no_slip() -> None:
    parts = {"schemas": {"a": {"type": "integer", "maximun": 3}}}
    schema = {"components": parts, "properties": {"x": {"$ref": "#/components/schemas/a"}}}
    assert front(schema).warnings == (
        "schema at /components/schemas/a/maximun: it is no keyword (is maximum meant?); not enforced",
    )
    (unused,) = front({"components": parts}).warnings
    assert unused.startswith("schema at /components: it is no keyword")


def test_leniency_is_a_flag_at_the_top() -> None:
    for value in ("true", 1, None, {}):
        said = refusal({"x-lenient": value})
        assert said == f"schema at /x-lenient: x-lenient must be true or false, got {json.dumps(value)}"
    (warning,) = front({"properties": {"a": {"x-lenient": True}}}).warnings
    assert warning == "schema at /properties/a/x-lenient: it counts at the schema's top only; not enforced"
    inside = {"properties": {"a": {"x-lenient": True, "type": "number", "maxContains": 2}}}
    assert "at /properties/a/maxContains: it is not supported" in refusal(inside)


def test_a_refusal_that_leniency_would_turn_into_a_warning_says_so() -> None:
    hint = '; "x-lenient": true at the top of the schema makes this a warning'
    for schema in ({"maxContains": 1}, {"pattern": "(?=a)"}, {"uniqueItems": True, "type": "array"}):
        assert refusal(schema).endswith(hint)
        assert front({**schema, "x-lenient": True}).warnings
    for schema in ({"pattern": "("}, {"type": "foo"}, {"$ref": "#/x"}, {"enum": []}):
        assert hint not in refusal(schema)


def test_at_the_top_is_said_so() -> None:
    assert refusal(5) == "schema at the top: a schema is an object, true or false, got 5"
    assert refusal({"enum": []}) == "schema at the top: the schema admits no value (see /enum)"


def test_nullable_does_not_admit_null() -> None:
    (warning,) = front({"type": "string", "nullable": True, "x-lenient": True}).warnings
    assert warning.endswith("write a list of types); null is not admitted by it")


def test_a_grammar_has_few_warnings_and_says_how_many_there_are() -> None:
    def warnings(count: int) -> list[str]:
        schema = {f"zz{i}": 1 for i in range(count)}
        return compile_constraint(Constraint("json_schema", json.dumps(schema), "f"), engine()).warnings

    assert len(warnings(MAX_WARNINGS)) == MAX_WARNINGS
    many = warnings(MAX_WARNINGS + 30)
    assert many[:-1] == warnings(MAX_WARNINGS)
    assert many[-1] == "and 30 more"


def test_thousands_of_slips_cost_little() -> None:
    schema: dict[str, Any] = {f"maxlengt{i}": {} for i in range(1500)}
    schema["properties"] = {f"p{i}": {"$ref": f"#/maxlengt{i}"} for i in range(500)}
    began = time.process_time()
    document = read(json.dumps(schema), "schema")
    assert time.process_time() - began < 1
    assert len(document.warnings) == 1000
