"""`POST /generate`, in SGLang's shape."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from sapwood.srt.server import generation, guard, keys, score
from sapwood.srt.server.native_protocol import Generated, GenerateRequest
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.reply import JsonAnswer, Reply, while_here
from sapwood.srt.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/generate", openapi_extra=json_body(GenerateRequest, Generated, Generated), response_class=Response
    )
    async def generate(request: Request) -> Response:
        service.require_ready()
        body = await guard.read(request, GenerateRequest, service.config.max_body_bytes)
        if body.score is not None:
            scored = await while_here(request, score.answer(service, body, keys.key_of(request)))
            return JsonAnswer(scored, headers={"x-request-id": scored.meta_info.id})
        return answer(service, body, keys.key_of(request))

    return router


def answer(service: Service, body: GenerateRequest, key: bytes) -> Reply:
    """Check the request, start its prompts, and return what sends the answer."""
    service.require_few(body.input_ids if body.text is None else body.text, body.field)
    prompts = generation.prompts(service, body)
    params = generation.sampling_params(body, len(prompts), service.source.vocab_size)
    demands = generation.demands(body, len(prompts), service.config.json_whitespace)
    streams, shape = generation.start(service, body, prompts, params, demands, key)
    return Reply(streams, shape, streamed=bool(body.stream), field=body.field)
