"""One output told apart: reasoning first, then content and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from sapwood.srt.messages import CallDelta, Incomplete
from sapwood.srt.params import Parsing
from sapwood.srt.tokenizer.parsers import pythonic, thinking
from sapwood.srt.tokenizer.parsers.calls import Calls
from sapwood.srt.tokenizer.parsers.json_calls import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JsonCalls, Marks
from sapwood.srt.tokenizer.parsers.pythonic import PythonicCalls
from sapwood.srt.tokenizer.parsers.thinking import Reasoning


class CallParser(Protocol):
    """Takes calls out of a text in pieces, and gives back the content."""

    def feed(self, text: str) -> str: ...

    def finish(self) -> str: ...

    @property
    def place(self) -> Incomplete | None:
        """Where the call at hand stands; None if there is none, or that is not known."""


class Told(NamedTuple):
    """What is new of each part."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def and_then(self, more: Told) -> Told:
        return Told(self.reasoning + more.reasoning, self.content + more.content, self.calls + more.calls)


_MARKS: dict[str, Marks] = {
    "hermes": HERMES, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS, "llama3_json": LLAMA3,
}  # fmt: skip
_PYTHONIC = (pythonic.OPENING, pythonic.CLOSING)


def call_parser(tool_format: str, names: Collection[str], calls: Calls) -> CallParser:
    """The parser of a format; KeyError if there is none."""
    if tool_format == "pythonic":
        return PythonicCalls(names, calls)
    return JsonCalls(_MARKS[tool_format], names, calls)


def marks_of(parsing: Parsing) -> frozenset[str]:
    """What may be special tokens, and must be seen in the text all the same."""
    marks: set[str] = set()
    if parsing.tool_format == "pythonic":
        marks.update(_PYTHONIC)
    elif parsing.tool_format:
        format_ = _MARKS[parsing.tool_format]
        marks.update((format_.opening, format_.closing, format_.arguments))
    if parsing.reasoning_format:
        marks.update((thinking.OPENING, thinking.CLOSING))
    return frozenset(marks - {""})


class OutputParser:
    """The parts of one choice's text, in pieces. `reasons`: the prompt has begun the reasoning."""

    def __init__(self, parsing: Parsing, reasons: bool) -> None:
        self._calls = Calls()
        self._calls_only = parsing.calls_only
        self._reasoning = Reasoning(reasons) if parsing.reasoning_format else None
        self._tools: CallParser | None = None
        if parsing.tool_format:
            self._tools = call_parser(parsing.tool_format, frozenset(parsing.tool_names), self._calls)

    @property
    def called(self) -> bool:
        """Whether there are calls, and all of them are complete."""
        return self._calls.whole

    @property
    def place(self) -> Incomplete | None:
        """Where the call at hand stands, by a JSON pointer into the answer's message."""
        return None if self._tools is None else self._tools.place

    def feed(self, text: str) -> Told:
        return self._told(lambda reasoning: reasoning.feed(text), text, last=False)

    def finish(self) -> Told:
        """What was held, at the end of the text."""
        return self._told(lambda reasoning: reasoning.finish(), "", last=True)

    def _told(self, take: Callable[[Reasoning], tuple[str, str]], text: str, last: bool) -> Told:
        reasoning, content = take(self._reasoning) if self._reasoning is not None else ("", text)
        if self._tools is not None:
            content = self._tools.feed(content) + (self._tools.finish() if last else "")
            content = "" if self._calls_only else content
        return Told(reasoning, content, tuple(self._calls.take()))
