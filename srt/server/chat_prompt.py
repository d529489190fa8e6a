"""From a chat request's messages to a prompt. Needs no web framework: the offline Engine chats too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt
from sapwood.srt.server import refused
from sapwood.srt.server.protocol import ChatMessage, ChatRequest

MAX_DEPTH = 32
"""Nesting of values that a request passes through as they are (to a chat template, say)."""
MAX_VALUES = 65_536
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
"""Of one message."""


def chat_prompt(body: ChatRequest) -> ChatPrompt:
    """The prompt of a chat request. Raises BadRequest naming the field."""
    return prompt_of(
        body.messages, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
    )


def prompt_of(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> ChatPrompt:
    """The prompt of messages; null means absent. Raises BadRequest naming the field."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages may hold {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    values = [_message(i, message) for i, message in enumerate(messages)]
    continue_final = bool(continue_final_message)
    if continue_final and add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    generation_prompt = not continue_final and add_generation_prompt is not False
    kwargs = template_kwargs or {}
    check_free_form(kwargs, "chat_template_kwargs")
    return ChatPrompt(values, generation_prompt, continue_final, kwargs)


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as the template gets it: what was sent, without nulls, and always with a content."""
    where = f"messages[{index}]"
    if message.tool_calls:
        raise refused.unsupported(f"{where}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"{where}.content is required for role {message.role}", param=f"{where}.content")
    if isinstance(message.content, list):
        if len(message.content) > MAX_PARTS:
            raise BadRequest(
                f"{where}.content may hold {MAX_PARTS} parts, got {len(message.content)}",
                param=f"{where}.content",
            )
        for i, part in enumerate(message.content):
            _check_part(f"{where}.content[{i}]", part)
    values: dict[str, Any] = msgspec.to_builtins(message)
    values.pop("tool_calls", None)
    values.pop("annotations", None)
    return {**values, "content": values.get("content") or ""}


def _check_part(where: str, part: dict[str, Any]) -> None:
    """Raises BadRequest unless `part` is `{"type": "text", "text": ...}`."""
    kind = part.get("type")
    if not isinstance(kind, str):
        problem = "is required" if kind is None else "must be a string"
        raise BadRequest(f"{where}.type {problem}; the model reads text parts only", param=f"{where}.type")
    if kind != "text":
        raise BadRequest(
            f"{where} has type {kind[:100]!r}, which is not supported: the model reads text parts only",
            param=f"{where}.type",
            code="unsupported",
        )
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a string", param=f"{where}.text")
    if len(part) > 2:
        name = next(name for name in part if name not in ("type", "text"))
        raise BadRequest(
            f"{where} has the unknown field {name[:100]!r}",
            param=f"{where}.{name[:100]}",
            code="unknown_field",
        )


def check_free_form(value: Any, param: str) -> None:
    """Refuse what the other processes could not decode, deep nesting and integers beyond 64 bits, and what
    would keep them busy: very many values."""
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if depth > MAX_DEPTH:
            raise BadRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
        if count > MAX_VALUES:
            raise BadRequest(f"{param} holds more than {MAX_VALUES} values", param=param)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise BadRequest(f"{param} holds an integer beyond 64 bits", param=param)
        level, depth = below, depth + 1
