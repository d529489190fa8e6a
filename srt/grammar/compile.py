"""From a Constraint to the engine's grammar."""

from __future__ import annotations

import hashlib
import json

import llguidance

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.engine import Engine
from sapwood.srt.messages import Grammar
from sapwood.srt.params import Constraint


def compile_constraint(constraint: Constraint, engine: Engine) -> Grammar:
    """The grammar of a constraint, tried out. Raises BadRequest naming the field and what is wrong."""
    matchers = llguidance.LLMatcher
    if constraint.kind == "json_schema":
        text = matchers.grammar_from_json_schema(
            constraint.text,
            overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        )
    elif constraint.kind == "regex":
        text = matchers.grammar_from_regex(constraint.text)
    elif constraint.kind == "choices":
        names = " | ".join(json.dumps(choice) for choice in json.loads(constraint.text))
        text = matchers.grammar_from_lark(f"start: {names}")
    else:
        raise BadRequest(f"{constraint.field} is not supported yet", param=constraint.field)
    engine.compile(text)
    return Grammar(hashlib.sha256(text.encode()).digest()[:16], text)
