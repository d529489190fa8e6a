"""Constraints of every kind become one text with its key, or are refused with the field and the reason."""

from __future__ import annotations

import hashlib
import json

import pytest

from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.params import Constraint
from tests.grammars import compiled, engine, refusal, takes


def test_equal_constraints_have_equal_keys() -> None:
    first = compile_constraint(Constraint("regex", "a+", "x"), engine())
    same = compile_constraint(Constraint("regex", "(?:a)+", "y"), engine())
    other = compile_constraint(Constraint("regex", "a*b", "x"), engine())
    assert first == same
    assert first.key != other.key
    assert first.key == hashlib.sha256(first.text.encode()).digest()[:16]


def test_a_grammar_s_text_is_all_that_another_process_needs() -> None:
    grammar = compile_constraint(Constraint("json_schema", '{"type": "boolean"}', "x"), engine())
    assert takes(engine().compile(grammar.text), "true")


def test_choices() -> None:
    matcher = compiled("choices", ["yes", "yes please", "n\u00f6", '"quoted"\n', "yes"])
    for text in ("yes", "yes please", "n\u00f6", '"quoted"\n'):
        assert takes(matcher, text), text
    for text in ("", "ye", "yes pl", "yesyes"):
        assert not takes(matcher, text), text
    many = compiled("choices", [f"choice {i}" for i in range(4096)])
    assert takes(many, "choice 4095")
    assert not takes(many, "choice 4096")


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("choices", "[]", "1 to 4096 strings"),
        ("choices", json.dumps([f"{i}" for i in range(4097)]), "1 to 4096 strings"),
        ("choices", '["a", ""]', "[1] must be a string that is not empty"),
        ("choices", '["a", 5]', "[1] must be a string that is not empty, got 5"),
        ("choices", '["\\ud800"]', "[0] is not valid Unicode"),
        ("choices", "[", "is not valid JSON"),
        ("choices", '"a"', "must be a list"),
        ("json_schema", "{", "field"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unmatched ("),
        ("json_schema", '{"type": "string", "pattern": "(?=x)"}', "lookahead"),
        ("json_schema", '{"enum": []}', "no value"),
        ("json_schema", '{"type": "string", "minLength": 3, "pattern": "^a{0,2}$"}', "no value"),
        ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "multipleOf"),
        ("regex", "a" * 70_000, "more than 65536"),
        ("ebnf", "root ::= \ud800", "half a surrogate pair"),
    ],
)
def test_refusals(kind: str, text: str, names: str) -> None:
    assert names in refusal(kind, text)


def test_warnings_of_a_lenient_schema_come_with_the_grammar() -> None:
    schema = {"type": "string", "pattern": "(?=x)x", "x-lenient": True}
    grammar = compile_constraint(Constraint("json_schema", json.dumps(schema), "field"), engine())
    assert len(grammar.warnings) == 1
    assert "pattern" in grammar.warnings[0]
    assert takes(engine().compile(grammar.text), '"y"')


def test_what_would_hold_up_all_rows_is_refused() -> None:
    """An expression that is small, and whose automaton is not."""
    said = refusal("regex", "(a{1000}){1000}")
    assert "too complex to follow" in said
    assert takes(compiled("regex", "(a{30}){3}"), "a" * 90)
