"""The schema of a type, and the value of that type that an output becomes."""

from __future__ import annotations

import datetime
import enum
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest

from sapwood.lang.errors import LangError
from sapwood.lang.schema import converter_of, name_of, schema_of


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Point:
    x: int
    y: float = 0.5


@dataclass
class Shape:
    name: str
    points: list[Point]
    colour: Colour = Colour.RED
    tags: dict[str, int] = field(default_factory=dict)


class Row(TypedDict):
    name: str
    kind: Literal["a", "b"]


class Leaf(msgspec.Struct):
    value: int
    below: list[Leaf] = []


class Inner(pydantic.BaseModel):
    size: int = pydantic.Field(ge=0)


class Model(pydantic.BaseModel):
    name: str
    inner: list[Inner]
    properties: dict[str, int] = {}


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    planted: datetime.date
    below: list[Tree] = []


def another_inner() -> Any:
    class Inner(pydantic.BaseModel):
        leaf: Leaf2

    class Leaf2(pydantic.BaseModel):
        colour: Colour

    Inner.model_rebuild(_types_namespace={"Leaf2": Leaf2})
    return Inner


Other = another_inner()


@dataclass
class Both:
    inner: Inner
    other: Other
    leaf: Leaf
    model: Model | None = None


TODAY = datetime.date(2026, 2, 28)

VALUES: list[tuple[Any, str, Any]] = [
    (Point, '{"x": 1}', Point(1)),
    (
        Shape,
        '{"name": "s", "points": [{"x": 1, "y": 2}], "colour": "green", "tags": {"k": 3}}',
        Shape("s", [Point(1, 2.0)], Colour.GREEN, {"k": 3}),
    ),
    (Row, '{"name": "n", "kind": "b"}', {"name": "n", "kind": "b"}),
    (Leaf, '{"value": 1, "below": [{"value": 2}]}', Leaf(1, [Leaf(2)])),
    (Model, '{"name": "m", "inner": [{"size": 3}]}', Model(name="m", inner=[Inner(size=3)])),
    (Open, '{"name": "o", "more": 1}', Open(name="o", more=1)),  # type: ignore[call-arg]
    (Colour, '"green"', Colour.GREEN),
    (Literal["x", "y"], '"y"', "y"),
    (list[Point], '[{"x": 1, "y": 1.5}]', [Point(1, 1.5)]),
    (int, "7", 7),
    (list[Inner], '[{"size": 3}, {"size": 4}]', [Inner(size=3), Inner(size=4)]),
    (dict[str, Inner | None], '{"a": {"size": 3}, "b": null}', {"a": Inner(size=3), "b": None}),
    (
        list[Tree],
        '[{"planted": "2026-02-28", "below": [{"planted": "2026-02-28"}]}]',
        [Tree(planted=TODAY, below=[Tree(planted=TODAY)])],
    ),
    (
        Both,
        '{"inner": {"size": 1}, "other": {"leaf": {"colour": "red"}}, "leaf": {"value": 2}}',
        Both(Inner(size=1), Other(leaf={"colour": Colour.RED}), Leaf(2)),
    ),
]
WRONG = {
    Point: ['{"x": "1"}', '{"y": 1}', '{"x": 1, "z": 2}', "[]"],
    Row: ['{"name": "n", "kind": "c"}', '{"name": "n"}', '{"name": "n", "kind": "a", "more": 1}'],
    Leaf: ['{"value": 1, "below": [{"value": 1, "more": 2}]}'],
    list[Inner]: ['[{"size": -1}]', '[{"size": 1, "more": 1}]', '{"size": 1}'],
    list[Tree]: ['[{"planted": "2026-02-28", "below": [{}]}]', '[{"planted": "2026-02-28", "more": 1}]'],
    Both: [
        '{"inner": {"leaf": {"colour": "red"}}, "other": {"size": 1}, "leaf": {"value": 2}}',
        '{"inner": {"size": 1}, "other": {"leaf": {"colour": "blue"}}, "leaf": {"value": 2}}',
        '{"inner": {"size": 1}, "other": {"leaf": {"value": 2}}, "leaf": {"value": 2}}',
    ],
    Model: ['{"name": "m", "inner": [{"size": -1}]}', '{"name": "m", "inner": [{"size": 1, "more": 1}]}'],
}


@pytest.mark.parametrize(("kind", "text", "value"), VALUES)
def test_what_the_schema_allows_becomes_a_value_of_the_type(kind: Any, text: str, value: Any) -> None:
    jsonschema.Draft202012Validator(json.loads(schema_of(kind))).validate(json.loads(text))
    converted = converter_of(kind)(text)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in WRONG.items() for text in texts])
def test_the_schema_refuses_what_is_no_value_of_the_type(kind: Any, text: str) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema_of(kind)))
    assert not validator.is_valid(json.loads(text))


def test_a_property_called_properties_is_one_like_any_other() -> None:
    schema = json.loads(schema_of(Model))
    assert schema["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"é": {}}}, True])
def test_a_schema_stays_as_it_is(schema: Any) -> None:
    text = json.dumps(schema)
    assert schema_of(text) == text
    if isinstance(schema, dict):
        assert json.loads(schema_of(schema)) == schema
    assert converter_of(text)('{"é": 1}') == '{"é": 1}'


def test_what_has_no_schema_is_refused_by_name() -> None:
    class Bare:
        pass

    for kind in (Bare, 3, complex, list[Bare], dict[str, complex]):
        with pytest.raises(TypeError, match="json_schema must be a pydantic model"):
            schema_of(kind)
    with pytest.raises(ValueError, match="Expecting"):
        schema_of("{not json")


@pytest.mark.parametrize("kind", [Point, Model, Row, dict[str, Inner]])
def test_an_output_that_was_cut_names_the_type_and_the_text(kind: Any) -> None:
    with pytest.raises(LangError, match=re.escape(f"the output is no {name_of(kind)}")) as caught:
        converter_of(kind)('{"name": "n')
    assert '{"name": "n' in str(caught.value)


def test_pydantic_is_not_loaded() -> None:
    program = "import sys, sapwood.lang.schema; print('pydantic' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
