"""`GET /structured/support`: which constraints can be had, read from the tables that enforce them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import keywords
from sapwood.srt.params import MAX_CONSTRAINT_BYTES
from sapwood.srt.server import constraints, formats
from sapwood.srt.server.openapi import json_answer
from sapwood.srt.server.reply import JsonAnswer
from sapwood.srt.server.service import Service


class Support(msgspec.Struct):
    """`json_schema` goes keyword by keyword. `fields` are the request's fields of constraints, and what each
    holds. The formats are those of this model; null: tool calls, or reasoning, are not told apart."""

    json_schema: dict[str, Any]
    fields: dict[str, str]
    max_bytes: int
    json_whitespace: int
    tool_call_format: str | None
    reasoning_format: str | None


KINDS: list[type[msgspec.Struct]] = [Support]


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/structured/support", openapi_extra=json_answer(Support), response_class=Response)
    async def support() -> Response:
        """What is supported of JSON Schema, and what else an output can be constrained to."""
        return JsonAnswer(of(service))

    return router


def of(service: Service) -> Support:
    """What this server supports."""
    config, source = service.config, service.source
    try:
        tool_format: str | None = formats.tool_format(config, source)
    except BadRequest:
        tool_format = None
    return Support(
        keywords.support(),
        dict(constraints.KINDS),
        MAX_CONSTRAINT_BYTES,
        config.json_whitespace,
        tool_format,
        formats.reasoning_format(config, source, {}) or None,
    )
