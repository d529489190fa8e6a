"""Programs: what the requests of one have used, and its end."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from sapwood.srt.errors import BadRequest
from sapwood.srt.server import guard, keys
from sapwood.srt.server.openapi import json_answer, json_body
from sapwood.srt.server.program_counts import ProgramCounts, ProgramRequest, counts
from sapwood.srt.server.reply import JsonAnswer, while_here
from sapwood.srt.server.service import Service

KINDS: list[type[msgspec.Struct]] = [ProgramRequest, ProgramCounts]


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/programs/end", openapi_extra=json_body(ProgramRequest, ProgramCounts), response_class=Response
    )
    async def end(request: Request) -> Response:
        """Nothing is kept for the program any more. Its requests that still run go on."""
        body = await guard.read(request, ProgramRequest, service.config.max_body_bytes)
        return JsonAnswer(await while_here(request, counts(service, body, keys.key_of(request), end=True)))

    @router.get("/programs/{program:path}", openapi_extra=json_answer(ProgramCounts), response_class=Response)
    async def show(
        request: Request, program: str, cache_salt: Annotated[str | None, Query()] = None
    ) -> Response:
        """What the program has used until now."""
        if unknown := sorted(request.query_params.keys() - {"cache_salt"}):
            raise BadRequest(f"unknown query parameter {unknown[0][:100]!r}", code="unknown_field")
        body = ProgramRequest(program=program, cache_salt=cache_salt)
        return JsonAnswer(await while_here(request, counts(service, body, keys.key_of(request))))

    return router
