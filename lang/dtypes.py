"""The `dtype` of a `gen`: the regular expression that its output follows, where it ends, and its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from sapwood.lang.errors import LangError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DType(Generic[T]):
    """`stop` ends a number where the model goes on with a space or a new line, which `regex` lets it do.
    `read` makes the value of the text; it raises ValueError."""

    name: str
    regex: str
    stop: tuple[str, ...]
    read: Callable[[str], T]

    def convert(self, text: str) -> T:
        """The value of an output. Raises LangError, with the text, if it is none (it was cut, say)."""
        try:
            return self.read(text.strip())
        except ValueError as e:
            raise LangError(f"the output is no {self.name}: it is {text!r}") from e


def _bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _quoted(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        raise ValueError(text)
    return text[1:-1]


_SPACE = (" ", "\n")
INT = DType("int", r"[-+]?[0-9]+[ \n]*", _SPACE, int)
FLOAT = DType("float", r"[-+]?[0-9]*\.?[0-9]+[ \n]*", _SPACE, float)
BOOL = DType("bool", r"(True|False)", (), _bool)
STR = DType("str", r'"[^"\n]*"', (), _quoted)
"""A text in quotes, on one line, without quotes in it; the value is what they hold."""

_BY_NAME: dict[Any, DType[Any]] = {
    int: INT, "int": INT, float: FLOAT, "float": FLOAT, bool: BOOL, "bool": BOOL,
    str: STR, "str": STR, "string": STR,
}  # fmt: skip


def dtype_of(dtype: type | str) -> DType[Any]:
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


@overload
def converter_of_dtype(dtype: type[T]) -> Callable[[str], T]: ...
@overload
def converter_of_dtype(dtype: str) -> Callable[[str], Any]: ...
def converter_of_dtype(dtype: Any) -> Callable[[str], Any]:
    """Makes a value of the type of an output's text; raises LangError as DType.convert does."""
    return dtype_of(dtype).convert
