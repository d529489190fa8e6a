"""A JSON schema in the one form that grammars are made of: alternatives, each of one JSON type, each exact.

    schema ──front pass (schema.py, algebra.py)──► Document ──emit (lark.py)──► grammar

A Form is a tuple of shapes: a value is allowed if one of them allows it; the empty Form allows nothing. What
a shape does not say is free. Every shape can be enforced to the letter: what cannot is refused before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

Pattern = str
"""A regular expression of ECMA-262 with the flag u, found anywhere in a string unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Null:
    """null."""


@dataclass(frozen=True, slots=True)
class Boolean:
    """Those of true and false that are in `values`."""

    values: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high` (None: no bound; `open`: the bound itself is excluded), a whole one if
    `integer`, none if `fractional`, a multiple of each of `multiple_of`, not one of `excluded`. With `values`
    it is one of them, and nothing else is said."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    fractional: bool = False
    multiple_of: tuple[Fraction, ...] = ()
    excluded: frozenset[Fraction] = frozenset()
    values: tuple[Fraction, ...] | None = None


@dataclass(frozen=True, slots=True)
class String:
    """A string of `low` to `high` characters (code points) in which each of `patterns` is found and none of
    `unlike`, whose format is each of `formats`, and which is not one of `excluded`. With `values` it is one
    of them, and nothing else is said."""

    low: int = 0
    high: int | None = None
    patterns: tuple[Pattern, ...] = ()
    unlike: tuple[Pattern, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Array:
    """`low` to `high` items: the first ones as in `prefix`, the others as `rest` (an empty Form: there are no
    others). `unique`: no two are equal, and `prefix` is empty and `rest` a finite list of scalars. `needs`:
    for each (i, form) an item at i or later is so; there are none in a Document."""

    prefix: tuple[Form, ...] = ()
    rest: Form = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    needs: tuple[tuple[int, Form], ...] = ()


@dataclass(frozen=True, slots=True)
class Property:
    """A declared property; one that may not be there at all has the empty Form and is not `required`."""

    name: str
    form: Form
    required: bool


@dataclass(frozen=True, slots=True)
class Others:
    """Properties whose names are no declared ones and are as `name` says."""

    name: String
    form: Form


@dataclass(frozen=True, slots=True)
class Object:
    """Declared properties in their order, then others: each of these is of one of the kinds in `others`,
    whose names never overlap. `low` and `high` bound how many there are in all; `low` is at most the number
    of required ones, or one more. `needs`: at least one property is of each of these kinds; there are none
    in a Document."""

    properties: tuple[Property, ...] = ()
    others: tuple[Others, ...] = ()
    low: int = 0
    high: int | None = None
    needs: tuple[Others, ...] = ()


@dataclass(frozen=True, slots=True)
class Ref:
    """As the rule of this name in the document; never a rule that leads back to itself without a value."""

    name: str


Shape = Null | Boolean | Number | String | Array | Object | Ref
Form = tuple[Shape, ...]

ANY_NAME = "any"
"""The rule of every JSON value."""
ANY: Form = (Ref(ANY_NAME),)

EVERYTHING: Form = (
    Null(),
    Boolean(),
    Number(),
    String(),
    Array(rest=ANY),
    Object(others=(Others(String(), ANY),)),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A whole schema: its form, the rules that it refers to, and what a lenient one does not enforce."""

    form: Form
    rules: dict[str, Form] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
