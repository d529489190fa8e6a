"""Requests of the OpenAI routes, field by field.

Nothing is taken and ignored: an unknown field is refused by name, one that other servers obey and this one
does not is refused with a reason (see refused.py), and only labels without any effect on the answer pass
(`user`, `metadata`, ...). For every optional field null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import MAX_N, MAX_TOP_LOGPROBS
from sapwood.srt.server import constraints, refused
from sapwood.srt.server.tenants import PlaceFields
from sapwood.srt.server.tools import Tool, ToolChoice

Stop = str | list[str]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage` adds a last chunk with the usage; with `continuous_usage_stats` too, as in vLLM, every
    chunk has the usage so far."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None


@constraints.fields
class CommonFields(PlaceFields, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions share: OpenAI's fields, then the usual extensions, then labels."""

    model: str | None = None
    n: int | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_regex: Stop | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_report: bool | None = None
    rid: str | None = None
    timeout: float | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    response_format: dict[str, Any] | None = None


Part = Annotated[
    dict[str, Any],
    msgspec.Meta(
        extra_json_schema={
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
    ),
]
"""A text part. Others are let in only to be refused by their names (chat_prompt.py)."""


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`arguments` is a JSON object, as a text or a value."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in the history, as an answer has it."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    # An answer of ours that comes back as history has them.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None


@refused.fields(refused.CHAT)
class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`. If both limits are given, `max_completion_tokens` counts."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@refused.fields(refused.COMPLETION)
class CompletionRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`. A list of prompts is answered prompt by prompt: index = prompt * n + choice."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


def check(request: ChatRequest | CompletionRequest) -> None:
    """Refuse what the types alone allow. Raises BadRequest naming the field."""
    refused.check(request)
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is allowed only with stream: true", param="stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise BadRequest(f"{name} needs include_usage: true", param=name)
    if request.prompt_logprobs is not None:
        if not 0 <= request.prompt_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"prompt_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {request.prompt_logprobs}",
                param="prompt_logprobs",
            )
        if request.stream:
            raise BadRequest("prompt_logprobs is not sent in streams", param="prompt_logprobs")


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is None:
        return
    n = 1 if request.n is None else request.n
    if n < 1:
        raise BadRequest(f"n must be from 1 to {MAX_N}, got {n}", param="n")
    if not n <= request.best_of <= MAX_N:
        raise BadRequest(
            f"best_of must be from n, which is {n}, to {MAX_N}, got {request.best_of}", param="best_of"
        )
    if request.stream and request.best_of > n:
        raise BadRequest(
            "best_of above n is not possible with stream: true, as which choices are best shows at the end",
            param="best_of",
        )
