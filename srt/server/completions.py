"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from sapwood.srt.messages import Chunk, Started, TextLogprob, unpack
from sapwood.srt.server import constraints, guard, keys, logprobs, protocol, sampling
from sapwood.srt.server.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Mould,
    Usage,
    incomplete_report,
)
from sapwood.srt.server.echo import text_offsets
from sapwood.srt.server.logprobs import CompletionWriter
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.outcome import ChoiceSoFar, Outcome
from sapwood.srt.server.protocol import CompletionRequest
from sapwood.srt.server.reply import Batch, Reply
from sapwood.srt.server.sampling import Reading
from sapwood.srt.server.service import Service

DEFAULT_MAX_TOKENS = 16


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        openapi_extra=json_body(CompletionRequest, Completion, Completion),
        response_class=Response,
    )
    async def completions(request: Request) -> Response:
        service.require_ready()
        body = await guard.read(request, CompletionRequest, service.config.max_body_bytes)
        return await answer(service, body, keys.key_of(request))

    return router


async def answer(service: Service, body: CompletionRequest, key: bytes) -> Reply:
    """Check the request, start its prompts, and return what sends the answer."""
    service.require_model(body.model)
    protocol.check(body)
    limit = sampling.at_least("max_tokens", body.max_tokens, 0)
    params = sampling.openai(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        reading=_reading(body),
        defaults=service.source.sampling_defaults,
        vocab_size=service.source.vocab_size,
        n=body.best_of,
    )
    service.require_few(body.prompt, "prompt")
    prompts = service.prompts(body.prompt, "prompt", body.add_special_tokens)
    name = sampling.check_rid(body.rid) or f"cmpl-{uuid.uuid4().hex}"
    place, timeout = service.tenants.place(body, key), sampling.check_timeout(body.timeout)
    constraint = constraints.read(
        body,
        whitespace=service.config.json_whitespace,
        response_format=body.response_format,
        max_tokens=params.max_tokens,
    )
    items, echoes, began = [(prompt, params) for prompt in prompts], None, time.monotonic()
    if body.echo:
        service.check(items, "prompt")
        echoes = await service.texts_of(prompts, timeout)
    waited = time.monotonic() - began
    streamed = bool(body.stream)
    streams = service.submit(
        items,
        place=place,
        rid=name,
        timeout=timeout,
        waited=waited,
        streamed=streamed,
        constraint=constraint,
    )
    outcome = Outcome(len(prompts), params.n, keep_logprobs=not streamed)
    shape = CompletionShape(body, name, service.model, outcome, echoes)
    return Reply(streams, shape, streamed=streamed)


def _reading(body: CompletionRequest) -> Reading:
    """Choices are ranked by their logprobs, so those are needed then too."""
    ranked = body.best_of is not None and body.best_of > (body.n or 1)
    counts = (body.logprobs, body.prompt_logprobs, 0 if ranked else None)
    top = max((count for count in counts if count is not None), default=None)
    of_prompt = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
    return Reading(top, 0 if of_prompt else None)


class CompletionShape:
    """Text completions, whole or in chunks; with `echoes`, each choice begins with its prompt."""

    def __init__(
        self, body: CompletionRequest, name: str, model: str, outcome: Outcome, echoes: Sequence[str] | None
    ) -> None:
        self.outcome = outcome
        self._body = body
        self._name = name
        self._model = model
        self._echoes = echoes
        self._created = int(time.time())
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._usage_always = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._writers: dict[int, CompletionWriter] = {}
        """Of the choices of a stream that have begun."""
        self._moulds: dict[int, Mould] = {}
        """Of the choices of a stream whose chunks say nothing but new text."""

    def parts(self) -> Iterator[CompletionChoice]:
        n = self._body.n or 1
        for prompt in range(len(self.outcome.started)):
            for i, choice in enumerate(self.outcome.best(prompt, n)):
                yield self._whole_choice(prompt * n + i, prompt, choice)

    def whole(self, parts: list[Any]) -> Completion:
        usage = self.outcome.usage(report=bool(self._body.cache_report))
        completion = Completion(self._name, self._created, self._model, parts, usage)
        completion.warnings = self.outcome.warnings
        return completion

    def _whole_choice(self, index: int, prompt: int, choice: ChoiceSoFar) -> CompletionChoice:
        finish, writer = choice.ended, self._writer(prompt)
        shaped = self._begin(index, prompt, writer)
        shaped.text += choice.text
        if shaped.logprobs is None:
            shaped.logprobs = self._logprobs(writer, choice.logprobs)
        elif (more := self._logprobs(writer, choice.logprobs)) is not None:
            _extend(shaped.logprobs, more)
        shaped.finish_reason, shaped.matched_stop = finish.reason, finish.matched
        shaped.incomplete = incomplete_report(finish)
        if self._body.return_token_ids:
            shaped.token_ids = choice.ids
        return shaped

    def _begin(self, index: int, prompt: int, writer: CompletionWriter) -> CompletionChoice:
        """A choice as it begins: with what it says of its prompt."""
        shaped = CompletionChoice(index, self._echoes[prompt] if self._echoes is not None else "")
        if self._echoes is not None and self._body.logprobs is not None:
            shaped.logprobs = self._echoed_logprobs(prompt, writer)
        if self._body.prompt_logprobs is not None:
            read = self.outcome.prompt_logprobs[prompt]
            shaped.prompt_logprobs = logprobs.prompt(read, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            shaped.prompt_token_ids = self.outcome.prompt_ids(prompt)
        return shaped

    def _echoed_logprobs(self, prompt: int, writer: CompletionWriter) -> CompletionLogprobs | None:
        first, read = self.outcome.first_token(prompt), self.outcome.prompt_logprobs[prompt]
        if first is None or self._echoes is None:  # aborted before it began
            return None
        token, _text, raw = first
        offsets = text_offsets(self._echoes[prompt], [raw, *(item.raw for item in read)])
        return writer.write_prompt((token, raw), read, offsets)

    def deltas(self, batch: Batch) -> Iterator[Any]:
        for prompt, event in batch:
            if isinstance(event, Chunk):
                mould = self._moulds.get(self.outcome.index(prompt, event))
                if mould is None or event.finish is not None or event.logprobs:
                    yield from self._chunks(prompt, event)
                elif event.text:
                    yield mould.filled(event.text)
            elif isinstance(event, Started) and self._early:
                for i in range(prompt * self.outcome.n, (prompt + 1) * self.outcome.n):
                    yield from self._begin_stream(i, prompt)

    @property
    def _early(self) -> bool:
        """Whether all that is said of a prompt is known before it has been computed."""
        return self._body.logprobs is None

    def _begin_stream(self, index: int, prompt: int) -> Iterator[Completion]:
        writer = self._writers[index] = self._writer(prompt)
        if self._body.logprobs is None and not (self._body.return_token_ids or self._usage_always):
            self._moulds[index] = Mould(lambda text: self._chunk(CompletionChoice(index, text)))
        warnings = self.outcome.warnings
        if self._echoes is not None or self._body.return_token_ids or warnings:
            first = self._chunk(self._begin(index, prompt, writer))
            first.warnings = warnings
            yield first

    def _chunks(self, prompt: int, chunk: Chunk) -> Iterator[Completion]:
        index = self.outcome.index(prompt, chunk)
        if index not in self._writers:
            yield from self._begin_stream(index, prompt)
        ids = chunk.ids if self._body.return_token_ids else b""
        if not (chunk.text or chunk.logprobs or chunk.finish or ids):
            return
        choice = CompletionChoice(index, chunk.text)
        choice.logprobs = self._logprobs(self._writers[index], chunk.logprobs or [])
        if chunk.finish is not None:
            choice.finish_reason = chunk.finish.reason
            choice.matched_stop = chunk.finish.matched
            choice.incomplete = incomplete_report(chunk.finish)
        if self._body.return_token_ids:
            choice.token_ids = unpack(ids).tolist()
        yield self._chunk(choice)

    def _writer(self, prompt: int) -> CompletionWriter:
        offset = len(self._echoes[prompt]) if self._echoes is not None else 0
        return CompletionWriter(self._body.logprobs or 0, offset, bool(self._body.return_tokens_as_token_ids))

    def _logprobs(self, writer: CompletionWriter, items: Sequence[TextLogprob]) -> CompletionLogprobs | None:
        return None if self._body.logprobs is None else writer.write(items)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        usage: Usage | UnsetType | None = None if self._wants_usage else UNSET
        if self._usage_always:
            usage = self.outcome.usage(report=False)
        return Completion(self._name, self._created, self._model, [choice], usage)

    def closing(self) -> Iterator[Completion]:
        if self._wants_usage:
            usage = self.outcome.usage(report=bool(self._body.cache_report))
            yield Completion(self._name, self._created, self._model, [], usage)


def _extend(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.top_logprobs += more.top_logprobs
    logprobs.text_offset += more.text_offset
