"""Documents as grammars: what is allowed is what the forms say, in one order and layout."""

from __future__ import annotations

import itertools
import json
import random
from fractions import Fraction
from typing import Any

import pytest

from sapwood.srt.grammar.form import (
    ANY,
    Array,
    Boolean,
    Document,
    Form,
    Null,
    Number,
    Object,
    Others,
    Property,
    Ref,
    String,
)
from sapwood.srt.grammar.lark import Emitter
from sapwood.srt.grammar.members import MAX_OPTIONAL
from sapwood.srt.grammar.rules import MAX_NESTED, MAX_TEXT, Rules, repeated
from tests.grammars import compiled, engine, refusal, takes

INTEGER: Form = (Number(integer=True),)
WORD: Form = (String(values=("a", "b")),)


def matcher(form: Form, rules: dict[str, Form] | None = None, whitespace: int = 0) -> Any:
    written = Rules()
    whole = Emitter(written, Document(form, rules or {}), whitespace, engine().admits).document()
    return None if whole is None else engine().compile(written.text(whole))


def dumps(value: object) -> str:
    return json.dumps(value)


def test_p32_escapes_count_as_one_character() -> None:
    short = compiled("json_schema", {"type": "string", "maxLength": 20})
    for text in (
        '"a\\nb"',
        '"say \\"hi\\""',
        '"\\u00e9"',
        '"\u00e9"',
        '"' + "\\u00E9" * 20 + '"',
        '"\\ud83d\\ude00"',
    ):
        assert takes(short, text), text
    for text in ('"' + "\\n" * 21 + '"', '"\n"', '"\\ud83d"', '"\\x"', '"\\/"', '"a', "a"):
        assert not takes(short, text), text
    quotes = compiled("json_schema", {"type": "string", "pattern": '^[a-z"]+$'})
    assert takes(quotes, '"a\\"b"')
    assert takes(quotes, '"\\u0022"')
    assert not takes(quotes, '"a1"')
    exact = compiled("json_schema", {"type": "string", "minLength": 3, "maxLength": 3})
    assert [takes(exact, dumps("x" * n)) for n in (2, 3, 4)] == [False, True, False]


def test_p30_prefix_items_need_not_all_be_there() -> None:
    pair = compiled(
        "json_schema", {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    )
    for value in ([], ["a"], ["a", 1], ["a", 1, True, None]):
        assert takes(pair, dumps(value)), value
    assert not takes(pair, dumps(["a", "b"]))


def test_p34_white_space_is_fixed_or_bounded() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "number"}}},
    }
    fixed, loose = compiled("json_schema", schema), compiled("json_schema", schema, whitespace=2)
    value = {"a": 1, "b": [1.5, 2]}
    assert takes(fixed, dumps(value))
    assert not takes(fixed, json.dumps(value, separators=(",", ":")))
    for text in (
        dumps(value),
        '{"a":1,"b":[1.5,2]}',
        '{ "a" : 1 ,\n"b":[ 1.5  ,\t2 ]\r\n}',
        "{}",
        "{ }",
        '{"b": [ ]}',
    ):
        assert takes(loose, text), text
    for text in (
        '{"a":   1}',
        '{   "a": 1}',
        '{"a": 1   }',
        "{   }",
        '{"b": [1   ]}',
        ' {"a": 1}',
        '{"a": 1} ',
    ):
        assert not takes(loose, text), text


def test_p37_recursion_and_any_json() -> None:
    tree = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name"],
        "additionalProperties": False,
    }
    found = compiled("json_schema", tree)
    nested = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}, {"name": "d"}]}
    assert takes(found, dumps(nested))
    assert not takes(found, dumps({"name": "a", "children": [{"children": []}]}))
    for schema in ({}, True):
        anything = compiled("json_schema", dumps(schema))
        for value in (nested, [], "x", -1.5e3, None, [[[{}]]], {"": 0}):
            assert takes(anything, dumps(value)), value
    bare = compiled("json_schema", {"type": "object"})
    assert takes(bare, dumps(nested))
    assert not takes(bare, "[]")
    assert refusal("json_schema", {"$ref": "#"})


def allowed(names: list[str], shape: Object, closed: bool) -> bool:
    """Whether an object with these members, in this order, is of a shape; others are called x, y, z."""
    order = [prop.name for prop in shape.properties if prop.form]
    declared = [name for name in names if name in order]
    if declared != sorted(declared, key=order.index) or names[: len(declared)] != declared:
        return False
    if any(prop.required and prop.name not in names for prop in shape.properties):
        return False
    barred = [prop.name for prop in shape.properties if not prop.form]
    if any(name in barred for name in names) or (closed and len(names) > len(declared)):
        return False
    return shape.low <= len(names) and (shape.high is None or len(names) <= shape.high)


def test_members_are_counted_ordered_and_required() -> None:
    rng = random.Random(11)
    lists = [list(names) for n in range(5) for names in itertools.permutations("abcxy", n)]
    for _ in range(60):
        properties = tuple(Property(name, INTEGER, rng.random() < 0.4) for name in "abc"[: rng.randrange(4)])
        if rng.random() < 0.3:
            properties = (*properties, Property("x", (), required=False))
        closed = rng.random() < 0.4
        needed = sum(prop.required for prop in properties)
        low = rng.choice([0, needed, needed + 1])
        high = rng.choice([None, None, low, low + 1, low + 2])
        shape = Object(properties, () if closed else (Others(String(), INTEGER),), low, high)
        found = matcher((shape,))
        for names in lists:
            text = "{" + ", ".join(f'"{name}": 1' for name in names) + "}"
            want = allowed(names, shape, closed)
            assert (found is not None and takes(found, text)) is want, (shape, text)


def test_other_names_are_not_declared_ones_however_they_are_spelled() -> None:
    shape = Object((Property('a"\u00e9', INTEGER, required=False),), (Others(String(), WORD),))
    found = matcher((shape,))
    for spelling in ('"a\\"\u00e9"', '"a\\"\\u00e9"'):
        assert takes(found, f"{{{spelling}: 1}}")
        assert not takes(found, f'{{{spelling}: "a"}}')
    for spelling in ('"a\\u0022\u00e9"', '"a\\"\\u00E9"'):
        assert not takes(found, f'{{{spelling}: "a"}}'), spelling
    assert takes(found, '{"a\\"": "a", "a\\"\u00e9x": "b"}')


def test_kinds_of_other_names() -> None:
    kinds = (
        Others(String(patterns=("^n",)), INTEGER),
        Others(String(unlike=("^n",), excluded=frozenset(["q"])), WORD),
    )
    found = matcher((Object((Property("nn", WORD, required=True),), kinds),))
    for text in ('{"nn": "a"}', '{"nn": "a", "n": 1, "z": "b"}'):
        assert takes(found, text), text
    for text in ("{}", '{"nn": 1}', '{"nn": "a", "n": "a"}', '{"nn": "a", "z": 1}', '{"nn": "a", "q": "a"}'):
        assert not takes(found, text), text


def test_arrays_are_counted() -> None:
    for count, low, high in itertools.product(range(3), range(4), (None, 0, 1, 2, 4)):
        for rest in ((), INTEGER):
            shape = Array((WORD,) * count, rest, low, high)
            found = matcher((shape,))
            for length in range(6):
                items = ['"a"'] * min(length, count) + ["1"] * max(0, length - count)
                want = low <= length and (high is None or length <= high) and (bool(rest) or length <= count)
                text = f"[{', '.join(items)}]"
                assert (found is not None and takes(found, text)) is want, (shape, text)


def test_unique_items() -> None:
    rest: Form = (
        String(values=("a", "b")),
        Number(values=(Fraction(1),)),
        Boolean(),
        Null(),
        Boolean((True,)),
    )
    shape = Array(rest=rest, low=1, high=3, unique=True)
    found = matcher((shape,))
    pool = ["a", "b", 1, True, False, None]
    for length in range(5):
        for items in itertools.permutations(pool, length):
            assert takes(found, dumps(list(items))) is (1 <= length <= 3), items
    for items in (["a", "a"], [1, "b", 1], [None, True, None]):
        assert not takes(found, dumps(items))
    assert matcher((Array(rest=WORD, low=3, unique=True),)) is None
    with pytest.raises(ValueError, match="no finite list"):
        matcher((Array(rest=INTEGER, unique=True),))


def test_an_empty_form_empties_what_needs_it_and_nothing_else() -> None:
    nobody: Form = (String(patterns=("^a$", "^b$")),)
    assert matcher(nobody) is None
    assert matcher((String(high=2, patterns=("^abc",)),)) is None
    assert matcher((Object((Property("x", nobody, required=True),)),)) is None
    assert matcher((Array((nobody,), low=1),)) is None
    assert matcher((String(low=2, high=1),)) is None
    may = matcher((Object((Property("x", nobody, required=False), Property("y", INTEGER, required=False))),))
    assert takes(may, '{"y": 1}')
    assert not takes(may, '{"x": "a"}')
    either = matcher((*nobody, Null()))
    assert takes(either, "null")
    with pytest.raises(ValueError, match="refers to itself"):
        matcher((Array(rest=(Ref("r"),)),), {"r": nobody})


def test_alternatives_that_begin_alike() -> None:
    first = Object(
        (Property("k", (String(values=("one",)),), required=True), Property("v", INTEGER, required=True))
    )
    second = Object(
        (Property("k", (String(values=("only",)),), required=True), Property("v", WORD, required=True))
    )
    third = Object((), (Others(String(low=2), ANY),))
    found = matcher((first, second, third, String(patterns=("^o",)), Array(rest=ANY)))
    for text in ('{"k": "one", "v": 1}', '{"k": "only", "v": "a"}', '{"kk": 1}', '"o"', "[]", "{}"):
        assert takes(found, text), text
    for text in ('{"k": "one", "v": "a"}', '{"k": "only", "v": 1}', '{"k": 1}', '"x"', "1"):
        assert not takes(found, text), text


def test_keys_are_forced() -> None:
    found = compiled(
        "json_schema",
        {
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "type": "object",
            "additionalProperties": False,
        },
    )
    assert bytes(engine()._tokenizer.decode_bytes(found.forced())).startswith(b'{"name":')


def test_limits() -> None:
    many = tuple(Property(f"p{i}", INTEGER, required=False) for i in range(MAX_OPTIONAL + 1))
    assert takes(matcher((Object(many[:-1]),)), '{"p3": 1, "p150": 2}')
    with pytest.raises(ValueError, match=f"more than {MAX_OPTIONAL} optional"):
        matcher((Object(many),))
    with pytest.raises(ValueError, match="states"):
        matcher((Object(many[:150], high=60),))
    with pytest.raises(ValueError, match="prefixItems"):
        matcher((Array((INTEGER,) * 300),))
    with pytest.raises(ValueError, match="items"):
        matcher((Array(rest=INTEGER, low=2_000_000),))
    with pytest.raises(ValueError, match="characters"):
        matcher((String(high=2_000_000),))
    with pytest.raises(ValueError, match=f"more than {MAX_TEXT} bytes"):
        matcher((String(values=tuple(f"{i:040}" for i in range(30_000))),))


def test_rules_are_written_once_and_are_not_too_deep() -> None:
    rules = Rules()
    assert rules.rule("a") == rules.rule("a") != rules.terminal("a")
    assert rules.terminal('"a"') == '"a"'
    assert [
        repeated("x", *bounds) for bounds in ((0, None), (1, None), (0, 1), (1, 1), (2, 3), (2, None), (0, 0))
    ] == ["(x)*", "(x)+", "(x)?", "x", "(x){2,3}", "(x){2,}", ""]
    name = '"a"'
    for _ in range(MAX_NESTED + 1):
        name = rules.rule(f'"b" {name}')
    with pytest.raises(ValueError, match="within each other"):
        rules.text(name)


FORM_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -3,
    2.5,
    "",
    "a",
    "ab",
    [],
    [1],
    ["a", 1],
    {},
    {"a": 1},
    {"b": "a"},
]


def random_form(rng: random.Random, depth: int) -> Form:
    shapes: list[Any] = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6 if depth else 4)
        if kind == 0:
            shapes.append(rng.choice([Null(), Boolean(), Boolean((True,))]))
        elif kind == 1:
            shapes.append(
                rng.choice([Number(low=Fraction(1)), Number(integer=True), Number(values=(Fraction(5, 2),))])
            )
        elif kind < 4:
            shapes.append(rng.choice([String(high=1), String(patterns=("b",)), String(values=("a",))]))
        elif kind == 4:
            shapes.append(Array(rest=random_form(rng, depth - 1), high=rng.choice([None, 1])))
        else:
            shapes.append(
                Object(
                    (Property("a", random_form(rng, depth - 1), rng.random() < 0.5),),
                    high=rng.choice([None, 1]),
                )
            )
    return tuple(shapes)


def holds(form: Form, value: Any) -> bool:
    return any(holds_shape(shape, value) for shape in form)


def holds_shape(shape: Any, value: Any) -> bool:
    if isinstance(shape, Null):
        return value is None
    if isinstance(shape, Boolean):
        return isinstance(value, bool) and value in shape.values
    if isinstance(shape, Number):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        inside = (shape.low is None or value >= shape.low) and (not shape.integer or value == int(value))
        return Fraction(value) in shape.values if shape.values else inside
    if isinstance(shape, String):
        if not isinstance(value, str):
            return False
        fits = (shape.high is None or len(value) <= shape.high) and all(p in value for p in shape.patterns)
        return value in shape.values if shape.values else fits
    if isinstance(shape, Array):
        return (
            isinstance(value, list)
            and len(value) <= (shape.high or 99)
            and all(holds(shape.rest, v) for v in value)
        )
    if not isinstance(value, dict) or set(value) - {"a"}:
        return False
    return holds(shape.properties[0].form, value["a"]) if "a" in value else not shape.properties[0].required


def test_random_forms_against_a_model_of_them() -> None:
    rng = random.Random(21)
    for _ in range(150):
        form = random_form(rng, 2)
        found = matcher(form)
        assert found is not None
        for value in FORM_VALUES:
            assert takes(found, dumps(value)) is holds(form, value), (form, value)
