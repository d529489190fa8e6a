"""The types of `gen(dtype=...)`: what an output may be."""

from __future__ import annotations

import re

import pytest

from sapwood.lang.dtypes import dtype_of, regex_of_dtype, stops_of_dtype

GOOD: list[tuple[type, str]] = [
    (int, "42"),
    (int, "-7 \n"),
    (int, "+1"),
    (float, ".5"),
    (float, "-3.25 "),
    (float, "10"),
    (bool, "True"),
    (bool, "False"),
    (str, '"two words"'),
    (str, '""'),
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


@pytest.mark.parametrize(("dtype", "text"), GOOD)
def test_the_regex_allows_every_way_to_write_a_value(dtype: type, text: str) -> None:
    assert re.fullmatch(regex_of_dtype(dtype), text)


@pytest.mark.parametrize(("dtype", "text"), BAD)
def test_the_regex_allows_nothing_else(dtype: type, text: str) -> None:
    assert not re.fullmatch(regex_of_dtype(dtype), text)


def test_types_may_be_named() -> None:
    for dtype in (int, float, bool, str):
        assert dtype_of(dtype.__name__) is dtype_of(dtype)
    assert dtype_of("string") is dtype_of(str)
    assert stops_of_dtype(int) == stops_of_dtype(float) == (" ", "\n")
    for other in (list, "list", None, [int]):
        with pytest.raises(TypeError, match="dtype must be int, float, bool or str"):
            dtype_of(other)  # type: ignore[arg-type]
