"""The FastAPI application: its routes, and one shape for every error."""

from __future__ import annotations

import fastapi
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import sapwood
from sapwood.srt.errors import ErrorInfo, SapwoodError
from sapwood.srt.metrics import Metrics
from sapwood.srt.server import (
    cache,
    chat,
    completions,
    control,
    embeddings,
    health,
    native,
    openapi,
    programs,
    structured,
    tokens,
)
from sapwood.srt.server.answers import ChatChunk, ChatCompletion, Completion
from sapwood.srt.server.control import AbortAnswer, AbortRequest
from sapwood.srt.server.counted import Counted
from sapwood.srt.server.keys import Gate, Keys
from sapwood.srt.server.native_protocol import Generated, GenerateRequest, NativeSampling
from sapwood.srt.server.protocol import ChatMessage, ChatRequest, CompletionRequest
from sapwood.srt.server.reply import error_answer
from sapwood.srt.server.request_log import RequestIds, RequestLog
from sapwood.srt.server.service import Service

_KINDS: list[type[msgspec.Struct]] = [
    ChatMessage, ChatRequest, ChatCompletion, ChatChunk, CompletionRequest, Completion,
    GenerateRequest, NativeSampling, Generated, AbortRequest, AbortAnswer,
    *cache.KINDS, *embeddings.KINDS, *tokens.KINDS, *structured.KINDS, *programs.KINDS,
]  # fmt: skip
_CODES = {404: "not_found", 405: "method_not_allowed"}


def create(service: Service, metrics: Metrics) -> FastAPI:
    """The application that serves `service`."""
    app = FastAPI(
        title="Sapwood", version=sapwood.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    for router in (
        chat.routes(service),
        completions.routes(service),
        native.routes(service),
        embeddings.routes(service),
        tokens.routes(service),
        cache.routes(service),
        programs.routes(service),
        structured.routes(service),
        control.routes(service, metrics),
        health.routes(service),
    ):
        app.include_router(router)
    openapi.install(app, _KINDS, service)
    _install_errors(app)
    # The one that is added last comes first.
    app.add_middleware(Gate, keys=Keys(service.config))
    metrics.model = service.model
    metrics.label_of = service.tenants.label
    app.add_middleware(RequestIds, requests=service.requests or RequestLog(metrics, enabled=False))
    app.add_middleware(Counted, metrics=metrics)
    return app


def _install_errors(app: FastAPI) -> None:
    @app.exception_handler(SapwoodError)
    async def ours(request: Request, error: SapwoodError) -> Response:
        return error_answer(error.info())

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: fastapi.HTTPException) -> Response:
        code = _CODES.get(error.status_code, "invalid_request")
        message = f"{request.method} {request.url.path}: {error.detail}"
        info = ErrorInfo(error.status_code, "invalid_request_error", code, message)
        return error_answer(info, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])
        message = f"{param}: {first['msg']}, got {str(first.get('input'))[:100]!r}"
        return error_answer(ErrorInfo(400, "invalid_request_error", "invalid_value", message, param))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        return error_answer(ErrorInfo(500, "server_error", "internal_error", "internal error"))
