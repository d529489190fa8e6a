"""Tools and calls for a chat template, and for one that knows of neither: there they become plain messages.

Needs no web framework.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sapwood.srt.server.tool_tags import example, written
from sapwood.srt.server.tools import Wanted

Message = dict[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The only ids that Mistral's templates take."""


class Tooled(NamedTuple):
    """What a chat's template is told."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def for_template(messages: list[Message], wanted: Wanted, form: str) -> Tooled:
    """For a template that knows of tools."""
    if form.startswith("mistral"):
        messages = [_with_short_ids(message) for message in messages]
    return Tooled(messages, wanted.for_template or None)


def as_messages(messages: Sequence[Message], wanted: Wanted, form: str) -> Tooled:
    """For a template that knows of none: tools in the system message, calls and results in the text."""
    plain: list[Message] = []
    after_result = False
    for message in messages:
        result = message["role"] == "tool"
        if result and after_result:
            plain[-1]["content"] += "\n" + _result(message)
        elif result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls_in_text(message, form))
        after_result = result
    if wanted.tools:
        plain = _with_tools_in_text(plain, wanted, form)
    return Tooled(plain, None)


def _result(message: Message) -> str:
    return f"<tool_response>\n{_text(message)}\n</tool_response>"


def _with_calls_in_text(message: Message, form: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    shown = written([(one["name"], _json(one["arguments"])) for one in functions], form)
    content = "\n".join(filter(None, [_text(message), shown]))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _with_tools_in_text(messages: list[Message], wanted: Wanted, form: str) -> list[Message]:
    """The tools stand at the end of the system message, which is put first if there is none."""
    listed = "\n".join(_json(tool) for tool in wanted.for_template)
    text = (
        "# Tools\n\n"
        "You can call functions to help with the user's request. Their signatures, in JSON, are:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call one, write its name and its arguments (a JSON object) like this and nothing else:\n"
        f"{example(form)}"
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0] | {"content": f"{_text(messages[0])}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        message = message | {"tool_call_id": _short(message["tool_call_id"])}
    if calls := message.get("tool_calls"):
        message = message | {"tool_calls": [call | {"id": _short(call.get("id", ""))} for call in calls]}
    return message


def _short(name: str) -> str:
    """The same nine characters for the same id."""
    return name if _SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
