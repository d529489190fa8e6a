"""Routes about the server itself: models, cache, aborts, what was chosen, metrics."""

from __future__ import annotations

import msgspec
import prometheus_client
from fastapi import APIRouter, Request, Response

import sapwood
from sapwood.srt.errors import BadRequest
from sapwood.srt.metrics import Metrics
from sapwood.srt.server import guard, info, keys, sampling
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.reply import JsonAnswer
from sapwood.srt.server.service import Service


class ModelCard(msgspec.Struct):
    """`max_model_len` is the longest request in tokens, prompt and output together."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "sapwood"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either the `rid` of a request (the one that the client set, or the `id` of its answer) or all."""

    rid: str | None = None
    abort_all: bool | None = None


class AbortAnswer(msgspec.Struct):
    """How many prompts are being aborted; 0 if there is no such live request."""

    aborted: int


def routes(service: Service, metrics: Metrics) -> APIRouter:
    router = APIRouter()
    _model_routes(router, service)
    _request_routes(router, service)
    _info_routes(router, service)

    @router.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.page(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @router.get("/version", response_class=Response)
    async def version() -> Response:
        return JsonAnswer({"version": sapwood.__version__})

    return router


def _model_routes(router: APIRouter, service: Service) -> None:
    def card() -> ModelCard:
        return ModelCard(service.model, service.created, service.longest)

    @router.get("/v1/models", response_class=Response)
    async def models() -> Response:
        return JsonAnswer(ModelList([card()]))

    @router.get("/v1/models/{model:path}", response_class=Response)
    async def model(model: str) -> Response:
        service.require_model(model)
        return JsonAnswer(card())


def _request_routes(router: APIRouter, service: Service) -> None:
    @router.get("/flush_cache", response_class=Response)
    @router.post("/flush_cache", response_class=Response)
    async def flush_cache() -> Response:
        """Forget every prefix that no running request uses."""
        service.require_ready()
        return JsonAnswer(await service.client.ask("flush"))

    @router.post(
        "/abort_request", openapi_extra=json_body(AbortRequest, AbortAnswer), response_class=Response
    )
    async def abort_request(request: Request) -> Response:
        body = await guard.read(request, AbortRequest, service.config.max_body_bytes)
        if bool(body.abort_all) == (body.rid is not None):
            raise BadRequest("exactly one of rid and abort_all must be given", param="rid")
        if body.rid is None:
            keys.require_admin(request)
            return JsonAnswer(AbortAnswer(service.client.abort_all()))
        return JsonAnswer(AbortAnswer(service.client.abort(sampling.check_rid(body.rid) or "")))


def _info_routes(router: APIRouter, service: Service) -> None:
    source = service.source

    @router.get("/server_info", response_class=Response)
    @router.get("/get_server_info", response_class=Response)
    async def server_info() -> Response:
        """The configuration, the model, what was chosen at start, and the scheduler's state."""
        return JsonAnswer(await info.server_info(service))

    @router.get("/model_info", response_class=Response)
    @router.get("/get_model_info", response_class=Response)
    async def model_info() -> Response:
        return JsonAnswer(
            {
                "model_path": source.path,
                "tokenizer_path": source.tokenizer_file,
                "is_generation": True,
                "served_model_name": service.model,
                **info.facts_of_source(service),
            }
        )
