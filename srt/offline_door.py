"""The routes that a program of `sapwood.lang` needs, without HTTP: bodies and answers are plain values."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood.srt import offline_requests, offline_work
from sapwood.srt.errors import BadRequest
from sapwood.srt.offline_work import Call, Gate
from sapwood.srt.server import info, program_counts
from sapwood.srt.server.program_counts import ProgramRequest
from sapwood.srt.server.service import Service


async def post(service: Service, gate: Gate, path: str, body: dict[str, Any]) -> Any:
    """What the route answers. Raises the error that it answers with; cancelled, it aborts the request."""
    if path == "/generate":
        return msgspec.to_builtins(await _generate(service, gate, body))
    if path == "/programs/end":
        program = offline_requests.convert(body, ProgramRequest)
        return msgspec.to_builtins(await program_counts.counts(service, program, end=True))
    if path == "/flush_cache":
        return await service.client.ask("flush")
    if path == "/server_info":
        return await info.server_info(service)
    raise _unknown(path)


def call(service: Service, path: str, body: dict[str, Any]) -> Call:
    """The call that streams the answer to a body of `/generate`. Raises BadRequest."""
    if path != "/generate":
        raise _unknown(path)
    values = {**body, "stream": True}
    return offline_requests.generate(service, values, values.pop("sampling_params", None))


async def _generate(service: Service, gate: Gate, body: dict[str, Any]) -> Any:
    values = dict(body)
    if values.get("stream"):
        raise BadRequest("a streamed answer has events: see Engine.events", param="stream")
    if values.get("score") is not None:
        return await offline_work.scored(service, gate, offline_requests.scored(service, values))
    asked = offline_requests.generate(service, values, values.pop("sampling_params", None))
    answers = await offline_work.gather(service, gate, asked, lambda: None)
    return answers if asked.body.batched or len(answers) != 1 else answers[0]


def _unknown(path: str) -> BadRequest:
    return BadRequest(f"there is no route {path[:100]!r} without a server", code="not_found")
