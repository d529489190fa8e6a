"""`POST /v1/embeddings`: the hidden states that a decoder ends a prompt with, in OpenAI's shape."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import guard, keys, refused, sampling
from sapwood.srt.server.answers import Usage
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.outcome import Outcome, vector
from sapwood.srt.server.refused import Refused
from sapwood.srt.server.reply import Batch, Reply
from sapwood.srt.server.service import Service
from sapwood.srt.server.tenants import PlaceFields

REFUSED = {"truncate_prompt_tokens": Refused("is not supported: cut the input before you send it")}


@refused.fields(REFUSED)
class EmbeddingRequest(PlaceFields, forbid_unknown_fields=True, kw_only=True):
    """`input` is a text or a list of token ids, or a list of either.

    Extensions: `pooling` says which hidden state (default: --pooling), `normalize` whether it gets unit
    length (default: true), and some of the other routes.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_report: bool | None = None
    rid: str | None = None
    timeout: float | None = None
    user: str | None = None


class Embedding(msgspec.Struct):
    """Numbers, or the base64 of float32s, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"


KINDS: list[type[msgspec.Struct]] = [EmbeddingRequest, Embeddings]


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/embeddings", openapi_extra=json_body(EmbeddingRequest, Embeddings), response_class=Response
    )
    async def embeddings(request: Request) -> Response:
        service.require_ready()
        body = await guard.read(request, EmbeddingRequest, service.config.max_body_bytes)
        return answer(service, body, keys.key_of(request))

    return router


def answer(service: Service, body: EmbeddingRequest, key: bytes) -> Reply:
    """Check the request, start its inputs, and return what sends the answer."""
    service.require_model(body.model)
    refused.check(body)
    _check_dimensions(body.dimensions, service.hidden_size)
    service.require_few(body.input, "input")
    prompts = service.prompts(body.input, "input", body.add_special_tokens)
    params = SamplingParams(max_tokens=0, pooling=body.pooling or service.config.pooling)
    streams = service.submit(
        [(prompt, params) for prompt in prompts],
        place=service.tenants.place(body, key),
        rid=sampling.check_rid(body.rid) or f"embd-{uuid.uuid4().hex}",
        timeout=sampling.check_timeout(body.timeout),
        field="input",
    )
    return Reply(streams, EmbeddingShape(body, service.model, len(prompts)), streamed=False, field="input")


def _check_dimensions(dimensions: int | None, size: int | None) -> None:
    """The vectors are as long as the model's hidden states: these are not made to be cut."""
    if dimensions not in (None, size):
        raise BadRequest(
            f"dimensions must be the model's hidden size, which is {size}, got {dimensions}",
            param="dimensions",
        )


class EmbeddingShape:
    """One vector for each input, in their order."""

    def __init__(self, body: EmbeddingRequest, model: str, inputs: int) -> None:
        self.outcome = Outcome(inputs, 1)
        self._body = body
        self._model = model

    def parts(self) -> Iterator[Embedding]:
        """Raises Unavailable if the request was aborted."""
        for i, pooled in enumerate(self.outcome.pooled):
            yield Embedding(i, self._vector(pooled))

    def whole(self, parts: list[Any]) -> Embeddings:
        return Embeddings(parts, self._model, self.outcome.usage(report=bool(self._body.cache_report)))

    def _vector(self, pooled: bytes) -> list[float] | str:
        values = vector(pooled, self._body.normalize is not False)
        if self._body.encoding_format == "base64":
            return base64.b64encode(values.tobytes()).decode()
        numbers: list[float] = values.tolist()
        return numbers

    def deltas(self, batch: Batch) -> Iterator[Any]:
        return iter(())

    def closing(self) -> Iterator[Any]:
        return iter(())
