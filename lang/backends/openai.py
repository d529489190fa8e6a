"""`OpenAI`: any endpoint with OpenAI's chats or completions, over HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from sapwood.lang.backend import Answer, Call, Fill, Generate, Output, Piece, Score, Segments, Turn
from sapwood.lang.backends import openai_wire as wire
from sapwood.lang.backends.answers import reading
from sapwood.lang.backends.http import Http
from sapwood.lang.backends.openai_wire import Kind
from sapwood.lang.errors import RequestFailed, Unsupported

DEFAULT_URL = "https://api.openai.com/v1"
_OFFICIAL = "api.openai.com"
_COMPLETIONS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
"""OpenAI's models that are no chat models."""


class OpenAI:
    """Programs on the endpoint at `base_url` (default: $OPENAI_BASE_URL, or OpenAI's; `api_key` likewise).

    States travel as text: the endpoint tokenises them anew. With `is_chat_model` all is sent as chats, with
    False as completions; None: messages as chats, and text as completions (at OpenAI's own address as the
    model's name says). `server` is what the endpoint is, beyond OpenAI's own fields. What it cannot do raises
    Unsupported, naming the field, before anything is sent; failures raise RequestFailed.

    Text in the middle of an assistant's message, select, regex, top_k and the like need a `server` other than
    "openai"; select needs completions. `verify` and `timeout` are as in RuntimeEndpoint.

    >>> OpenAI("my-model", "http://127.0.0.1:8000/v1", api_key="none", server="vllm")
    OpenAI('my-model', 'http://127.0.0.1:8000/v1')
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        *,
        server: Kind = "openai",
        verify: str | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        if server not in ("openai", "sapwood", "sglang", "vllm"):
            raise ValueError(f"server must be 'openai', 'sapwood', 'sglang' or 'vllm', got {server!r}")
        url = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL
        self.model_name = model_name
        self.server: Kind = server
        self._official = _OFFICIAL in url
        if is_chat_model is None and self._official:
            is_chat_model = model_name not in _COMPLETIONS
        self.is_chat_model = is_chat_model
        self._http = Http(url, api_key or os.environ.get("OPENAI_API_KEY"), verify, timeout)

    def check(self, call: Call) -> None:
        if isinstance(call, Generate):
            self._generation(call)
        elif isinstance(call, Score):
            self._scoring(call)
        else:
            raise Unsupported("an OpenAI endpoint computes nothing ahead", field="fill")

    async def generate(self, call: Generate) -> Answer:
        path, body = self._generation(call)
        answer = await self._http.send("POST", path, body)
        with reading(self._http.url + path, answer):
            return Answer(outputs=wire.outputs_of(answer, call))

    async def stream(self, call: Generate) -> AsyncIterator[Piece]:
        """The outputs come at the end, when the endpoint has told their usage."""
        path, body = self._generation(call)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        whole = _Whole()
        events = self._http.events(path, body)
        try:
            async for event in events:
                with reading(self._http.url + path, event):
                    new = whole.add(event)
                for choice, text in new:
                    yield Piece(choice=choice, text=text)
        finally:
            await events.aclose()
        with reading(self._http.url + path, whole):
            outputs = whole.outputs(call)
        for choice, output in outputs:
            yield Piece(choice=choice, text="", output=output)

    async def score(self, call: Score) -> Answer:
        context, body = self._scoring(call)
        answer = await self._http.send("POST", "/completions", body)
        with reading(self._http.url + "/completions", answer):
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            scored = [wire.scored_of(one, len(context)) for one, _ in zip(choices, call.choices, strict=True)]
            return Answer(scored=scored)

    async def fill(self, call: Fill) -> Answer:
        """Nothing is sent: an endpoint caches what it will."""
        return Answer()

    async def end(self, program: str) -> dict[str, Any] | None:
        return None

    async def flush_cache(self) -> None:
        raise Unsupported("an OpenAI endpoint has no cache that can be flushed", field="flush_cache")

    async def server_info(self) -> dict[str, Any]:
        raise Unsupported("an OpenAI endpoint says nothing of itself", field="server_info")

    async def aclose(self) -> None:
        await self._http.aclose()

    def __repr__(self) -> str:
        return f"OpenAI({self.model_name!r}, {self._http.url!r})"

    def _generation(self, call: Generate) -> tuple[str, dict[str, Any]]:
        """The path and the body. Raises Unsupported."""
        chat = self._chat(call.segments)
        if call.reasoning and (self.server == "openai" or not chat):
            raise Unsupported(
                "separate_reasoning needs a chat, on a server that tells reasoning apart: "
                "OpenAI(..., server='vllm')",
                field="separate_reasoning",
            )
        body = {
            "model": self.model_name,
            **wire.sampling_fields(call.sampling, self.server, chat),
            **wire.reading_fields(call.logprobs, chat),
        }
        if call.sampling.max_new_tokens is not None:
            body["max_completion_tokens" if chat and self._official else "max_tokens"] = (
                call.sampling.max_new_tokens
            )
        if chat:
            return "/chat/completions", {**body, **wire.messages_of(call.segments, self.server)}
        return "/completions", {**body, "prompt": wire.text_of(call.segments)}

    def _scoring(self, call: Score) -> tuple[str, dict[str, Any]]:
        """The text before the choices, and the body. Raises Unsupported."""
        if self._chat(call.segments) or self.server == "openai":
            raise Unsupported(
                "select needs completions that echo a prompt with its logprobs: text outside of messages, "
                "on a server that is known to do it: OpenAI(..., server='vllm')",
                field="choices",
            )
        if call.unconditional:
            raise Unsupported(
                "a choices_method with unconditional scores is not supported by an OpenAI endpoint",
                field="choices_method",
            )
        context = wire.text_of(call.segments)
        if not context:
            raise Unsupported("select needs text before it on an OpenAI endpoint", field="choices")
        prompts = [context + choice for choice in call.choices]
        body = {"model": self.model_name, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
        return context, body

    def _chat(self, segments: Segments) -> bool:
        """Whether this is a chat. Raises Unsupported for what the endpoint's routes cannot have."""
        turns = [isinstance(segment, Turn) for segment in segments]
        if any(turns) and not all(turns):
            raise Unsupported(
                "text outside of messages is not supported in a chat by an OpenAI endpoint", field="role"
            )
        chat = any(turns)
        if chat and self.is_chat_model is False:
            raise Unsupported("roles need a chat model: is_chat_model is False", field="role")
        if not chat and self.is_chat_model:
            raise Unsupported(
                "text outside of messages needs completions: is_chat_model is True, and gen must stand in an "
                "assistant's message",
                field="role",
            )
        return chat


class _Whole:
    """A streamed answer, put together."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: dict[str, Any]) -> list[tuple[int, str]]:
        """The new text of each choice in the event."""
        self._answer["id"] = event.get("id")
        if event.get("usage"):
            self._answer["usage"] = event["usage"]
        return [(choice["index"], self._grow(choice)) for choice in event.get("choices", ())]

    def outputs(self, call: Generate) -> list[tuple[int, Output]]:
        """Raises RequestFailed unless every output has ended."""
        for number in range(call.sampling.n or 1):
            if self._choices.get(number, {}).get("finish_reason") is None:
                raise RequestFailed("the stream has ended before the output")
        return [
            (number, wire.output_of(choice, self._answer, call))
            for number, choice in sorted(self._choices.items())
        ]

    def _grow(self, choice: dict[str, Any]) -> str:
        known = self._choices.setdefault(choice["index"], {})
        delta = choice.get("delta")
        text = (choice.get("text") if delta is None else delta.get("content")) or ""
        if delta is None:
            known["text"] = known.get("text", "") + text
        else:
            message = known.setdefault("message", {"content": "", "reasoning_content": ""})
            message["content"] += text
            message["reasoning_content"] += delta.get("reasoning_content") or ""
        for name in ("finish_reason", "matched_stop", "stop_reason"):
            if choice.get(name) is not None:
                known[name] = choice[name]
        for name, values in (choice.get("logprobs") or {}).items():
            if isinstance(values, list):
                known.setdefault("logprobs", {}).setdefault(name, []).extend(values)
        return text

    def __repr__(self) -> str:
        return repr({**self._answer, "choices": self._choices})
