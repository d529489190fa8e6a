"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import Chunk, Started, TextLogprob, TextPrompt
from sapwood.srt.server import guard, protocol, sampling
from sapwood.srt.server.answers import Completion, CompletionChoice, CompletionLogprobs
from sapwood.srt.server.logprobs import CompletionWriter
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.protocol import CompletionRequest
from sapwood.srt.server.reply import Batch, Reply
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
        return answer(service, body)

    return router


def answer(service: Service, body: CompletionRequest) -> Reply:
    """Check the request, start its prompts, and return what sends the answer."""
    service.require_model(body.model)
    protocol.check(body)
    limit = sampling.at_least_one("max_tokens", body.max_tokens)
    params = sampling.openai(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        logprobs=body.logprobs,
        defaults=service.source.sampling_defaults,
        vocab_size=service.source.vocab_size,
    )
    service.require_few(body.prompt)
    prompts = service.prompts(body.prompt, "prompt")
    echoes = [""] * len(prompts)
    if body.echo:
        texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
        if len(texts) < len(prompts):
            raise BadRequest("echo of token ids is not supported yet", param="echo", code="unsupported")
        if body.logprobs is not None:
            raise BadRequest("echo with logprobs is not supported yet", param="echo", code="unsupported")
        echoes = texts
    name = sampling.check_rid(body.rid) or f"cmpl-{uuid.uuid4().hex}"
    streams = service.submit(
        [(prompt, params) for prompt in prompts], namespace=sampling.namespace(body.cache_salt), rid=name
    )
    shape = CompletionShape(body, name, service.model, params.n, echoes)
    return Reply(streams, shape, streamed=bool(body.stream))


class CompletionShape:
    """Text completions, whole or in chunks; with `echoes`, each choice begins with its prompt."""

    def __init__(self, body: CompletionRequest, name: str, model: str, n: int, echoes: Sequence[str]) -> None:
        self.outcome = Outcome(len(echoes), n)
        self._body = body
        self._name = name
        self._model = model
        self._echoes = echoes
        self._created = int(time.time())
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._writers = [CompletionWriter() for _ in self.outcome.choices]

    def whole(self) -> Completion:
        choices = []
        for i, choice in enumerate(self.outcome.choices):
            finish = choice.ended
            text = self._echoes[i // self.outcome.n] + choice.text
            shaped = self._logprobs(i, choice.logprobs)
            choices.append(CompletionChoice(i, text, shaped, finish.reason, finish.matched))
        usage = self.outcome.usage(report=bool(self._body.cache_report))
        return Completion(self._name, self._created, self._model, choices, usage)

    def deltas(self, batch: Batch) -> Iterator[Completion]:
        for prompt, event in batch:
            if isinstance(event, Chunk):
                yield from self._chunks(prompt, event)
            elif isinstance(event, Started) and self._echoes[prompt]:
                for i in range(self.outcome.n):
                    yield self._chunk(CompletionChoice(prompt * self.outcome.n + i, self._echoes[prompt]))

    def _chunks(self, prompt: int, chunk: Chunk) -> Iterator[Completion]:
        if not (chunk.text or chunk.logprobs or chunk.finish):
            return
        i = self.outcome.index(prompt, chunk)
        choice = CompletionChoice(i, chunk.text, self._logprobs(i, chunk.logprobs or []))
        if chunk.finish is not None:
            choice.finish_reason = chunk.finish.reason
            choice.matched_stop = chunk.finish.matched
        yield self._chunk(choice)

    def _logprobs(self, index: int, items: Sequence[TextLogprob]) -> CompletionLogprobs | None:
        return None if self._body.logprobs is None else self._writers[index].write(items)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        usage = None if self._wants_usage else UNSET
        return Completion(self._name, self._created, self._model, [choice], usage)

    def closing(self) -> Iterator[Completion]:
        if self._wants_usage:
            usage = self.outcome.usage(report=bool(self._body.cache_report))
            yield Completion(self._name, self._created, self._model, [], usage)
