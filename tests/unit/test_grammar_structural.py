"""Structural tags: free text, and tags in it whose contents are constrained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grammars import CALL, compiled, engine, refusal, takes

ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
BODY = {"type": "json_schema", "json_schema": ARGUMENTS}
X = '<function=f>{"a": 1}</function>'
Y = '<function=g>{"a": 2}</function>'


def tag(name: str) -> dict[str, Any]:
    return {"type": "tag", "begin": f"<function={name}>", "content": BODY, "end": "</function>"}


def structural(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def triggered(**more: Any) -> dict[str, Any]:
    return structural(
        {"type": "triggered_tags", "triggers": ["<function="], "tags": [tag("f"), tag("g")], **more}
    )


def verdicts(form: dict[str, Any], texts: list[str]) -> list[bool]:
    matcher = compiled("structural_tag", form)
    return [takes(matcher, text) for text in texts]


TEXTS = [
    "",
    "hi <func",
    X,
    f"hi {X} and {Y}!",
    X + Y,
    "<function=h>",
    f"{X},{Y}",
    '<function=f>{"a": "x"}</function>',
]


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (triggered(), [1, 1, 1, 1, 1, 0, 1, 0]),
        (triggered(stop_after_first=True), [1, 1, 1, 0, 0, 0, 0, 0]),
        (triggered(at_least_one=True), [0, 0, 1, 0, 1, 0, 1, 0]),
        (triggered(at_least_one=True, stop_after_first=True), [0, 0, 1, 0, 0, 0, 0, 0]),
        (triggered(excludes=["and"]), [1, 1, 1, 0, 1, 0, 1, 0]),
        (
            structural({"type": "tags_with_separator", "tags": [tag("f"), tag("g")], "separator": ","}),
            [1, 0, 1, 0, 0, 0, 1, 0],
        ),
        (
            structural(
                {"type": "tags_with_separator", "tags": [tag("f")], "separator": "", "at_least_one": True}
            ),
            [0, 0, 1, 0, 0, 0, 0, 0],
        ),
        (
            {
                "type": "structural_tag",
                "triggers": ["<function="],
                "structures": [
                    {"begin": f"<function={n}>", "schema": ARGUMENTS, "end": "</function>"} for n in "fg"
                ],
            },
            [1, 1, 1, 1, 1, 0, 1, 0],
        ),
    ],
)
def test_triggers_and_separators(form: dict[str, Any], wanted: list[int]) -> None:
    assert verdicts(form, TEXTS) == list(map(bool, wanted))


def test_kinds_of_content() -> None:
    think = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    texts = ['<think>a < b</think>{"a": 1}', "<think></think>x", '{"a": 1}']
    assert verdicts(structural({"type": "sequence", "elements": [think, BODY]}), texts) == [
        True,
        False,
        False,
    ]

    pattern = {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "regex", "pattern": ".*"},
        "end": ["</a>", "</b>"],
    }
    assert verdicts(structural(pattern), ["<a>xyz</a>", "<a></b>", "<a>x</a>y</b>", "<a>x"]) == [
        True,
        True,
        False,
        False,
    ]

    parts = [
        {"type": "any_text"},
        {"type": "const_string", "value": "END"},
        {"type": "regex", "pattern": "[a-z]+"},
        tag("f"),
    ]
    texts = [f"abcENDab{X}", f"ENDab{X}", "ENDab", f"END{X}"]
    assert verdicts(structural({"type": "sequence", "elements": parts}), texts) == [True, True, False, False]

    grammar = {"type": "grammar", "grammar": 'root ::= "(" root ")" | [0-9]+'}
    for kind, more, wanted in (
        ("optional", {}, [1, 1, 0, 0]),
        ("plus", {}, [0, 1, 1, 1]),
        ("star", {}, [1, 1, 1, 1]),
        ("repeat", {"min": 2, "max": 2}, [0, 0, 1, 0]),
        ("repeat", {"min": 2, "max": -1}, [0, 0, 1, 1]),
    ):
        content = {"type": "tag", "begin": "<", "content": grammar, "end": ">"}
        texts = ["!", "<1>!", "<(1)><2>!", "<1><2><3>!"]
        form = {
            "type": "sequence",
            "elements": [{"type": kind, "content": content, **more}, {"type": "const_string", "value": "!"}],
        }
        assert verdicts(structural(form), texts) == list(map(bool, wanted)), kind


TEXT = {"type": "any_text"}
LETTERS = {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-z]*'}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def around(content: dict[str, Any], begin: str = "<t>", end: str = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(once: bool, *tags: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "tags_with_separator", "tags": [*tags], "separator": ","}
    return {**form, "at_least_one": True, "stop_after_first": once}


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (around({"type": "optional", "content": TEXT}), ["<t>a</t>", "<t></t>"], ["<t>a", "<t>a</t>b</t>"]),
        (
            around({"type": "repeat", "content": TEXT, "min": 1, "max": 1}),
            ["<t>a</t>", "<t></t>"],
            ["<t>a", "<t>a</t>b</t>"],
        ),
        (sequence({"type": "or", "elements": [TEXT, const("yes")]}, const("END")), ["aEND", "yesEND"], ["a"]),
        (sequence(around(TEXT, "<a>", ""), tag("f")), [f"<a>hi{X}"], ["<a>hi", f"<a>{X}!"]),
        (sequence(sequence(const("a"), TEXT), const("END")), ["aEND", "abEND"], ["a", "END"]),
        (
            around({"type": "grammar", "grammar": "root ::= [^z]*"}),
            ["<t>a b</t>", "<t></t>"],
            ["<t>z</t>", "<t>a", "<t>a</t>b"],
        ),
        (around(LETTERS, end="x!"), ["<t>(ab)x!", "<t>xx!", "<t>abx!"], ["<t>(ab)", "<t>abx", "<t>(x!"]),
        (sequence(LETTERS, tag("f")), [f"((ab)){X}", X], ["(ab)", f"(ab{X}"]),
        (sequence({"type": "regex", "pattern": "[0-9]{2}"}, BODY), ['12{"a": 1}'], ['1{"a": 1}', "12"]),
        (
            sequence({"type": "plus", "content": {"type": "regex", "pattern": "[a-z]+;"}}, const("!")),
            ["ab;!", "ab;c;!"],
            ["!", "ab!"],
        ),
        (around(triggered()["format"]), [f"<t>a{X}b</t>", "<t></t>"], [f"<t>{X}", "<t></t>!"]),
        (tags(True, around(TEXT, "<a>", "")), ["<a>x", "<a>"], ["a"]),
    ],
)
def test_text_ends_where_what_follows_begins(form: dict[str, Any], yes: list[str], no: list[str]) -> None:
    assert verdicts(structural(form), yes + no) == [True] * len(yes) + [False] * len(no)


def test_a_document_or_calls_that_begin_like_it() -> None:
    documents = [{}, {"type": "object"}, {"type": "object", "properties": {"name": {"type": "integer"}}}]
    for schema, name in [*((schema, "name") for schema in documents), ({}, 'n\\"ame')]:
        begin = f'{{"{name}": "foo", "parameters": '
        call = {"type": "tag", "begin": begin, "content": BODY, "end": "}"}
        calls = {"type": "tags_with_separator", "tags": [call], "separator": "; ", "at_least_one": True}
        form = structural({"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]})
        one = begin + '{"a": 1}}'
        texts = [
            '{"nation": 1}',
            one,
            f"{one}; {one}",
            f'{{"{name}": 5, "x": 1}}',
            begin + "1",
            "",
        ]
        assert verdicts(form, texts) == [True, True, True, True, False, False], schema


def test_a_trigger_may_be_one_special_token_or_its_text() -> None:
    begin = CALL + '\n{"name": "f", "arguments": '
    call = {"type": "tag", "begin": begin, "content": BODY, "end": "}\n</tool_call>"}
    form = structural({"type": "triggered_tags", "triggers": [CALL], "tags": [call]})
    matcher = compiled("structural_tag", form)
    token = engine().special(CALL)
    assert token is not None
    assert engine().special("</tool_call>") is None
    assert engine().pieces(f"a{CALL}b") == [("a", None), (CALL, token), ("b", None)]
    rest = engine().tokenize('\n{"name": "f", "arguments": {"a": 5}}\n</tool_call> and more')
    plain = [engine().tokenize(char)[0] for char in CALL]
    assert token not in plain
    for opening in ([token], plain):
        found = matcher.copy()
        ids = [*engine().tokenize("text "), *opening, *rest]
        assert found.accept(ids) == len(ids)
        assert found.complete
        wrong = matcher.copy()
        ids = [*opening, *engine().tokenize('\n{"name": "g"')]
        assert wrong.accept(ids) < len(ids)
    behind = matcher.copy()
    behind.accept([token])
    assert bytes(engine()._tokenizer.decode_bytes(behind.forced())).startswith(b'\n{"name": "f", "arg')


def test_a_constraint_begins_after_a_text() -> None:
    whole = compiled("json_schema", {"type": "integer"}, after="</think>")
    texts = [
        "let me </thin see</think>\n\n5",
        "</think>5",
        "5",
        "think",
        "a</think>\n\n\n\n\n5",
        "a</think> x",
    ]
    assert [takes(whole, text) for text in texts] == [True, True, False, False, False, False]
    special = compiled("choices", ["yes"], after=CALL)
    token = engine().special(CALL)
    assert token is not None
    ids = [*engine().tokenize("hm "), token, *engine().tokenize("\nyes")]
    assert special.copy().accept(ids) == len(ids)
    opened = compiled("structural_tag", triggered(), after="</think>", opening="<think>")
    texts = [
        f"<think>it is {X} not</think>\nhi {X}",
        f"hi {X}",
        "<think>never ends <function=h>",
        "<think>a</think><function=h>",
    ]
    assert [takes(opened, text) for text in texts] == [True, True, False, False]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ({"type": "foo"}, "/format: the type 'foo' is not supported"),
        ({"type": "token", "token": 1}, "the type 'token' is not supported"),
        ({"type": "tag", "begin": "x"}, "/format/content is not what tag needs"),
        ({"type": "any_text", "max_tokens": 3}, "/format/max_tokens is not supported in any_text"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, BODY]},
            "/format/elements/1: text must be followed by",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<x"], "tags": [tag("f")]},
            "/format/tags/0/begin must begin with one trigger",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<", "<f"], "tags": [tag("f")]},
            "must begin with one trigger, and has 2",
        ),
        (
            {"type": "triggered_tags", "triggers": [""], "tags": [tag("f")]},
            "/format/triggers must be a list of strings",
        ),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "/format/tags must not be empty"),
        ({"type": "or", "elements": []}, "must not be empty"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "only json is supported"),
        ({"type": "json_schema", "json_schema": {"type": "x"}}, "/format/json_schema"),
        ({"type": "regex", "pattern": "(?=a)"}, "/format/pattern: lookahead"),
        ({"type": "grammar", "grammar": "x"}, "/format/grammar"),
        ({"type": "repeat", "content": BODY, "min": 3, "max": 2}, "min and max"),
        ({"type": "star", "content": TEXT}, "/format/content: text must be followed by"),
        (
            sequence({"type": "or", "elements": [TEXT, const("a")]}, BODY),
            "/format/elements/1: text must be followed by",
        ),
        (
            sequence({"type": "grammar", "grammar": "root ::= [^z]*"}, BODY),
            "/format/elements/1: text must be",
        ),
        (sequence(LETTERS, BODY), "/format/elements/1: text must be followed by"),
        (tags(False, around(TEXT, "<a>", "")), "/format/tags/0/content: text must be followed by"),
        (
            {"type": "triggered_tags", "triggers": ["<a>"], "tags": [around(TEXT, "<a>", "")]},
            "/format/tags/0/content: text must be followed by",
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [tag("f")]},
            "/format/triggers: no tag begins with '<g'",
        ),
        (5, "/format: the type None"),
    ],
)
def test_what_is_wrong_is_named(form: Any, names: str) -> None:
    assert names in refusal("structural_tag", structural(form))


def test_other_refusals() -> None:
    assert "not valid JSON" in refusal("structural_tag", '{"type"')
    assert "structural_tag" in refusal("structural_tag", "[]")
    assert "triggers" in refusal("structural_tag", {"type": "structural_tag", "structures": []})
    deep: Any = BODY
    for _ in range(70):
        deep = {"type": "optional", "content": deep}
    assert "deep" in refusal("structural_tag", structural(deep))
