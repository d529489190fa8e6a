"""A choice's text on its way to the server: taken apart, with the end that it had and where it was cut."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from sapwood.srt.messages import Chunk, Done, Finish, Incomplete, Kept, pack
from sapwood.srt.params import Constraint, Parsing, SamplingParams
from sapwood.srt.tokenizer.detokenizer import TextStream
from sapwood.srt.tokenizer.requests import Request

EOS = 0


class Words(TextStream):
    """Each token is a letter of the test's own text, or a special word."""

    def __init__(self, words: dict[int, str]) -> None:
        self._words = words

    def push(self, token: int) -> str:
        return self._words.get(token, chr(token))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Alphabet:
    """A vocabulary of characters (ids are code points) and of two special tokens."""

    special: ClassVar = {EOS: "<eos>", 1: "<tool_call>", 2: "</tool_call>"}

    def __init__(self) -> None:
        self.shown: list[frozenset[str]] = []

    def stream(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> TextStream:
        self.shown.append(shown)
        hidden = {i: "" for i, text in self.special.items() if skip_special_tokens and text not in shown}
        return Words({**self.special, **hidden})

    def describe(self, token: int) -> tuple[str, bytes]:
        text = self.special.get(token, chr(token))
        return text, text.encode()


def run(
    ids: list[int],
    *,
    prompt: str = "x",
    reason: Any = "stop",
    parsing: Parsing | None = None,
    constraint: Constraint | None = None,
    **params: Any,
) -> tuple[list[Chunk], Finish]:
    """The chunks of one choice, one a token, and its finish."""
    request = Request("r", 1, SamplingParams(**params), True, constraint, parsing)
    texts = Alphabet()
    request.settle(texts, pack([ord(char) for char in prompt]))
    (choice,) = request.choices(texts, [EOS])
    chunks = []
    for token in ids:
        choice.push(token)
        if (chunk := choice.chunk()) is not None:
            chunks.append(chunk)
    last = choice.finish(Done(1, 0, len(ids), reason, EOS if ids[-1] == EOS else None, None, 5, 3))
    assert last is not None
    assert last.finish is not None
    return [*chunks, last], last.finish


def spell(text: str) -> list[int]:
    return [ord(char) for char in text]


def content(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


TOOLS = Parsing("hermes", ["f"])
CALL = '{"name": "f", "arguments": {"a": 1}}'


def test_marks_that_are_special_tokens_are_seen_and_others_are_not() -> None:
    chunks, finish = run([*spell("Hm."), 1, *spell(CALL), 2, EOS], parsing=TOOLS)
    assert content(chunks) == "Hm."
    deltas = [delta for chunk in chunks for delta in chunk.calls]
    assert deltas[0].name == "f"
    assert "".join(delta.arguments for delta in deltas) == '{"a": 1}'
    assert finish.reason == "tool_calls"
    assert (finish.drafted, finish.accepted) == (5, 3)
    plain, finish = run([1, *spell(CALL), 2, EOS])
    assert content(plain) == CALL
    assert finish.reason == "stop"


def test_calls_count_only_if_they_are_complete_and_the_end_is_the_models() -> None:
    """P26"""
    call = [1, *spell(CALL), 2]
    assert run([*call, EOS], parsing=TOOLS)[1].reason == "tool_calls"
    assert run(call, parsing=TOOLS, reason="length")[1].reason == "length"
    assert run(call[:-4], parsing=TOOLS, reason="length")[1].reason == "length"
    assert run([*call[:-4], EOS], parsing=TOOLS)[1].reason == "stop"
    assert run([*call, 1, *spell(CALL[:-3]), EOS], parsing=TOOLS)[1].reason == "stop"
    _, finish = run([*call, *spell("END")], parsing=TOOLS, stop=["END"])
    assert finish == Finish("stop", "END", len(call) + 3, None, 5, 3, Kept(len(call), ""))
    chunks, finish = run([*spell("plain text"), EOS], parsing=TOOLS)
    assert (content(chunks), finish.reason) == ("plain text", "stop")


def test_what_looked_like_a_call_comes_in_the_end() -> None:
    chunks, _ = run([*spell("a "), 1, *spell(" b"), EOS], parsing=TOOLS)
    assert content(chunks) == "a <tool_call> b"
    chunks, _ = run([*spell("a "), 1, *spell('{"na')], parsing=TOOLS, reason="length")
    assert content(chunks) == 'a <tool_call>{"na'


THINK = Parsing(reasoning_format="think")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "shown"),
    [
        ("a<think>\n", "Hm.</think>\n\nYes", "Hm.", "Yes"),
        ("a<think>\n\n</think>\n\n", "Hm.</think>\n\nYes", "", "Hm.</think>\n\nYes"),
        ("a", "<think>\nHm.\n</think>\n\nYes", "Hm.", "Yes"),
        ("a", "Yes", "", "Yes"),
    ],
)
def test_the_prompt_says_where_the_reasoning_stands(
    prompt: str, text: str, reasoning: str, shown: str
) -> None:
    chunks, _ = run([*spell(text), EOS], prompt=prompt, parsing=THINK)
    assert "".join(chunk.reasoning for chunk in chunks) == reasoning
    assert content(chunks) == shown


def test_a_constraint_is_in_force_at_once_where_the_prompt_has_ended_the_reasoning() -> None:
    constraint = Constraint("regex", "a", "regex", 0, "</think>", "<think>")
    cases = {"<think>": ("</think>", ""), "</think>\n": ("", ""), "x": ("</think>", "<think>")}
    for prompt, expected in cases.items():
        request = Request("r", 1, SamplingParams(), True, constraint, THINK)
        request.settle(Alphabet(), pack(spell(prompt)))
        assert request.constraint is not None
        assert (request.constraint.after, request.constraint.opening) == expected


SCHEMA = Constraint("json_schema", "{}", "json_schema")


def test_where_a_document_was_cut() -> None:
    """P36"""
    cut = spell('{"a": ["x", "y')
    assert run(cut, constraint=SCHEMA, reason="length")[1].incomplete == Incomplete("/a/1", "string")
    assert run(spell('{"a": 1}'), constraint=SCHEMA, reason="length")[1].incomplete is None
    assert run(cut, reason="length")[1].incomplete is None
    assert run([*cut, EOS], constraint=SCHEMA)[1].incomplete is None
    regex = Constraint("regex", "a+", "regex")
    assert run(spell("aa"), constraint=regex, reason="length")[1].incomplete == Incomplete("", "text")


def test_where_a_constrained_call_was_cut() -> None:
    tag = Constraint("structural_tag", "{}", "tools")
    calls = replace(TOOLS, calls_only=True)
    cut = [1, *spell('{"name": "f", "arguments": {"a": ["x')]
    _, finish = run(cut, constraint=tag, parsing=calls, reason="length")
    assert finish.incomplete == Incomplete("/tool_calls/0/function/arguments/a/0", "string")
    chunks, finish = run(cut[:12], constraint=tag, parsing=calls, reason="length")
    assert (content(chunks), finish.incomplete) == ("", Incomplete("", "text"))
    assert run(cut, parsing=TOOLS, reason="length")[1].incomplete is None


def test_where_a_document_after_reasoning_was_cut() -> None:
    text = spell('<think>{"no": "</think>\n\n{"a": 12')
    _, finish = run(text, constraint=SCHEMA, parsing=THINK, reason="length")
    assert finish.incomplete == Incomplete("/a", "number")
    _, finish = run(spell("<think>on"), constraint=SCHEMA, parsing=THINK, reason="length")
    assert finish.incomplete == Incomplete("", "text")


def test_a_stop_string_ends_a_document_that_is_incomplete() -> None:
    """P36"""
    chunks, finish = run(spell('{"a": "xENDy'), constraint=SCHEMA, stop=["END"])
    assert content(chunks) == '{"a": "x'
    assert (finish.reason, finish.matched, finish.incomplete) == ("stop", "END", None)


def test_a_pattern_ends_a_document_that_is_incomplete() -> None:
    chunks, finish = run(spell('{"a": "x12y'), constraint=SCHEMA, stop_regex=["[0-9]+"], min_tokens=10)
    assert content(chunks) == '{"a": "x'
    assert finish == Finish("stop", "[0-9]+", 10, None, 5, 3, Kept(8, ""))


def test_the_eos_that_ends_a_document_is_no_text() -> None:
    regex = Constraint("regex", "a+", "regex")
    ids = [*spell("aa"), EOS]
    chunks, _ = run(ids, constraint=regex, ignore_eos=True, skip_special_tokens=False)
    assert content(chunks) == "aa"
    chunks, _ = run([*ids, *spell("b")], reason="length", ignore_eos=True, skip_special_tokens=False)
    assert content(chunks) == "aa<eos>b"
