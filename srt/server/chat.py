"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import CallDelta, Chunk, Started, TextLogprob, unpack
from sapwood.srt.params import MAX_TOP_LOGPROBS
from sapwood.srt.server import guard, keys, logprobs, protocol, sampling, tools
from sapwood.srt.server.answers import (
    AnswerCall,
    AnswerMessage,
    CalledName,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    DeltaCall,
    DeltaFunction,
    Mould,
    Usage,
    incomplete_report,
)
from sapwood.srt.server.chat_prompt import prompt_of
from sapwood.srt.server.demands import Demands, of_chat
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.outcome import ChoiceSoFar, Outcome
from sapwood.srt.server.protocol import ChatRequest
from sapwood.srt.server.reply import Batch, Reply
from sapwood.srt.server.sampling import Reading
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
        return answer(service, body, keys.key_of(request))

    return router


def answer(service: Service, body: ChatRequest, key: bytes) -> Reply:
    """Check the request, start it, and return what sends its answer."""
    service.require_model(body.model)
    protocol.check(body)
    params = sampling.openai(
        body,
        max_tokens=_max_tokens(body),
        reading=_reading(body),
        defaults=service.source.sampling_defaults,
        vocab_size=service.source.vocab_size,
    )
    wanted = tools.wanted(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = prompt_of(
        service,
        body.messages,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs,
        wanted,
    )
    demands = of_chat(service, body, wanted)
    name = sampling.check_rid(body.rid) or f"chatcmpl-{uuid.uuid4().hex}"
    place, timeout = service.tenants.place(body, key), sampling.check_timeout(body.timeout)
    streamed = bool(body.stream)
    streams = service.submit(
        [(prompt, params)],
        place=place,
        rid=name,
        timeout=timeout,
        field="messages",
        streamed=streamed,
        constraint=demands.constraint,
        parsing=demands.parsing,
    )
    shape = ChatShape(body, name, service.model, params.n, demands)
    rename = None if demands.names is None else demands.names.error
    return Reply(streams, shape, streamed=streamed, field="messages", rename=rename)


def _max_tokens(body: ChatRequest) -> int | None:
    old = sampling.at_least("max_tokens", body.max_tokens, 1)
    new = sampling.at_least("max_completion_tokens", body.max_completion_tokens, 1)
    return old if new is None else new


def _reading(body: ChatRequest) -> Reading:
    top = body.top_logprobs
    if top is not None:
        if not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {top}", param="top_logprobs"
            )
    shown = (top or 0) if body.logprobs else None
    asked = [count for count in (shown, body.prompt_logprobs) if count is not None]
    return Reading(max(asked, default=None), None if body.prompt_logprobs is None else 0)


class ChatShape:
    """A chat completion, whole or in chunks: a role chunk, deltas, and one finish chunk for each choice."""

    def __init__(self, body: ChatRequest, name: str, model: str, n: int, demands: Demands) -> None:
        self._names = demands.names
        self._calls_only = demands.parsing is not None and demands.parsing.calls_only
        self.outcome = Outcome(1, n, keep_logprobs=not body.stream)
        self._body = body
        self._name = name
        self._model = model
        self._created = int(time.time())
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._usage_always = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._moulds: dict[int, Mould] = {}
        """Of the choices of a stream whose chunks say nothing but new text."""

    def parts(self) -> Iterator[ChatChoice]:
        for i, choice in enumerate(self.outcome.choices):
            finish = choice.ended
            message, told = _message(choice, self._calls_only), self._logprobs(choice.logprobs)
            whole = ChatChoice(i, message, finish.reason, told)
            whole.matched_stop, whole.incomplete = finish.matched, incomplete_report(finish)
            if self._body.return_token_ids:
                whole.token_ids = choice.ids
            yield whole

    def whole(self, parts: list[Any]) -> ChatCompletion:
        usage = self.outcome.usage(report=bool(self._body.cache_report))
        completion = ChatCompletion(self._name, self._created, self._model, parts, usage)
        if self._body.prompt_logprobs is not None:
            read = self.outcome.prompt_logprobs[0]
            completion.prompt_logprobs = logprobs.prompt(read, self._body.prompt_logprobs)
        completion.warnings = self._warnings
        if self._body.return_token_ids:
            completion.prompt_token_ids = self.outcome.prompt_ids(0)
        return completion

    @property
    def _warnings(self) -> list[str] | UnsetType:
        warnings, names = self.outcome.warnings, self._names
        return warnings if names is None or warnings is UNSET else [names.warning(one) for one in warnings]

    def _logprobs(self, items: Sequence[TextLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return logprobs.chat(items, self._body.top_logprobs or 0, as_ids)

    def deltas(self, batch: Batch) -> Iterator[Any]:
        for _prompt, event in batch:
            if isinstance(event, Started):
                for i in range(self.outcome.n):
                    self._set_mould(i)
                    role = self._chunk(ChatChunkChoice(i, Delta(role="assistant", content="")))
                    if self._body.return_token_ids:
                        role.prompt_token_ids = self.outcome.prompt_ids(0)
                    role.warnings = self._warnings
                    yield role
            elif isinstance(event, Chunk):
                mould = self._moulds.get(event.choice)
                parts = event.finish is not None or event.logprobs or event.reasoning or event.calls
                if mould is None or parts:
                    yield from self._chunks(event)
                elif event.text:
                    yield mould.filled(event.text)

    def _set_mould(self, index: int) -> None:
        if not (self._body.logprobs or self._body.return_token_ids or self._usage_always):
            self._moulds[index] = Mould(lambda text: self._chunk(ChatChunkChoice(index, Delta(content=text))))

    def _chunks(self, chunk: Chunk) -> Iterator[ChatChunk]:
        ids = chunk.ids if self._body.return_token_ids else b""
        delta = _delta(chunk)
        if delta == Delta() and (chunk.logprobs or ids):
            delta.content = ""
        if delta != Delta():
            choice = ChatChunkChoice(chunk.choice, delta, self._logprobs(chunk.logprobs or []))
            if self._body.return_token_ids:
                choice.token_ids = unpack(ids).tolist()
            yield self._chunk(choice)
        if chunk.finish is not None:
            choice = ChatChunkChoice(chunk.choice, Delta(), None, chunk.finish.reason, chunk.finish.matched)
            choice.incomplete = incomplete_report(chunk.finish)
            yield self._chunk(choice)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        usage: Usage | UnsetType | None = None if self._wants_usage else UNSET
        if self._usage_always:
            usage = self.outcome.usage(report=False)
        return ChatChunk(self._name, self._created, self._model, [choice], usage)

    def closing(self) -> Iterator[ChatChunk]:
        if self._wants_usage:
            usage = self.outcome.usage(report=bool(self._body.cache_report))
            yield ChatChunk(self._name, self._created, self._model, [], usage)


def _message(choice: ChoiceSoFar, calls_only: bool) -> AnswerMessage:
    text, reasoning = choice.text, "".join(choice.reasoning)
    message = AnswerMessage(text if text or not (choice.calls or calls_only) else None)
    if reasoning:
        message.reasoning_content = reasoning
    if choice.calls:
        message.tool_calls = [AnswerCall(c.id, CalledName(c.name, c.arguments)) for c in choice.calls]
    return message


def _delta(chunk: Chunk) -> Delta:
    """What is new of the parts."""
    delta = Delta()
    if chunk.reasoning:
        delta.reasoning_content = chunk.reasoning
    if chunk.calls:
        delta.tool_calls = [_delta_call(call) for call in chunk.calls]
    if chunk.text:
        delta.content = chunk.text
    return delta


def _delta_call(call: CallDelta) -> DeltaCall:
    if not call.id:
        return DeltaCall(call.index, function=DeltaFunction(arguments=call.arguments))
    return DeltaCall(call.index, call.id, "function", DeltaFunction(call.name, call.arguments))
