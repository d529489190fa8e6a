"""Numbers: exactly those in range, written so that they stay there when they are read as doubles."""

from __future__ import annotations

import itertools
import json
import random
import re
from decimal import Decimal
from fractions import Fraction

import pytest

from sapwood.srt.grammar import numbers
from sapwood.srt.grammar.form import Number
from tests.grammars import compiled, takes

BOUNDS = [None, "-100", "-5", "-4", "-0.5", "0", "0.1", "1", "2", "5", "10", "99", "1000"]


def reader(shape: Number) -> re.Pattern[str]:
    body = numbers.terminal(shape)
    return re.compile(body.strip("/") if body else "[^\\s\\S]")


def wanted(shape: Number, value: Fraction) -> bool:
    above = shape.low is None or value > shape.low or (value == shape.low and not shape.low_open)
    below = shape.high is None or value < shape.high or (value == shape.high and not shape.high_open)
    return above and below and (not shape.integer or value.denominator == 1)


def plain(value: Decimal) -> str:
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def values(rng: random.Random) -> list[str]:
    steps = ["0", "0.000001", "-0.000001", "0.1", "-0.1", "1", "-1", "0.5"]
    near = [Decimal(bound) + Decimal(step) for bound in BOUNDS if bound for step in rng.sample(steps, 2)]
    far = [Decimal(rng.randint(-(10**9), 10**9)) / Decimal(10) ** rng.randint(0, 6) for _ in range(16)]
    return [plain(value) for value in near + far]


@pytest.mark.parametrize("integer", [False, True])
def test_every_pair_of_bounds_takes_exactly_what_is_between_them(integer: bool) -> None:
    rng, count = random.Random(33), 0
    for low, high, low_open, high_open in itertools.product(BOUNDS, BOUNDS, (False, True), (False, True)):
        shape = Number(low and Fraction(low), high and Fraction(high), low_open, high_open, integer)  # type: ignore[arg-type]
        pattern = reader(shape)
        for text in values(rng):
            count += 1
            assert bool(pattern.fullmatch(text)) is wanted(shape, Fraction(text)), (shape, text)
    assert count > 25_000


def test_the_same_by_the_engine() -> None:
    rng = random.Random(5)
    for _ in range(40):
        low, high = rng.choice(BOUNDS), rng.choice(BOUNDS)
        schema: dict[str, object] = {"type": rng.choice(["number", "integer"])}
        opens = [rng.random() < 0.5, rng.random() < 0.5]
        if low:
            schema["exclusiveMinimum" if opens[0] else "minimum"] = json.loads(low)
        if high:
            schema["exclusiveMaximum" if opens[1] else "maximum"] = json.loads(high)
        shape = Number(
            low and Fraction(low),
            high and Fraction(high),
            *opens,
            schema["type"] == "integer",  # type: ignore[arg-type]
        )
        texts = values(rng)
        try:
            matcher = compiled("json_schema", schema)
        except ValueError:
            assert not any(wanted(shape, Fraction(text)) for text in texts)
            continue
        for text in texts:
            assert takes(matcher, text) is wanted(shape, Fraction(text)), (schema, text)


def test_digits_are_bounded_and_nothing_overflows() -> None:
    free, whole = reader(Number()), reader(Number(integer=True))
    assert whole.fullmatch("9" * 20)
    assert not whole.fullmatch("9" * 21)
    assert not any(whole.fullmatch(text) for text in ("1.0", "1e3", "01", "+1", "-0", ""))
    assert free.fullmatch("-0.0")
    assert free.fullmatch("9" * 20 + "." + "9" * 20 + "e287")
    assert not any(free.fullmatch(text) for text in ("1e288", "1e1000", ".5", "1.", "01", "0." + "1" * 21))
    assert float("9" * 20 + "." + "9" * 20 + "e287") < float("inf")
    assert float("0." + "0" * 19 + "1e-287") > 2.3e-308
    for value in (1e22, 1e-07, -1.5e100, 0.1 + 0.2, 1 / 3, 12345678.9, 1e-200):
        assert free.fullmatch(json.dumps(value)), value


def test_only_the_sign_is_bounded_where_exponents_may_stand() -> None:
    positive, below = reader(Number(low=Fraction(0), low_open=True)), reader(Number(high=Fraction(0)))
    assert positive.fullmatch("1e-07")
    assert positive.fullmatch("2.5E+10")
    assert not any(positive.fullmatch(text) for text in ("0", "0.0", "0e5", "-1"))
    assert below.fullmatch("-1e5")
    assert below.fullmatch("0")
    assert not below.fullmatch("1e-5")
    assert not reader(Number(high=Fraction(5))).fullmatch("1e1")


@pytest.mark.parametrize("bound", ["0.1", "12.5", "1234567.125", "99999999999999.5", "-0.3"])
def test_next_to_an_open_bound_no_number_reads_as_the_bound(bound: str) -> None:
    shape = Number(low=Fraction(bound), low_open=True)
    for digits in range(1, 21):
        text = (
            plain(Decimal(bound) + Decimal(1).scaleb(-digits))
            if digits <= 15
            else bound + "0" * (digits - 3) + "1"
        )
        if reader(shape).fullmatch(text):
            assert float(text) > float(bound), text


@pytest.mark.parametrize(
    ("step", "low", "high", "integer"),
    [
        ("1", None, None, False),
        ("0.01", None, None, False),
        ("0.5", "-3", "7.25", False),
        ("0.25", "0", None, False),
        ("7", None, None, True),
        ("7", "-50", "50", True),
        ("10", "5", None, True),
        ("0.3", "-2", "2", False),
        ("2.5", None, None, False),
        ("60", "0", "86400", True),
        ("0.05", "0.1", "0.9", False),
        ("3", "0", None, False),
        ("0.000003", None, None, False),
    ],
)
def test_multiples(step: str, low: str | None, high: str | None, integer: bool) -> None:
    schema: dict[str, object] = {"type": "integer" if integer else "number", "multipleOf": json.loads(step)}
    schema |= {"minimum": json.loads(low)} if low else {}
    schema |= {"maximum": json.loads(high)} if high else {}
    shape = Number(low and Fraction(low), high and Fraction(high), integer=integer)  # type: ignore[arg-type]
    matcher, rng = compiled("json_schema", schema), random.Random(8)
    for _ in range(150):
        near = rng.randint(-40, 40) * Decimal(step)
        text = plain(near + (Decimal(rng.choice(["0", "0", "0.01", "-0.05", "1", "0.001"]))))
        want = wanted(shape, Fraction(text)) and Fraction(text) % Fraction(step) == 0
        assert takes(matcher, text) is want, text


def test_excluded_values_and_those_without_integers() -> None:
    number = compiled("json_schema", {"type": "number", "not": {"enum": [5, 0.5, 0]}})
    assert not any(takes(number, text) for text in ("5", "5.0", "5.00", "0.5", "0.50", "0", "-0", "0.0"))
    assert all(takes(number, text) for text in ("5.01", "55", "0.05", "-5", "50"))
    fractional = Number(low=Fraction(0), fractional=True)
    body = numbers.terminal(fractional)
    assert body is not None
    assert "& ~" in body


def test_values_and_what_cannot_be_exact() -> None:
    assert numbers.spellings(Fraction(3)) == ["3"]
    assert numbers.spellings(Fraction(-5, 4)) == ["-1.25"]
    assert numbers.spellings(Fraction("1e-7")) == ["0.0000001", "1e-07"]
    assert numbers.spellings(Fraction(10**25)) == ["1" + "0" * 25, "1e+25"]
    with pytest.raises(ValueError, match="multipleOf 1000003"):
        numbers.nested(Number(integer=True, multiple_of=(Fraction(1000003),)))
    with pytest.raises(ValueError, match=r"multipleOf 0\.0000003 .* the 6th behind the point"):
        numbers.nested(Number(multiple_of=(Fraction("0.0000003"),)))
    with pytest.raises(ValueError, match="beside excluded"):
        numbers.nested(Number(integer=True, multiple_of=(Fraction(7),), excluded=frozenset([Fraction(14)])))
