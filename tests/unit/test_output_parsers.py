"""Reasoning, content and calls come out the same however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from sapwood.srt.messages import Incomplete
from sapwood.srt.params import Parsing
from sapwood.srt.tokenizer.parsers.calls import MAX_CALL_CHARS, MAX_DEPTH
from sapwood.srt.tokenizer.parsers.literals import NotLiteral, keywords
from sapwood.srt.tokenizer.parsers.output import OutputParser, Told
from sapwood.srt.tokenizer.parsers.thinking import state_of_prompt

NAMES = ["f", "g", "get_weather"]


class Whole(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    called: bool


def read(parsing: Parsing, pieces: Iterable[str], reasons: bool = False) -> Whole:
    """What the pieces of one output come to, put together as a client does."""
    parser = OutputParser(parsing, reasons)
    told = Told()
    for piece in pieces:
        told = told.and_then(parser.feed(piece))
    told = told.and_then(parser.finish())
    names: list[str] = []
    arguments: list[str] = []
    for delta in told.calls:
        if delta.index == len(names):
            assert delta.id.startswith("call_")
            assert len(delta.id) == 29
            names.append(delta.name)
            arguments.append("")
        else:
            assert delta.index == len(names) - 1
            assert (delta.id, delta.name) == ("", "")
        arguments[-1] += delta.arguments
    return Whole(told.reasoning, told.content, list(zip(names, arguments, strict=True)), parser.called)


def cuts(text: str) -> Iterator[list[str]]:
    """The text whole, character by character, in any two pieces, and in many random ones."""
    yield [text]
    yield [*text]
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    drawn = random.Random(text)
    for _ in range(20):
        ends = sorted(drawn.randrange(len(text) + 1) for _ in range(6))
        yield [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


def check(parsing: Parsing, text: str, expected: Whole, reasons: bool = False) -> None:
    for pieces in cuts(text):
        assert read(parsing, pieces, reasons) == expected, pieces


def tools(tool_format: str) -> Parsing:
    return Parsing(tool_format, NAMES)


F1 = '{"name": "f", "arguments": {"a": 1}}'
G2 = '{"arguments": {"b": ["x, }", {"c": "\\"}"}]}, "name": "g"}'
P1 = '{"name": "f", "parameters": {"a": 1}}'
B = '{"b": ["x, }", {"c": "\\"}"}]}'

HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    (f"<tool_call>\n{F1}\n</tool_call>", "", [("f", '{"a": 1}')]),
    (f"<tool_call>{F1}</tool_call>\n<tool_call>\n{G2}\n</tool_call>", "", [("f", '{"a": 1}'), ("g", B)]),
    (f"Let me see:\n<tool_call>\n{F1}\n</tool_call>\nDone.", "Let me see:\nDone.", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("Plain <b>text</b> < 3, <tool", "Plain <b>text</b> < 3, <tool", []),
    ("\n\nPlain\n", "\n\nPlain\n", []),
    ("<tool_call> is how calls begin", "<tool_call> is how calls begin", []),
    (
        f"<tool_call>{{}}</tool_call><tool_call>{F1}</tool_call>",
        "<tool_call>{}</tool_call>",
        [("f", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    check(tools("hermes"), text, Whole("", content, calls, bool(calls)))


LLAMA3: list[tuple[str, str, list[tuple[str, str]]]] = [
    (P1, "", [("f", '{"a": 1}')]),
    (f"<|python_tag|>{P1}", "", [("f", '{"a": 1}')]),
    (f"\n{P1}; {G2}", "", [("f", '{"a": 1}'), ("g", B)]),
    (f"{P1}\n{F1}", "", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    (f"{P1} and so on", " and so on", [("f", '{"a": 1}')]),
    (f"{P1};", "", [("f", '{"a": 1}')]),
    (f"Text first {P1}", f"Text first {P1}", []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|python", "<|python", []),
    ("", "", []),
    (
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Köln"}}',
        "",
        [("get_weather", '{"city": "Köln"}')],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA3)
def test_llama3_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    check(tools("llama3_json"), text, Whole("", content, calls, bool(calls)))


MISTRAL: list[tuple[str, str, list[tuple[str, str]]]] = [
    (f"[TOOL_CALLS] [{F1}]", "", [("f", '{"a": 1}')]),
    (f"[TOOL_CALLS][{F1}, {G2}]", "", [("f", '{"a": 1}'), ("g", B)]),
    (f"Well. [TOOL_CALLS] [{F1}]", "Well.", [("f", '{"a": 1}')]),
    ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("[TOOL", "[TOOL", []),
    ("[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), MISTRAL)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    check(tools("mistral"), text, Whole("", content, calls, bool(calls)))


ARGS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (f"[TOOL_CALLS]f[ARGS]{{}}[TOOL_CALLS]g[ARGS] {B}", "", [("f", "{}"), ("g", B)]),
    ("Well. [TOOL_CALLS]f[ARGS]{}", "Well.", [("f", "{}")]),
    ("[TOOL_CALLS]h[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}", []),
    ("[TOOL_CALLS]f[ARG", "[TOOL_CALLS]f[ARG", []),
    ("[TOOL_CALLS]f[ARGS] x", "[TOOL_CALLS]f[ARGS] x", []),
    ("[TOOL_CALLS] f", "[TOOL_CALLS] f", []),
    ("[TOOL_CALLS]f {}", "[TOOL_CALLS]f {}", []),
    ("[TOOL_CALLS]" + "f" * 70, "[TOOL_CALLS]" + "f" * 70, []),
]


@pytest.mark.parametrize(("text", "content", "calls"), ARGS)
def test_mistral_with_arguments_marked(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    check(tools("mistral_args"), text, Whole("", content, calls, bool(calls)))


PYTHONIC: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("[f(a=1)]", "", [("f", '{"a": 1}')]),
    (
        "[f(a=1, b='it\\'s (ok)'), g()]",
        "",
        [("f", '{"a": 1, "b": "it\'s (ok)"}'), ("g", "{}")],
    ),
    (
        "<|python_start|>[ get_weather( city = \"K]öln\", days = [1, -2.5, (True, None)], o = {'k': {}}, ) ]"
        "<|python_end|>",
        "",
        [("get_weather", '{"city": "K]öln", "days": [1, -2.5, [true, null]], "o": {"k": {}}}')],
    ),
    ("[f(a=1)] and more", " and more", [("f", '{"a": 1}')]),
    ("[1] is a footnote", "[1] is a footnote", []),
    ("[f, g]", "[f, g]", []),
    ("[h(a=1)]", "[h(a=1)]", []),
    ("[f(__import__('os').system('x'))]", "[f(__import__('os').system('x'))]", []),
    ("[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("[f(a=1", "[f(a=1", []),
    ("[f(a=[1)]", "[f(a=[1)]", []),
    ("plain", "plain", []),
    ("  [", "  [", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), PYTHONIC)
def test_pythonic(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    check(tools("pythonic"), text, Whole("", content, calls, bool(calls)))


THINK = Parsing(reasoning_format="think")


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes", False, "Hm.\n\nSo.", "Yes"),
        ("Hm.\n</think>Yes\n", True, "Hm.", "Yes\n"),
        ("\n\n</think>\n\nYes", True, "", "Yes"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("  <thin", False, "", "  <thin"),
        ("<think>on and on\n</th", False, "on and on\n</th", ""),
        ("", True, "", ""),
        ("\n </think>", True, " ", ""),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    check(THINK, text, Whole(reasoning, content, [], False), opened)


def test_a_call_in_the_reasoning_is_none() -> None:
    parsing = Parsing("hermes", NAMES, "think")
    call = f"<tool_call>\n{F1}\n</tool_call>"
    text = f"<think>I could {call}</think>\n\n{call}"
    check(parsing, text, Whole(f"I could {call}", "", [("f", '{"a": 1}')], True))


def test_what_the_prompt_has_begun() -> None:
    assert state_of_prompt("<|im_start|>assistant\n<think>\n") == "open"
    assert state_of_prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"
    assert state_of_prompt("<|im_start|>assistant\n") == "none"


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputParser(tools("hermes"), False)
    shown = [parser.feed(char) for char in f'<tool_call>{{"name": "f", "arguments": {B}}}']
    deltas = [delta for told in shown for delta in told.calls]
    assert deltas[0].name == "f"
    assert len(deltas) > len(B) / 3
    assert "".join(delta.arguments for delta in deltas) == B


def test_a_call_that_breaks_is_incomplete() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call> after'
    expected = read(tools("hermes"), [text])
    for pieces in cuts(text):
        whole = read(tools("hermes"), pieces)
        assert whole == expected
        assert not whole.called
        assert whole.calls[0][0] == "f"
        assert (whole.calls[0][1] + whole.content).replace(" ", "").startswith('{"a":n')
        assert whole.content.endswith("</tool_call> after")


def test_a_call_that_is_cut_is_incomplete() -> None:
    for text in ('<tool_call>{"name": "f", "arguments": {"a": "x', f"<tool_call>{F1[:-1]}"):
        whole = read(tools("hermes"), [*text])
        assert not whole.called
        assert whole.calls[0][0] == "f"
        assert whole.content == ""


def parts(text: str) -> Iterator[list[str]]:
    """The text whole, and in pieces of several sizes."""
    for size in (len(text), 1, 7, 1000):
        yield [text[at : at + size] for at in range(0, len(text), size)]


NO_NAMES = {
    "a deep list": "[" * 5000,
    "a deep value": "[" * 5000 + "]" * 5000,
    "a long number": "9" * 5000,
    "a long text": '"' + "f" * 5000 + '"',
    "a long escaped text": '"' + "\\u0066" * 70 + '"',
    "an object": '{"a": "f"}',
    "null": "null",
}


@pytest.mark.parametrize("what", NO_NAMES)
def test_no_name_can_end_the_process(what: str) -> None:
    text = f'<tool_call>{{"name": {NO_NAMES[what]}, "arguments": {{}}}}</tool_call>'
    for pieces in parts(text):
        assert read(tools("hermes"), pieces) == Whole("", text, [], False)


def test_a_name_may_be_escaped() -> None:
    text = '{"name": "\\u0067\\u0065t_weather", "parameters": {}}'
    check(tools("llama3_json"), text, Whole("", "", [("get_weather", "{}")], True))


def test_arguments_have_a_depth() -> None:
    for depth, called in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False)):
        arguments = '{"a": ' * depth + "1" + "}" * depth
        whole = read(tools("hermes"), [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
        assert whole.called == called
        assert whole.calls[0][1] == arguments if called else whole.content


def test_only_a_calls_members_are_waited_for() -> None:
    """Another object flows on as it comes."""
    for tool_format, opening in (
        ("llama3_json", ""),
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS] ["),
    ):
        parser = OutputParser(tools(tool_format), False)
        begun = f'{opening}{{"id": 7, "answer": "'
        assert parser.feed(begun).content == begun
        assert parser.feed("lo").content == "lo"
    members = '"type": "function", "id": "x", "name": "f", "parameters": {"a": 1}, "more": [1]'
    check(tools("llama3_json"), f"{{{members}}}", Whole("", "", [("f", '{"a": 1}')], True))


LONG = {
    "hermes": [
        f'<tool_call>{{"id": "{"x" * MAX_CALL_CHARS}", "name": "f", "arguments": {{}}}}</tool_call>',
        f'<tool_call>{{"arguments": {{"a": "{"x" * MAX_CALL_CHARS}"}}, "name": "f"}}</tool_call>',
        "<tool_call>" + "\n" * MAX_CALL_CHARS + F1 + "</tool_call>",
    ],
    "mistral_args": ["[TOOL_CALLS]f[ARGS]" + " " * MAX_CALL_CHARS + "{}"],
}


@pytest.mark.parametrize("tool_format", LONG)
def test_what_is_too_long_for_a_call_is_held_no_longer(tool_format: str) -> None:
    for text in LONG[tool_format]:
        for pieces in parts(text):
            assert read(tools(tool_format), pieces) == Whole("", text, [], False)
        parser = OutputParser(tools(tool_format), False)
        ends = range(0, MAX_CALL_CHARS + 100, 100)
        assert any(parser.feed(text[at : at + 100]).content for at in ends)


def test_long_arguments_are_no_matter() -> None:
    arguments = f'{{"a": "{"x" * 2 * MAX_CALL_CHARS}"}}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for size in (1000, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(tools("hermes"), pieces) == Whole("", "", [("f", arguments)], True)


def test_nothing_is_lost_without_a_call() -> None:
    """Random text of the marks' own characters, in every format, comes out as it went in."""
    drawn = random.Random(5)
    marks = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[",
        "]",
        "{",
        "}",
        '"name"',
        ":",
        " ",
    ]
    for number in range(600):
        text = "".join(drawn.choice([*marks, "x", "\n", "(", '"h"']) for _ in range(drawn.randrange(12)))
        for name in ("hermes", "mistral", "mistral_args", "llama3_json", "pythonic"):
            pieces = [*text] if number % 2 else [text]
            assert read(tools(name), pieces) == Whole("", text, [], False), (name, text)


@pytest.mark.parametrize(
    "text",
    ["1", "a=", "a=b", "a=1 b=2", "a=[1", "a={1: 2}", "a=1, a=2", "a='x", "a=lambda: 1", "a=-x", "a=1+1",
     "a='\\ud800'", "a=" + "[" * 100 + "]" * 100, "a=1e999", "a=[-1e999]",
     "**a", "a=f'x'", "a=" + "9" * 500],
)  # fmt: skip
def test_what_is_no_literal(text: str) -> None:
    with pytest.raises(NotLiteral):
        keywords(text)


def test_literals() -> None:
    def value(text: str) -> Any:
        return keywords(f"a={text}")["a"]

    assert value('"\\n\\x41\\u00e9\\U0001F600\\101\\q"') == "\n\x41\u00e9\U0001f600A\\q"
    assert value("'a' \"b\"") == "ab"
    assert value("(1,)") == [1]
    assert value("(1)") == 1
    assert value("()") == []
    assert value("+1e3") == 1000.0
    assert value(".5") == 0.5
    assert value("[true, false, null, True, False, None]") == [True, False, None] * 2
    assert keywords("") == {}
    assert json.dumps(keywords("b=1, a=2,")) == '{"b": 1, "a": 2}'


CUT: list[tuple[str, str, Incomplete | None]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"l": ["x', Incomplete("/l/0", "string")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', Incomplete("", "key")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12', Incomplete("/a", "number")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {', Incomplete("", "object")),
    ("llama3_json", '{"name": "f", "parameters": {"a": {"b~/": tr', Incomplete("/a/b~0~1", "literal")),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"l": [1, [', Incomplete("/l/1", "array")),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"l": {"x": "', Incomplete("/l/x", "string")),
]


@pytest.mark.parametrize(("tool_format", "text", "place"), CUT)
def test_where_the_arguments_of_a_cut_call_stand(tool_format: str, text: str, place: Incomplete) -> None:
    for pieces in cuts(text):
        parser = OutputParser(tools(tool_format), False)
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        pointer = f"/tool_calls/0/function/arguments{place.pointer}"
        assert parser.place == Incomplete(pointer, place.inside)


def test_the_second_call_is_told_from_the_first() -> None:
    parser = OutputParser(tools("hermes"), False)
    parser.feed(f"<tool_call>{F1}</tool_call>")
    assert parser.place is None
    parser.feed('<tool_call>{"name": "f"')
    assert parser.place is None
    parser.feed(', "arguments": {"a": "')
    assert parser.place == Incomplete("/tool_calls/1/function/arguments/a", "string")
    parser.feed('"}')
    assert parser.place == Incomplete("/tool_calls/1/function", "object")
    parser.feed("}")
    assert parser.place is None


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("hermes", f"<tool_call>\n{F1}\n</tool_call>"),
        ("llama3_json", F1.replace("arguments", "parameters")),
        ("mistral", f"[TOOL_CALLS] [{F1}]"),
        ("mistral_args", f"[TOOL_CALLS]f[ARGS]{B}"),
    ],
)
def test_a_forced_call_is_no_content_wherever_it_is_cut(tool_format: str, call: str) -> None:
    forced = Parsing(tool_format, NAMES, calls_only=True)
    leaked = 0
    for end in range(len(call) + 1):
        for pieces in ([call[:end]], [*call[:end]]):
            assert read(forced, pieces).content == ""
            leaked += read(tools(tool_format), pieces).content != ""
    assert leaked > 0
    whole = read(forced, [call])
    assert (whole.content, whole.called, len(whole.calls)) == ("", True, 1)


def test_forced_calls_come_after_the_reasoning() -> None:
    parsing = Parsing("hermes", NAMES, "think", calls_only=True)
    whole = read(parsing, ["<think>\nHm.</think>\n\n<tool_ca"])
    assert (whole.reasoning, whole.content) == ("Hm.", "")
