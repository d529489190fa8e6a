"""What a place in a rendered chat belongs to: a message's content, or the template's own text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import ChatPrompt

_OPEN, _CLOSE = "\ue100", "\ue101"
_MARKS = re.compile(f"{_OPEN}(\\d+);|{_CLOSE}")


def place_of(prompt: ChatPrompt, offset: int, render: Callable[[ChatPrompt], str]) -> str | None:
    """Where character `offset` of the rendered chat comes from, for a sentence; None if that is not clear.

    The contents are rendered once more between marks. A template that trims them is given trimmed ones; one
    that rewrites them gives another text than before, and then nothing is said.
    """
    try:
        text = render(prompt)
        for trim in (False, True):
            messages = [_marked(i, message, trim) for i, message in enumerate(prompt.messages)]
            marked = render(msgspec.structs.replace(prompt, messages=messages))
            if _MARKS.sub("", marked) == text:
                return _named(marked, offset, len(prompt.messages))
    except BadRequest:
        return None
    return None


def _marked(index: int, message: dict[str, Any], trim: bool) -> dict[str, Any]:
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] if isinstance(part, dict) else str(part) for part in parts]
    joined = "\n".join(texts)
    return {**message, "content": f"{_OPEN}{index};{joined.strip() if trim else joined}{_CLOSE}"}


def _named(marked: str, offset: int, count: int) -> str:
    """The place of character `offset`, marks not counted."""
    before, last, inside = 0, 0, False
    index = -1
    for mark in _MARKS.finditer(marked):
        before += mark.start() - last
        if offset < before:
            break
        last = mark.end()
        inside = mark[1] is not None
        index = int(mark[1]) if mark[1] is not None else index
    if inside:
        return f"in messages[{index}].content"
    if index + 1 < count:
        return f"in what the chat template writes before messages[{index + 1}].content"
    return "in what the chat template writes after the last message"
