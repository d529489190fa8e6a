"""The front pass on JSON schemas: what is refused and how, references, drafts, leniency, limits."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import applicators, limits
from sapwood.srt.grammar.form import ANY, Document
from sapwood.srt.grammar.keywords import KEYWORDS, support
from sapwood.srt.grammar.schema import read
from tests.documents import allows

NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


def front(schema: Any) -> Document:
    return read(json.dumps(schema), "schema")


def refusal(schema: Any) -> str:
    with pytest.raises(BadRequest) as error:
        front(schema)
    assert error.value.status == 400
    assert error.value.param == "schema"
    return error.value.message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "foo"}, "schema at /type: type must be one or more of null,"),
        (
            {"type": "object", "properties": 5},
            "at /properties: properties must be an object of schemas, got 5",
        ),
        ({"$ref": "#/nope"}, 'at /$ref: "#/nope" leads to no place'),
        ({"properties": {"a/b": {"$ref": "other.json#/x"}}}, "at /properties/a~1b/$ref"),
        ({"$ref": "https://example.com/s.json"}, "leads to no place in the schema"),
        ({"pattern": "("}, 'at /pattern: "(" is no pattern: an unmatched ( at position 0'),
        (5, "a schema is an object, true or false, got 5"),
        ("x", 'got "x"'),
        ([], "got []"),
        (None, "got null"),
        ({"type": "string", "minLength": 5, "maxLength": 1}, "admits no value (see /minLength)"),
        ({"minimum": "1"}, 'at /minimum: minimum must be a number, got "1"'),
        ({"minLength": -1}, "at /minLength: minLength must be a whole number from 0 to 2147483647, got -1"),
        ({"required": "a"}, "at /required"),
        ({"oneOf": []}, "at /oneOf: oneOf must be a list that is not empty, got []"),
        ({"anyOf": [{}, 5]}, "at /anyOf"),
        ({"multipleOf": 0}, "at /multipleOf"),
        ({"items": {"properties": {"a": {"type": ["string", "foo"]}}}}, "at /items/properties/a/type"),
        ({"not": 7}, "at /not"),
        ({"enum": "a"}, "at /enum"),
        ({"additionalProperties": "no"}, "at /additionalProperties"),
        ({"dependentRequired": {"a": "b"}}, "at /dependentRequired"),
        ({"items": [{}], "prefixItems": [{}]}, "at /items: items is no list beside prefixItems"),
        ({"if": {"anyOf": 5}, "unevaluatedProperties": False}, "at /if/anyOf: anyOf must be a list"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, place: str) -> None:
    assert place in refusal(schema)


@pytest.mark.parametrize("text", ["", "{", "nope", '{"a": NaN}', "[" * 5000, '{"minimum": 1e999999999}'])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        read(text, "schema")


def test_numbers_beyond_doubles_can_be_shown() -> None:
    with pytest.raises(BadRequest, match=r"at /type: type must be one or more of .*, got 99999"):
        read('{"type": ' + "9" * 390 + ".5}", "schema")


def test_lone_surrogates_are_refused() -> None:
    assert "lone surrogate" in refusal({"properties": {"\ud800": {}}})
    assert "lone surrogate" in refusal({"const": ["\udfff"]})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "at /uniqueItems"),
        ({"properties": {"a": {"type": "array", "contains": {"type": "null"}}}}, "at /properties/a/contains"),
        ({"type": "array", "maxItems": 3, "contains": {}, "maxContains": 1}, "at /maxContains"),
        ({"$dynamicRef": "#x"}, "at /$dynamicRef: it is not supported"),
        ({"type": "string", "nullable": True}, "at /nullable"),
        ({"type": "number", "not": {"multipleOf": 2}}, "at /multipleOf"),
        ({"type": "object", "minProperties": 2}, "at /minProperties"),
        ({"not": {"format": "email"}}, "at /format"),
        ({"patternProperties": {"^(?=a)": {}}}, "at /patternProperties"),
        (
            {"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False},
            "at /unevaluatedProperties",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_or_if_lenient_a_warning(schema: dict[str, Any], place: str) -> None:
    assert place in refusal(schema)
    document = front({**schema, "x-lenient": True})
    assert place in document.warnings[0]
    # A `not` that cannot be told without a keyword in it is not enforced either.
    assert len(document.warnings) == 1 + ("not" in schema)
    effect = "; null is not admitted by it" if "nullable" in schema else "; not enforced"
    assert all(warning.endswith(effect) for warning in document.warnings)


@pytest.mark.parametrize(
    ("schema", "yes", "no", "warned"),
    [
        (
            {
                "properties": {"a": {"type": "integer"}},
                "additionalProperties": False,
                "patternProperties": {"^(?=x)": {}, "^y": {"type": "null"}},
            },
            [{"a": 1}, {"y1": None}],
            [{"a": "x"}, {"b": 1}, {"y1": 1}],
            ["patternProperties"],
        ),
        (
            {"type": "array", "maxItems": 4, "contains": {"type": "null"}, "minContains": 2},
            [[None], [1, None]],
            [[], [1]],
            ["minContains"],
        ),
        (
            {"items": {"type": "integer"}, "maxItems": 3, "contains": {"const": 1}, "uniqueItems": True},
            [[1, 1], [2, 1]],
            [[2], ["a"]],
            ["uniqueItems"],
        ),
        (
            {
                "allOf": [
                    {"type": "object"},
                    {"propertyNames": {"not": {"format": "date"}}},
                    {"required": ["a"]},
                ]
            },
            [{"a": 1}],
            [{}, 1],
            ["format", "not"],
        ),
        (
            {"type": "number", "if": {"multipleOf": 2}, "then": {"minimum": 3}},
            [2],
            ["a"],
            ["multipleOf", "if", "then"],
        ),
    ],
)
def test_leniency_leaves_out_only_what_cannot_be_enforced(
    schema: dict[str, Any], yes: list[Any], no: list[Any], warned: list[str]
) -> None:
    document = front({**schema, "x-lenient": True})
    assert [allows(document, value) for value in yes + no] == [True] * len(yes) + [False] * len(no)
    places = [warning.split(": ")[0] for warning in document.warnings]
    assert [place.rpartition("/")[2] for place in places] == warned


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?=.*[0-9])[a-z0-9]+$",
        "(?!x)y",
        r"\bword\b",
        r"(a)\1",
        "(",
        "[",
        "a{2,1}",
        "*",
        r"\p{Nope}",
        "(?i)a",
    ],
)
def test_patterns_that_are_not_regular_or_none_are_refused_by_name(pattern: str) -> None:
    assert f"schema at /pattern: {json.dumps(pattern)}" in refusal({"pattern": pattern})


@pytest.mark.parametrize(
    "schema", [{"type": "foo"}, {"properties": 5}, {"$ref": "#/nope"}, {"oneOf": []}, {"pattern": "("}]
)
def test_leniency_is_for_keywords_and_not_for_what_is_no_schema(schema: dict[str, Any]) -> None:
    refusal({**schema, "x-lenient": True})


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "object", "properties": {"x": {"type": "string", "enum": []}}, "required": ["x"]},
        {"properties": {"x": False}, "required": ["x"], "type": "object"},
        {"enum": []},
        {"type": "array", "prefixItems": [False], "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"allOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"},
        {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 10},
        {"type": "object", "maxProperties": 1, "required": ["a", "b"]},
        {"type": "object", "required": ["a"], "propertyNames": {"maxLength": 0}},
        {"const": 1, "type": "string"},
        {"not": {}},
    ],
)
def test_schemas_that_admit_nothing_are_refused(schema: Any) -> None:
    assert "the schema admits no value" in refusal(schema)


def test_a_part_that_admits_nothing_is_left_out_where_it_may_be() -> None:
    document = front({"type": "object", "properties": {"a": {"enum": []}, "b": {"type": "null"}}})
    assert allows(document, {"b": None})
    assert not allows(document, {"a": 1})
    infinite = {
        "$defs": {"x": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/x"}}}}
    }
    document = front({**infinite, "type": "array", "items": {"$ref": "#/$defs/x"}})
    assert allows(document, [])
    assert not allows(document, [{"x": {}}])


@pytest.mark.parametrize("schema", [True, {}, {"title": "anything", "x-mine": 5, "default": 3}])
def test_an_empty_schema_is_any_json(schema: Any) -> None:
    assert front(schema).form == ANY


def test_recursive_schemas() -> None:
    document = front(NODE)
    tree = {"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]}
    assert allows(document, tree)
    assert not allows(document, {"name": "a", "children": [{"children": []}]})
    assert not allows(document, {"name": "a", "children": [{"name": "b", "more": 1}]})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"not": {"$ref": "#"}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
    ],
)
def test_references_that_lead_back_without_a_value_are_refused(schema: Any) -> None:
    assert "leads back to itself without a value" in refusal(schema)


def test_recursive_schemas_are_met_and_told_apart() -> None:
    tree = {"type": "object", "properties": {"l": {"$ref": "#/$defs/tree"}, "v": {"type": "integer"}}}
    large = {"type": "object", "properties": {"l": {"$ref": "#/$defs/large"}, "v": {"minimum": 3}}}
    schema = {"$defs": {"tree": tree, "large": large}, "allOf": [{"$ref": "#/$defs/tree"}]}
    both = front({**schema, "allOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/large"}]})
    assert allows(both, {"v": 3, "l": {"l": {"v": 4}}})
    assert not allows(both, {"v": 3, "l": {"l": {"v": 2}}})
    assert not allows(both, {"v": 3, "l": {"l": {"v": 4.5}}})
    apart = front({**schema, "not": {"$ref": "#/$defs/large"}})
    assert allows(apart, {"v": 3, "l": {"l": {"v": 2}}})
    assert not allows(apart, {"v": 3, "l": {"l": {"v": 4}}})


def test_property_names_do_not_hide_additional_properties() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    document = front(
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {**inner, "additionalProperties": False},
        }
    )
    assert allows(document, {"a": {"n": 1}})
    assert not allows(document, {"a": "plain"})


def test_prefix_items_need_not_all_be_there() -> None:
    document = front({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]})
    for value in ([], ["a"], ["a", 1], ["a", 1, True]):
        assert allows(document, value)
    assert not allows(document, ["a", "b"])


def test_old_drafts_are_read_by_their_own_rules() -> None:
    draft7 = "http://json-schema.org/draft-07/schema#"
    beside = {
        "definitions": {"a": {"type": "integer"}},
        "properties": {"x": {"$ref": "#/definitions/a", "maximum": 2}},
    }
    assert not allows(front(beside), {"x": 3})
    document = front({**beside, "$schema": draft7})
    assert allows(document, {"x": 3})
    assert "/properties/x/maximum: it has no effect beside $ref in draft 7" in document.warnings[0]
    document = front({"$schema": "http://json-schema.org/draft-04/schema#", "if": {}, "then": False})
    assert allows(document, 1)
    assert ["at /if" in warning or "at /then" in warning for warning in document.warnings] == [True]
    items = front({"items": [{"type": "string"}], "additionalItems": {"type": "null"}})
    assert allows(items, ["a", None])
    assert not allows(items, ["a", 1])
    exclusive = front({"minimum": 1, "exclusiveMinimum": True})
    assert [allows(exclusive, number) for number in (1, 1.5)] == [False, True]
    dependent = front({"dependencies": {"a": ["b"], "c": {"properties": {"d": False}}}})
    cases = [({"a": 1}, False), ({"a": 1, "b": 1}, True), ({"c": 1, "d": 1}, False), ({"d": 1}, True)]
    assert all(allows(dependent, value) == valid for value, valid in cases)


def test_required_names_that_are_not_declared_take_the_form_of_others() -> None:
    document = front(
        {"required": ["x"], "additionalProperties": {"type": "integer"}, "properties": {"a": {}}}
    )
    assert allows(document, {"x": 1})
    assert not allows(document, {"x": "no"})
    assert not allows(document, {})


def test_properties_stand_in_the_schemas_order() -> None:
    common = {"required": ["kind", "name"], "properties": {"name": {"type": "string"}}}
    document = front(
        {"allOf": [common, {"properties": {"kind": {"const": "a"}, "size": {"type": "integer"}}}]}
    )
    assert allows(document, {"name": "x", "kind": "a", "size": 1}, ordered=True)
    assert not allows(document, {"kind": "a", "name": "x"}, ordered=True)
    needs = {"dependencies": {"a": ["b", "c"], "b": ["d"]}}
    document = front({"type": "object", "allOf": [needs, {"required": ["a"]}]})
    assert allows(document, dict.fromkeys("abcd"), ordered=True)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": list(range(limits.MAX_ENUM + 1))}, "more than 4096 values"),
        ({"anyOf": [{"enum": list(range(3000))}, {"enum": list(range(3000))}]}, "more than 4096 values"),
        ({"description": "x" * limits.MAX_TEXT}, "above the limit 65536"),
    ],
)
def test_limits_are_named(schema: Any, reason: str) -> None:
    assert reason in refusal(schema)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"oneOf": [{"properties": {"a": schema}}, {"properties": {"b": schema}}], "type": "object"}
    return schema


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tagged(count: int) -> dict[str, Any]:
    rest = {f"p{i}": {"type": "string"} for i in range(10)}
    tags = [{"properties": {"kind": {"const": f"k{i}"}, **rest}, "required": ["kind"]} for i in range(count)]
    return {"type": "object", "oneOf": tags}


BOMBS: dict[str, Any] = {
    "nested oneOf": _nested(8),
    "nested objects": _deep(30),
    "too deep": _deep(400),
    "products of anyOf": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(6)]} for i in range(8)]
    },
    "pairs of required": {
        "allOf": [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"]}]} for i in range(12)]
    },
    "a billion laughs": {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(40)} | {"d40": {}},
        "$ref": "#/$defs/d0",
    },
    "a chain of references": {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "minimum": i} for i in range(700)} | {"d700": {}},
        "$ref": "#/$defs/d0",
    },
    "overlapping patterns": {
        "patternProperties": {f"[{a}{b}]": {"minimum": ord(a)} for a in "abcdefghij" for b in "xyz"}
    },
    "catastrophic patterns": {"enum": ["a" * 12 + str(i) for i in range(3000)], "pattern": "^(a+)+$"},
    "patterns together": {
        "type": "string",
        "allOf": [{"pattern": f"{a}.{{20}}{b}"} for a in "abcdef" for b in "ghi"],
    },
    "large repeats": {"type": "string", "pattern": "(a{900}){900}", "minLength": 5000},
    "one of many objects": {
        "oneOf": [{"type": "object", "properties": {f"p{i}_{j}": {} for j in range(9)}} for i in range(40)]
    },
    "not many properties": {"not": {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}},
    "dependencies": {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(12)}},
    "many properties many times": {
        "allOf": [{"properties": {f"p{i}": {"minimum": k} for i in range(300)}} for k in range(8)]
    },
    "many choices": {
        "type": "object",
        "properties": {f"p{i}": {} for i in range(30)},
        "additionalProperties": False,
        "minProperties": 15,
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon(name: str) -> None:
    start = time.process_time()
    with contextlib.suppress(BadRequest):
        front(BOMBS[name])
    # By a budget of steps and not by a clock: the same on a slow machine. Here the worst take half a second.
    assert time.process_time() - start < 2.0


def test_a_hundred_tagged_alternatives_are_no_bomb() -> None:
    document = front(_tagged(60))
    assert len(document.form) == 60
    assert allows(document, {"kind": "k59", "p3": "x"})
    assert not allows(document, {"kind": "k60", "p3": "x"})


VOCABULARY = """
$schema $id $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs prefixItems items
contains additionalProperties properties patternProperties dependentSchemas propertyNames if then
else allOf anyOf oneOf not unevaluatedItems unevaluatedProperties type const enum multipleOf maximum
exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern maxItems minItems uniqueItems
maxContains minContains maxProperties minProperties required dependentRequired title description
default deprecated readOnly writeOnly examples format contentEncoding contentMediaType contentSchema
"""


def test_the_table_has_every_keyword_of_the_draft() -> None:
    assert set(VOCABULARY.split()) <= set(KEYWORDS)


def test_what_the_table_says_is_enforced_is_read_and_nothing_else() -> None:
    stepped = {word for words, _ in applicators.STEPS for word in words} | set(applicators.BESIDE)
    naming = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions"}
    enforced = {name for name, keyword in KEYWORDS.items() if keyword.status in ("full", "limited")}
    assert enforced == stepped | naming


def test_support_is_json_and_names_every_keyword() -> None:
    told = json.loads(json.dumps(support()))
    assert set(told["keywords"]) == set(KEYWORDS)
    assert told["keywords"]["uniqueItems"]["status"] == "limited"
    assert "date-time" in told["formats"]
