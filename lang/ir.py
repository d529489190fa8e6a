"""Expressions: what a program adds to its state. They are values, and say nothing of how they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sapwood.lang.backend import Logprobs, Sampling


class Expr:
    """`a + b` is one after the other; a str may stand on either side."""

    __slots__ = ()

    def __add__(self, other: Expr | str) -> Concat:
        return Concat((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> Concat:
        return Concat((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True, slots=True)
class Concat(Expr):
    """One after the other."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Constant(Expr):
    """Text; with `special` its special tokens are meant as such."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Tokens(Expr):
    """Token ids, as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation(Expr):
    """An output of the model, kept as variable `name`. `convert` makes the variable's value of the text.

    What `sampling` leaves open, the program's own parameters say, and else the backend.
    """

    name: str | None
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: Logprobs | None = None
    convert: Callable[[str], Any] | None = None
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Selection(Expr):
    """The best of `choices` by `method` (see choices.py), kept as variable `name`."""

    name: str | None
    choices: tuple[str, ...]
    method: Any


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here on to its end, text is kept as variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str


@dataclass(frozen=True, slots=True)
class Variable(Expr):
    """The text of a variable, where it is not known: while a program is traced."""

    name: str


def parts_of(value: Expr | str) -> Sequence[Expr]:
    """The parts of a value, none of which is a Concat. Raises TypeError for what is no expression."""
    if isinstance(value, str):
        return (Constant(value),)
    if isinstance(value, Concat):
        return value.parts
    if isinstance(value, Expr):
        return (value,)
    raise TypeError(f"a program can add text and expressions to its state, not {type(value).__name__}")
