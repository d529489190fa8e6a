"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import Chunk, Started
from sapwood.srt.server import guard, logprobs, protocol, sampling
from sapwood.srt.server.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
)
from sapwood.srt.server.chat_prompt import chat_prompt
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.protocol import ChatRequest
from sapwood.srt.server.reply import Batch, Reply
from sapwood.srt.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        openapi_extra=json_body(ChatRequest, ChatCompletion, ChatChunk),
        response_class=Response,
    )
    async def chat_completions(request: Request) -> Response:
        service.require_ready()
        body = await guard.read(request, ChatRequest, service.config.max_body_bytes)
        return answer(service, body)

    return router


def answer(service: Service, body: ChatRequest) -> Reply:
    """Check the request, start it, and return what sends its answer."""
    service.require_model(body.model)
    protocol.check(body)
    params = sampling.openai(
        body,
        max_tokens=_max_tokens(body),
        logprobs=_logprobs(body),
        defaults=service.source.sampling_defaults,
        vocab_size=service.source.vocab_size,
    )
    prompt = chat_prompt(body)
    name = sampling.check_rid(body.rid) or f"chatcmpl-{uuid.uuid4().hex}"
    streams = service.submit([(prompt, params)], namespace=sampling.namespace(body.cache_salt), rid=name)
    shape = ChatShape(body, name, service.model, params.n)
    return Reply(streams, shape, streamed=bool(body.stream))


def _max_tokens(body: ChatRequest) -> int | None:
    old = sampling.at_least_one("max_tokens", body.max_tokens)
    new = sampling.at_least_one("max_completion_tokens", body.max_completion_tokens)
    return old if new is None else new


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        top = body.top_logprobs or 0
        if not 0 <= top <= 20:
            raise BadRequest(f"top_logprobs must be from 0 to 20, got {top}", param="top_logprobs")
        return top
    if body.top_logprobs is not None:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class ChatShape:
    """A chat completion, whole or in chunks: a role chunk, deltas, and one finish chunk for each choice."""

    def __init__(self, body: ChatRequest, name: str, model: str, n: int) -> None:
        self.outcome = Outcome(1, n)
        self._body = body
        self._name = name
        self._model = model
        self._created = int(time.time())
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self) -> ChatCompletion:
        choices = []
        for i, choice in enumerate(self.outcome.choices):
            finish = choice.ended
            shaped = logprobs.chat(choice.logprobs) if self._body.logprobs else None
            message = AnswerMessage(choice.text)
            choices.append(ChatChoice(i, message, finish.reason, shaped, finish.matched))
        usage = self.outcome.usage(report=bool(self._body.cache_report))
        return ChatCompletion(self._name, self._created, self._model, choices, usage)

    def deltas(self, batch: Batch) -> Iterator[ChatChunk]:
        for _prompt, event in batch:
            if isinstance(event, Started):
                for i in range(self.outcome.n):
                    yield self._chunk(ChatChunkChoice(i, Delta(role="assistant", content="")))
            elif isinstance(event, Chunk):
                yield from self._chunks(event)

    def _chunks(self, chunk: Chunk) -> Iterator[ChatChunk]:
        if chunk.text or chunk.logprobs:
            shaped = logprobs.chat(chunk.logprobs or []) if self._body.logprobs else None
            yield self._chunk(ChatChunkChoice(chunk.choice, Delta(content=chunk.text), shaped))
        if chunk.finish is not None:
            reason, matched = chunk.finish.reason, chunk.finish.matched
            yield self._chunk(ChatChunkChoice(chunk.choice, Delta(), None, reason, matched))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        usage = None if self._wants_usage else UNSET
        return ChatChunk(self._name, self._created, self._model, [choice], usage)

    def closing(self) -> Iterator[ChatChunk]:
        if self._wants_usage:
            usage = self.outcome.usage(report=bool(self._body.cache_report))
            yield ChatChunk(self._name, self._created, self._model, [], usage)
