"""Requests of the OpenAI routes, field by field.

Nothing is taken and ignored: an unknown field is refused by name, one that a later version will obey is
refused as not supported yet, and only labels without any effect on the answer pass (`user`, `metadata`, ...).
For every optional field null means absent.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sapwood.srt.errors import BadRequest

Stop = str | list[str]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CommonFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
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
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    cache_report: bool | None = None
    rid: str | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    response_format: dict[str, Any] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    # An answer of ours that comes back as history has them.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None


class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`. If both limits are given, `max_completion_tokens` counts."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    echo: Any = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`. A list of prompts is answered prompt by prompt: index = prompt * n + choice."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    suffix: Any = None


_INERT: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Chat fields that are not supported yet, with the values that ask for nothing."""


def check(request: ChatRequest | CompletionRequest) -> None:
    """Refuse what the types alone allow. Raises BadRequest naming the field."""
    if isinstance(request, ChatRequest):
        for name, inert in _INERT.items():
            value = getattr(request, name)
            # By type too: 0 is not false.
            if not any(value == quiet and type(value) is type(quiet) for quiet in inert):
                raise unsupported(name)
    else:
        if request.suffix not in (None, ""):
            raise unsupported("suffix")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise BadRequest(
                f"best_of must equal n, which is {request.n or 1}, got {request.best_of}", param="best_of"
            )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options is allowed only with stream: true", param="stream_options")
    _check_format(request.response_format)


def _check_format(value: dict[str, Any] | None) -> None:
    if value is None or value == {"type": "text"}:
        return
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param="response_format",
        )
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, dict) or "schema" not in inner:
            raise BadRequest(
                "response_format.json_schema.schema is required with type json_schema",
                param="response_format.json_schema.schema",
            )
    raise unsupported("response_format")


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported yet", param=name, code="unsupported")
