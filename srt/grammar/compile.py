"""From a Constraint to the engine's grammar: one text, which any process can compile, and its key."""

from __future__ import annotations

import hashlib
import time

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import ebnf, limits, structural, user_lark
from sapwood.srt.grammar.engine import Engine
from sapwood.srt.grammar.parts import Parts
from sapwood.srt.messages import Grammar
from sapwood.srt.params import Constraint

MAX_WARNINGS = 16
FIRST_MASK_SECONDS = 0.1
"""Of CPU time; ordinary ones take 0.3 ms. In the worker all rows wait for it, and later ones are like it."""


def compile_constraint(constraint: Constraint, engine: Engine) -> Grammar:
    """The grammar of a constraint, tried out. Raises BadRequest naming the field and what is wrong."""
    field = constraint.field
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{field} is not valid Unicode: it has half a surrogate pair", param=field) from None
    if size > limits.MAX_TEXT:
        raise BadRequest(f"{field} has {size} bytes, more than {limits.MAX_TEXT}", param=field)
    parts = Parts(engine, constraint.whitespace or 0, field, constraint.opening if constraint.after else "")
    try:
        text = _text(constraint, parts)
        matcher = engine.compile(text)
        began = time.thread_time()
        goes_on = engine.goes_on(matcher)
        took = time.thread_time() - began
    except RecursionError:
        raise BadRequest(f"{field} is nested too deeply", param=field) from None
    except BadRequest as error:
        message = error.message if error.param else f"{field}: {error.message}"
        raise BadRequest(message, param=field) from None
    except ValueError as error:
        raise BadRequest(f"{field}: {error}", param=field) from None
    if took > FIRST_MASK_SECONDS:
        raise BadRequest(
            f"{field} is too complex to follow: its first token takes {took:.2f} s of computing, more than"
            f" {FIRST_MASK_SECONDS:g}",
            param=field,
        )
    if not goes_on:
        what = "only the empty text" if matcher.complete else "no text at all"
        raise BadRequest(f"{field} admits {what}", param=field)
    return Grammar(hashlib.sha256(text.encode()).digest()[:16], text, _few(parts.warnings))


def _few(warnings: list[str]) -> list[str]:
    more = len(warnings) - MAX_WARNINGS
    return warnings[:MAX_WARNINGS] + ([f"and {more} more"] if more > 0 else [])


def _text(constraint: Constraint, parts: Parts) -> str:
    if constraint.kind == "ebnf" and not constraint.after and user_lark.is_lark(constraint.text):
        return ebnf.checked_lark(constraint.text, parts)
    return parts.whole(_body(constraint, parts), constraint.after)


def _body(constraint: Constraint, parts: Parts) -> str:
    if constraint.kind == "json_schema":
        return parts.schema(constraint.text)
    if constraint.kind == "regex":
        return parts.pattern(constraint.text)
    if constraint.kind == "choices":
        return parts.choices(constraint.text)
    if constraint.kind == "ebnf":
        return ebnf.written(constraint.text, parts)
    return structural.written(constraint.text, parts)
