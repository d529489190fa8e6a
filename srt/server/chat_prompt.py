"""From a chat request's messages to a prompt. Needs no web framework: the offline Engine chats too."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt
from sapwood.srt.server import protocol
from sapwood.srt.server.protocol import ChatMessage, ChatRequest

MAX_DEPTH = 32
"""Nesting of values that a request passes through as they are (to a chat template, say)."""


def chat_prompt(body: ChatRequest) -> ChatPrompt:
    if not body.messages:
        raise BadRequest("messages must not be empty", param="messages")
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    generation_prompt = not continue_final and body.add_generation_prompt is not False
    kwargs = body.chat_template_kwargs or {}
    check_free_form(kwargs, "chat_template_kwargs")
    return ChatPrompt(messages, generation_prompt, continue_final, kwargs)


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as the template gets it: what was sent, without nulls, and always with a content."""
    where = f"messages[{index}]"
    if message.tool_calls:
        raise protocol.unsupported(f"{where}.tool_calls")
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"{where}.content is required for role {message.role}", param=f"{where}.content")
    values: dict[str, Any] = msgspec.to_builtins(message)
    values.pop("tool_calls", None)
    values.pop("annotations", None)
    return {**values, "content": values.get("content") or ""}


def check_free_form(value: Any, param: str, depth: int = 0) -> None:
    """Refuse what the other processes could not decode: deep nesting and integers beyond 64 bits."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
    if isinstance(value, dict):
        for item in value.values():
            check_free_form(item, param, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_free_form(item, param, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise BadRequest(f"{param} holds an integer beyond 64 bits", param=param)
