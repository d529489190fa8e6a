"""Operations on forms: what they come to, written in one way, and what they refuse to say."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sapwood.srt.grammar import arrays, objects
from sapwood.srt.grammar.algebra import Algebra
from sapwood.srt.grammar.form import (
    ANY,
    EVERYTHING,
    Array,
    Boolean,
    Form,
    Null,
    Number,
    Object,
    Others,
    Property,
    Ref,
    String,
)
from sapwood.srt.grammar.limits import Budget, Inexact, TooMuch
from sapwood.srt.grammar.objects import FREE
from sapwood.srt.grammar.words import Words

A, B = (Ref("a"),), (Ref("b"),)
TEXT: Form = (String(),)


class Named:
    """Combinations of Refs by their names."""

    def both(self, a: Form, b: Form) -> Form:
        return (Ref(f"{a}&{b}"),)

    def without(self, a: Form) -> Form:
        return (Ref(f"~{a}"),)


def algebra(steps: int = 10**6) -> Algebra:
    budget = Budget(steps)
    return Algebra(Named(), Words(budget), budget)


def number(low: int | None = None, high: int | None = None, *steps: int, **more: bool) -> Number:
    bounds = [None if bound is None else Fraction(bound) for bound in (low, high)]
    return Number(low=bounds[0], high=bounds[1], multiple_of=tuple(map(Fraction, steps)), **more)


def declared(name: str, form: Form = ANY, required: bool = False) -> Object:
    return Object((Property(name, form, required),), FREE)


def test_everything_and_nothing_are_the_ends_of_the_order() -> None:
    form: Form = (Null(), String(low=2))
    assert algebra().meet(form, EVERYTHING) == algebra().meet(EVERYTHING, form) == form
    assert algebra().meet(form, ()) == ()
    assert algebra().minus(EVERYTHING, ()) == EVERYTHING
    assert algebra().minus(form, EVERYTHING) == ()
    assert algebra().minus(EVERYTHING, EVERYTHING[1:]) == (Null(),)


@pytest.mark.parametrize(
    ("a", "b", "met"),
    [
        (number(1, 5), number(3, 9), number(3, 5)),
        (number(1, 5), number(6, 9), None),
        (number(1, 5, low_open=True), number(1, 9), number(1, 5, low_open=True)),
        (Number(low=Fraction(1, 2), integer=True), Number(), number(1, None, integer=True)),
        (number(1, 10, 2), number(1, 10, 3), Number(values=(Fraction(6),))),
        (number(1, 5, 6), Number(), None),
        (number(None, None, 2, integer=True), number(None, None, 4), number(None, None, 4, integer=True)),
        (Number(integer=True), Number(fractional=True), None),
        (number(3, 3), Number(integer=True), Number(values=(Fraction(3),))),
        (number(3, 3, low_open=True), Number(), None),
        (Number(values=(Fraction(1), Fraction(5, 2))), Number(integer=True), Number(values=(Fraction(1),))),
    ],
)
def test_numbers_meet(a: Number, b: Number, met: Number | None) -> None:
    assert algebra().meet((a,), (b,)) == algebra().meet((b,), (a,)) == (() if met is None else (met,))


def test_numbers_without_others() -> None:
    assert algebra().minus((Number(),), (number(1, 5),)) == (
        number(None, 1, high_open=True),
        number(5, None, low_open=True),
    )
    assert algebra().minus((Number(),), (Number(integer=True),)) == (Number(fractional=True),)
    assert algebra().minus((number(1, 4, integer=True),), (number(2, 4),)) == (Number(values=(Fraction(1),)),)
    with pytest.raises(Inexact):
        algebra().minus((Number(),), (number(None, None, 3),))
    assert algebra().minus((number(1, 2),), (number(4, None, 3),)) == (number(1, 2),)


def test_strings_meet_and_part() -> None:
    assert algebra().meet((String(low=2),), (String(high=1),)) == ()
    assert algebra().meet((String(patterns=("^a",)),), (String(patterns=("^b",)),)) == ()
    listed = String(values=("ab", "b", "abc"))
    assert algebra().meet((listed,), (String(patterns=("^a",), high=2),)) == (String(values=("ab",)),)
    assert algebra().minus((listed,), (String(patterns=("^a",)),)) == (String(values=("b",)),)
    assert algebra().minus((String(),), (String(low=2, patterns=("x",)),)) == (
        String(high=1),
        String(unlike=("x",)),
    )
    with pytest.raises(Inexact, match="format"):
        algebra().minus((String(),), (String(formats=("date",)),))


def test_unions_are_written_once() -> None:
    union = algebra().union(
        [Boolean((True,)), String(values=("a",)), Boolean((False,)), String(values=("b", "a"))]
    )
    assert union == (Boolean(), String(values=("a", "b")))
    assert algebra().union([String(low=3), String(), String(low=4)]) == (String(),)
    assert algebra().union([String(low=3), String(low=4)]) == (String(low=3),)
    smaller = Object((Property("a", TEXT, True), Property("b", ANY, False)), FREE)
    assert algebra().union([smaller, declared("a", TEXT)]) == (declared("a", TEXT),)
    many = [declared(f"p{i}", required=True) for i in range(300)]
    with pytest.raises(Inexact, match="256 alternatives"):
        algebra().union([*many])


def test_parts_that_are_references_are_left_for_later() -> None:
    met = algebra().meet((declared("x", A),), (declared("x", B),))
    assert met == (declared("x", (Ref(f"{A}&{B}"),)),)
    assert algebra().meet((declared("x", A),), (declared("x", A),)) == (declared("x", A),)
    assert algebra().minus((Object(others=FREE),), (declared("x", A),)) == (
        declared("x", (Ref(f"~{A}"),), True),
    )


def test_arrays_meet_item_by_item() -> None:
    a = Array(prefix=(TEXT,), rest=ANY)
    b = Array(prefix=(ANY, (Null(),)), rest=(), high=2)
    assert algebra().meet((a,), (b,)) == (Array(prefix=(TEXT, (Null(),)), high=2),)
    assert algebra().meet((a,), (Array(rest=(Null(),), low=1),)) == ()
    assert algebra().meet((a,), (Array(rest=(Null(),)),)) == (Array(high=0),)


def test_an_item_that_must_be_somewhere_is_looked_for_at_each_place() -> None:
    need = Array(rest=ANY, high=2, needs=((0, TEXT),))
    assert arrays.expand(need, algebra()) == [
        Array(prefix=(TEXT,), rest=ANY, low=1, high=2),
        Array(prefix=(ANY, TEXT), low=2, high=2),
    ]
    assert arrays.expand(Array(rest=TEXT, needs=((0, TEXT),)), algebra()) == [Array(rest=TEXT, low=1)]
    with pytest.raises(Inexact, match="anywhere in an array"):
        arrays.expand(Array(rest=ANY, needs=((0, TEXT),)), algebra())


def test_no_two_items_are_equal() -> None:
    flags: Form = (Boolean(), Null())
    assert arrays.settle_unique(Array(rest=flags, unique=True), algebra()) == [
        Array(rest=flags, high=3, unique=True)
    ]
    assert arrays.settle_unique(Array(rest=flags, low=4, unique=True), algebra()) == []
    pair = Array(prefix=((Boolean(),), (Boolean((True,)),)), low=2, high=2, unique=True)
    true, false = (Boolean((True,)),), (Boolean((False,)),)
    assert arrays.settle_unique(pair, algebra()) == [Array(prefix=(false, true), low=2, high=2)]
    with pytest.raises(Inexact, match="fixed values"):
        arrays.settle_unique(Array(rest=TEXT, unique=True), algebra())


def test_objects_meet_by_name() -> None:
    patterned = Object(
        others=(Others(String(patterns=("^x",)), TEXT), Others(String(unlike=("^x",)), (Null(),)))
    )
    assert algebra().meet((declared("x1", required=True),), (patterned,)) == (
        Object((Property("x1", TEXT, True),), patterned.others),
    )
    assert algebra().meet((declared("x1", (Null(),), True),), (patterned,)) == ()
    assert algebra().meet((declared("x1", (Null(),)),), (patterned,)) == (
        Object((Property("x1", (), False),), patterned.others),
    )
    listed = Object(others=(Others(String(values=("a", "b")), TEXT),))
    assert algebra().meet((Object(others=FREE),), (listed,)) == (
        Object((Property("a", TEXT, False), Property("b", TEXT, False))),
    )


def test_counts_of_properties_that_say_no_more_are_dropped() -> None:
    two = (Property("a", ANY, True), Property("b", ANY, False))
    assert objects.tidy(Object(two, low=1), algebra()) == Object(two)
    assert objects.tidy(Object(two, high=2), algebra()) == Object(two)
    assert objects.tidy(Object(two, low=3), algebra()) is None
    assert objects.tidy(Object(two, FREE, high=0), algebra()) is None
    assert objects.tidy(Object(two, FREE, high=1), algebra()) == Object(two[:1])


def test_more_properties_than_are_required_are_chosen_from_those_declared() -> None:
    three = tuple(Property(name, ANY, False) for name in "abc")
    found = objects.expand(Object(three, low=2), algebra())
    assert [[(prop.name, prop.required) for prop in one.properties] for one in found] == [
        [("a", True), ("b", False), ("c", False)],
        [("b", True), ("c", True)],
    ]
    assert [one.low for one in found] == [2, 0]
    with pytest.raises(Inexact, match="one more than the properties"):
        objects.expand(Object(three, FREE, low=2), algebra())


def test_a_property_of_a_kind_that_must_be_there() -> None:
    need = Others(String(patterns=("^x",)), TEXT)
    one = objects.tidy(Object(others=FREE, high=1, needs=(need,)), algebra())
    assert one is not None
    assert objects.expand(one, algebra()) == [Object(others=(need,), low=1, high=1)]
    assert objects.tidy(Object((Property("a", TEXT, False),), needs=(need,)), algebra()) is None
    with pytest.raises(Inexact):
        objects.expand(Object(others=FREE, needs=(need,)), algebra())


def test_kinds_of_names_that_are_left_do_not_overlap() -> None:
    left = objects.remaining(String(), [String(low=2, patterns=("^a",))], algebra())
    assert left == [String(high=1), String(low=2, unlike=("^a",))]
    assert objects.remaining(String(), [String()], algebra()) == []


def test_work_is_bounded() -> None:
    form = algebra().union([declared(f"p{i}", required=True) for i in range(100)])
    with pytest.raises(TooMuch, match="more than 1000 steps"):
        algebra(1000).meet(form, form[1:])
