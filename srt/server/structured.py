"""`GET /structured/support`: which constraints can be had, read from the tables that enforce them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Response

from sapwood.srt.grammar import child, keywords, limits, regex
from sapwood.srt.params import MAX_CONSTRAINT_BYTES
from sapwood.srt.server import constraints, formats
from sapwood.srt.server.openapi import json_answer
from sapwood.srt.server.reply import JsonAnswer
from sapwood.srt.server.service import Service


class Support(msgspec.Struct):
    """`json_schema` goes keyword by keyword. `fields` are the request's fields of constraints, and what each
    holds; `limits` are those of other kinds, and of compiling any. The formats are those of this model; null:
    tool calls, or reasoning, are not told apart."""

    json_schema: dict[str, Any]
    fields: dict[str, str]
    limits: dict[str, float]
    max_bytes: int
    json_whitespace: int
    tool_call_format: str | None
    reasoning_format: str | None


_LIMITS: dict[str, float] = {
    "choices": limits.MAX_CHOICES,
    "regex_characters": regex.MAX_CHARS,
    "regex_groups": regex.MAX_DEPTH,
    "regex_repeat": limits.MAX_REPEAT,
    "regex_written_out": regex.MAX_SIZE,
    "regex_shortest": limits.MAX_SHORTEST,
    "ebnf_rules": limits.MAX_EBNF_RULES,
    "ebnf_repeat": limits.MAX_REPEAT,
    "compile_cpu_seconds": child.CPU_SECONDS,
    "compile_seconds": child.WALL_SECONDS,
    "compile_memory_bytes": child.MEMORY_BYTES,
}

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
    config = service.config
    return Support(
        keywords.support(),
        constraints.HOLDS,
        _LIMITS,
        MAX_CONSTRAINT_BYTES,
        config.json_whitespace,
        *formats.known(config, service.source),
    )
