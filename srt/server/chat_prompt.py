"""From a chat request's messages to a prompt. Needs no web framework: the offline Engine chats too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt
from sapwood.srt.server import formats, tool_prompt
from sapwood.srt.server.constraints import decoded
from sapwood.srt.server.protocol import ChatMessage, ToolCall
from sapwood.srt.server.tool_prompt import Tooled
from sapwood.srt.server.tools import NO_TOOLS, Wanted

if TYPE_CHECKING:
    from sapwood.srt.server.service import Service

MAX_DEPTH = 32
"""Nesting of values that a request passes through as they are (to a chat template, say)."""
MAX_VALUES = 65_536
"""Of all of these together."""
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
MAX_CALLS = 128
"""Of one message."""


def prompt_of(
    service: Service,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
    wanted: Wanted = NO_TOOLS,
) -> ChatPrompt:
    """The prompt of messages, with the tools that the model is told of; null means absent. Raises BadRequest
    naming the field."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages may hold {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    free_form = FreeForm()
    values = [_message(i, message, free_form) for i, message in enumerate(messages)]
    continue_final = bool(continue_final_message)
    if continue_final and add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    generation_prompt = not continue_final and add_generation_prompt is not False
    kwargs = template_kwargs or {}
    free_form.check(kwargs, "chat_template_kwargs")
    for i, tool in enumerate(wanted.tools):
        free_form.check(tool.function.parameters, f"tools[{i}].function.parameters")
    tooled = _tooled(service, values, wanted)
    return ChatPrompt(tooled.messages, generation_prompt, continue_final, kwargs, tooled.tools)


def _tooled(service: Service, messages: list[dict[str, Any]], wanted: Wanted) -> Tooled:
    if not wanted.tools and not any(m["role"] == "tool" or "tool_calls" in m for m in messages):
        return Tooled(messages, None)
    if formats.knows_tools(service.source):
        mistral = "[TOOL_CALLS]" in (service.source.chat_template or "")
        return tool_prompt.for_template(messages, wanted, "mistral" if mistral else "")
    form = formats.tool_format(service.config, service.source) if wanted.tools else "hermes"
    return tool_prompt.as_messages(messages, wanted, form)


def _message(index: int, message: ChatMessage, free_form: FreeForm) -> dict[str, Any]:
    """A message as the template gets it: what was sent, without nulls, and always with a content."""
    where = f"messages[{index}]"
    if message.content is None and message.role != "assistant":
        raise BadRequest(f"{where}.content is required for role {message.role}", param=f"{where}.content")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise BadRequest(
                f"{where}.{name} is for role {role}, not for {message.role}", param=f"{where}.{name}"
            )
    if isinstance(message.content, list):
        if len(message.content) > MAX_PARTS:
            raise BadRequest(
                f"{where}.content may hold {MAX_PARTS} parts, got {len(message.content)}",
                param=f"{where}.content",
            )
        for i, part in enumerate(message.content):
            _check_part(f"{where}.content[{i}]", part)
    values: dict[str, Any] = msgspec.to_builtins(message)
    values.pop("annotations", None)
    values.pop("tool_calls", None)
    if message.tool_calls:
        values["tool_calls"] = _calls(f"{where}.tool_calls", message.tool_calls, free_form)
    return {**values, "content": values.get("content") or ""}


def _calls(where: str, calls: Sequence[ToolCall], free_form: FreeForm) -> list[dict[str, Any]]:
    if len(calls) > MAX_CALLS:
        raise BadRequest(f"{where} may hold {MAX_CALLS} calls, got {len(calls)}", param=where)
    return [_call(f"{where}[{i}]", call, free_form) for i, call in enumerate(calls)]


def _call(where: str, call: ToolCall, free_form: FreeForm) -> dict[str, Any]:
    """A call of the history as templates take it: its arguments are an object."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        arguments = decoded(arguments or "{}", f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        raise BadRequest(
            f"{where}.function.arguments must be a JSON object", param=f"{where}.function.arguments"
        )
    free_form.check(arguments, f"{where}.function.arguments")
    values: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        values["id"] = call.id
    return {**values, "function": {"name": call.function.name, "arguments": arguments}}


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


class FreeForm:
    """The values that one request passes through as they are: so many of them in all."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def check(self, value: Any, param: str) -> None:
        """Refuse what the other processes could not decode (deep nesting, integers beyond 64 bits, lone
        surrogates), and what would keep them busy: very many values."""
        level, depth = [value], 0
        while level:
            self._left -= len(level)
            if depth > MAX_DEPTH:
                raise BadRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
            if self._left < 0:
                raise BadRequest(
                    f"{param} holds more than {MAX_VALUES} values, with all before it in the request",
                    param=param,
                )
            below: list[Any] = []
            for item in level:
                if isinstance(item, dict):
                    _check_texts(item, param)
                    below.extend(item.values())
                elif isinstance(item, list):
                    below.extend(item)
                elif isinstance(item, str):
                    _check_texts((item,), param)
                elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                    raise BadRequest(f"{param} holds an integer beyond 64 bits", param=param)
            level, depth = below, depth + 1


def _check_texts(texts: Iterable[Any], param: str) -> None:
    try:
        for text in texts:
            str(text).encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{param} holds a lone surrogate, which is not a character", param=param) from None
