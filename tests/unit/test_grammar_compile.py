"""Constraints of every kind become one text with its key, or are refused with the field and the reason."""

from __future__ import annotations

import hashlib
import json

import pytest

from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.grammar.engine import FUEL_AT_FIRST, ITEMS_IN_ROW
from sapwood.srt.grammar.limits import MAX_SHORTEST
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
        ("choices", "[]", "field: must be a list of 1 to 4096 strings, got 0 of them"),
        ("choices", json.dumps([f"{i}" for i in range(4097)]), "1 to 4096 strings, got 4097 of them"),
        ("choices", '["a", ""]', "[1] must be a string that is not empty"),
        ("choices", '["a", 5]', "[1] must be a string that is not empty, got 5"),
        ("choices", '["\\ud800"]', "[0] is not valid Unicode"),
        ("choices", "[", "is not valid JSON"),
        ("choices", '"a"', "must be a list of 1 to 4096 strings, got 'a'"),
        ("json_schema", "{", "field"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unmatched ("),
        ("json_schema", '{"type": "string", "pattern": "(?=x)"}', "lookahead"),
        ("json_schema", '{"enum": []}', "no value"),
        ("json_schema", '{"type": "string", "minLength": 3, "pattern": "^a{0,2}$"}', "no value"),
        ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "multipleOf"),
        ("regex", "a" * 70_000, "more than 65536"),
        ("regex", "(", "field: no pattern: an unmatched ( at position 0"),
        ("regex", "a)", "field: no pattern: an unmatched ) at position 1"),
        ("regex", "[a", "field: no pattern: an unmatched [ at position 0"),
        ("regex", "[z-a]", "field: no pattern: a range with its ends out of order at position 2"),
        ("regex", "*a", "field: no pattern: a quantifier * with nothing before it at position 0"),
        ("regex", "a{2,1}", "field: no pattern: a repeat {2,1} with its bounds out of order at position 1"),
        ("regex", "a(?=b)", "field: lookahead (?= at position 1 is not supported"),
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
    """What is forced is walked through at once, so its length is bounded, on machines of any speed."""
    said = refusal("regex", "(a{1000}){1000}")
    assert said == (
        "field: the shortest text that it matches has 1000000 characters, above the limit of 65536"
    )
    eighth = MAX_SHORTEST // 8
    for pattern in (f"(a|bc){{8}}((x{{{eighth - 1}}}){{8}}|y+(z{{9999}}){{9}})", "((a?){100}|b){1000}"):
        compiled("regex", pattern)
    assert f"has {MAX_SHORTEST + 1} characters" in refusal("regex", f"a(b{{{eighth}}}){{8}}")
    assert takes(compiled("regex", "(a{30}){3}"), "a" * 90)


def test_a_limit_of_the_engine_is_named_in_our_words() -> None:
    patterns = [{"type": "string", "pattern": f"[a-z]{{{i}}}x.{{{i},{i + 9}}}$"} for i in range(9)]
    said = refusal("json_schema", {"allOf": patterns})
    assert said == (
        "field: the constraint cannot be compiled: it is too complex: to see what its patterns can match"
        f" takes more than {FUEL_AT_FIRST} steps"
    )
    rules = [f'r{i}: "a" "b" r{i}? "c{i}"' for i in range(900)]
    starts = " | ".join(f"r{i}" for i in range(900))
    wide = engine().compile("\n".join([f"start: {starts}", *rules]))
    wide.accept(engine().tokenize("a"))
    assert wide.error == f"it is too complex: one place of it takes more than {ITEMS_IN_ROW} parser items"


def test_numbers_that_cannot_be_written_are_said_to_be_so() -> None:
    said = refusal("json_schema", {"type": "number", "minimum": 1e307, "maximum": 1.7e308})
    assert said == (
        "field: the schema admits no value that can be written: numbers have at most 20 digits before the"
        " point and 20 behind it"
    )
    other = refusal("json_schema", {"type": "string", "minLength": 3, "pattern": "^a{0,2}$"})
    assert "the schema admits no value (see /pattern)" in other
    either = compiled("json_schema", {"anyOf": [{"type": "integer", "minimum": 10**30}, {"type": "null"}]})
    assert takes(either, "null")
