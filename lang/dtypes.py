"""The `dtype` of a `gen`: the regular expression that its output follows, and where it ends."""

from __future__ import annotations

from typing import Any, NamedTuple


class DType(NamedTuple):
    """`stop` ends a number where the model goes on with a space or a new line, which `regex` lets it do."""

    regex: str
    stop: tuple[str, ...]


_SPACE = (" ", "\n")
INT = DType(r"[-+]?[0-9]+[ \n]*", _SPACE)
FLOAT = DType(r"[-+]?[0-9]*\.?[0-9]+[ \n]*", _SPACE)
BOOL = DType(r"(True|False)", ())
STR = DType(r'"[^"\n]*"', ())
"""A text in quotes, on one line, without quotes in it."""

_BY_NAME: dict[Any, DType] = {
    int: INT, "int": INT, float: FLOAT, "float": FLOAT, bool: BOOL, "bool": BOOL,
    str: STR, "str": STR, "string": STR,
}  # fmt: skip


def dtype_of(dtype: type | str) -> DType:
    """Of int, float, bool and str, or their names. Raises TypeError for any other."""
    found = _BY_NAME.get(dtype) if isinstance(dtype, (type, str)) else None
    if found is None:
        raise TypeError(f"dtype must be int, float, bool or str, or the name of one, got {dtype!r}")
    return found


def regex_of_dtype(dtype: type | str) -> str:
    """The regular expression that an output of this type follows."""
    return dtype_of(dtype).regex


def stops_of_dtype(dtype: type | str) -> tuple[str, ...]:
    """The stop strings that end an output of this type."""
    return dtype_of(dtype).stop
