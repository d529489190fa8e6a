"""Answers of the OpenAI routes: whole objects and the chunks of streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sapwood.srt.messages import Finish, Verdict


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CacheReport(msgspec.Struct):
    """What the prefix lookup of one prompt found: `matched` tokens, and why it `stopped` there."""

    matched: int
    stopped: str


class CompletionDetails(msgspec.Struct):
    """Of the drafts of tokens, those that were drawn and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """In tokens; a prompt counts once, whatever n is. `completion_tokens_details` is there if tokens were
    drafted, `cache` on request, and a list if there are several prompts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    cache: CacheReport | list[CacheReport] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Null stands for the first token of an echoed prompt, which has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """`rank` is 1 for the most likely token; it is absent where it is not known."""

    logprob: float
    decoded_token: str
    rank: int | UnsetType = UNSET


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt: it and the most likely ones, by id; null for the first."""


class IncompleteReport(msgspec.Struct):
    """Where a constrained output stood when it was cut off: a JSON pointer, and `inside` what."""

    pointer: str
    inside: str


class CalledName(msgspec.Struct):
    """Of a called function; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: CalledName
    type: str = "function"


class AnswerMessage(msgspec.Struct):
    """`content` is null if there is nothing but calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    incomplete: IncompleteReport | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class DeltaFunction(msgspec.Struct):
    """The name comes once, and then the text of the arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class DeltaCall(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunction = msgspec.field(default_factory=DeltaFunction)


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    incomplete: IncompleteReport | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """`usage` is absent, or null in all chunks but the last when the client asked for it."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    incomplete: IncompleteReport | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or a chunk of a stream: the shape is the same."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    warnings: list[str] | UnsetType = UNSET


class Mould:
    """The JSON of chunks that differ in one text only: all around it is encoded once.

    `make` gives the chunk with a text, the same for the same text; the text must stand in it once.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Any]) -> None:
        one, other = (msgspec.json.encode(make(text)) for text in "ab")
        at = next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)
        self._before, self._after = one[: at - 1], one[at + 2 :]

    def filled(self, text: str) -> msgspec.Raw:
        return msgspec.Raw(self._before + msgspec.json.encode(text) + self._after)


def incomplete_report(finish: Finish) -> IncompleteReport | UnsetType:
    place = finish.incomplete
    return UNSET if place is None else IncompleteReport(place.pointer, place.inside)


def cache_report(verdict: Verdict) -> CacheReport:
    return CacheReport(verdict.matched, verdict.stopped)
