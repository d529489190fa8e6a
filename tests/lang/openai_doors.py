"""An endpoint with OpenAI's routes that answers what a test has scripted, and what is asked of it."""

from __future__ import annotations

import asyncio
from typing import Any

from sapwood.lang.backend import Answer, Generate, Ids, Segments, Text, Turn
from sapwood.lang.backends.openai import OpenAI
from tests.lang.doors import Request, Web

SYSTEM = Turn("system", (Text("Be "), Text("brief.")))
USER = Turn("user", (Text("2+2="),))
OPEN = Turn("assistant", (), open=True)
BEGUN = Turn("assistant", (Text("It is "), Ids((5, 6), "about ")), open=True)
CHAT: Segments = (SYSTEM, USER, OPEN)
TEXT: Segments = (Text("2+2"), Ids((7,), "="))


def answering(*values: Any) -> Any:
    left = list(values)

    async def handler(request: Request) -> None:
        value = left.pop(0)
        if isinstance(value, tuple):
            await request.events(*value)
        else:
            await request.answer(value)

    return handler


def message(text: str | None, index: int = 0, reason: str = "stop", **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **more.pop("message", {})}
    return {"index": index, "message": said, "finish_reason": reason, **more}


def completion(text: str, index: int = 0, reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, **more}


def answer(*choices: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"id": "x-1", "choices": list(choices), "usage": usage}


def backend(at: Web, **options: Any) -> OpenAI:
    return OpenAI("tiny", at.url + "/v1", "key", **options)


def generate(at: Web, segments: Segments, given: Any, call: Any = None, **options: Any) -> Answer:
    at.handler = answering(given)
    call = call or Generate(segments=segments)
    made = backend(at, **options)
    made.check(call)
    return asyncio.run(made.generate(call))
