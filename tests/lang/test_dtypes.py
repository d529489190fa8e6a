"""The types of `gen(dtype=...)`: what an output may be, and what it becomes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sapwood.lang.dtypes import converter_of_dtype, dtype_of, regex_of_dtype, stops_of_dtype
from sapwood.lang.errors import LangError

GOOD: list[tuple[type, str, Any]] = [
    (int, "42", 42),
    (int, "-7 \n", -7),
    (int, "+1", 1),
    (float, ".5", 0.5),
    (float, "-3.25 ", -3.25),
    (float, "10", 10.0),
    (bool, "True", True),
    (bool, "False", False),
    (str, '"two words"', "two words"),
    (str, '""', ""),
]
BAD: list[tuple[type, str]] = [
    (int, ""),
    (int, "-"),
    (int, "1.5"),
    (float, "1."),
    (float, "."),
    (bool, "true"),
    (str, "bare"),
    (str, '"open'),
    (str, '"a" b"'),
]


@pytest.mark.parametrize(("dtype", "text", "value"), GOOD)
def test_what_the_regex_allows_becomes_a_value(dtype: type, text: str, value: Any) -> None:
    assert re.fullmatch(regex_of_dtype(dtype), text)
    converted = converter_of_dtype(dtype)(text)
    assert (converted, type(converted)) == (value, dtype)


@pytest.mark.parametrize(("dtype", "text"), BAD)
def test_the_regex_allows_nothing_else(dtype: type, text: str) -> None:
    assert not re.fullmatch(regex_of_dtype(dtype), text)


@pytest.mark.parametrize(
    ("dtype", "text"), [(int, "-"), (float, ""), (bool, "Tr"), (str, '"'), (str, '"cut')]
)
def test_an_output_that_was_cut_is_an_error_with_the_text(dtype: type, text: str) -> None:
    with pytest.raises(LangError, match=rf"no {dtype.__name__}: it is {re.escape(repr(text))}"):
        converter_of_dtype(dtype)(text)


def test_types_may_be_named() -> None:
    for dtype in (int, float, bool, str):
        assert dtype_of(dtype.__name__) is dtype_of(dtype)
    assert dtype_of("string") is dtype_of(str)
    assert stops_of_dtype(int) == stops_of_dtype(float) == (" ", "\n")
    for other in (list, "list", None, [int]):
        with pytest.raises(TypeError, match="dtype must be int, float, bool or str"):
            dtype_of(other)  # type: ignore[arg-type]
