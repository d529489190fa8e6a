"""Whether the process lives, whether a request would be served, and whether a token really comes out."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from sapwood.srt.errors import ErrorInfo, SapwoodError, Unavailable
from sapwood.srt.messages import Chunk, Ended, IdsPrompt, pack
from sapwood.srt.params import SamplingParams
from sapwood.srt.server.reply import JsonAnswer, error_answer
from sapwood.srt.server.service import Service

PROBE_SECONDS = 10.0
PROBE_NAMESPACE = "health"
"""No client's salt makes this one: probes share nothing with requests, and leave one cached token at most."""


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/live", response_class=Response)
    async def live() -> Response:
        """200 as long as the process answers."""
        return JsonAnswer({"status": "alive"})

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 only when a request would be served now; 503 with the reason while loading, draining or dead,
        and while a process is silent or the worker is being replaced."""
        _require_well(service)
        return JsonAnswer({"status": "ready"})

    @router.get("/health_generate", response_class=Response)
    async def health_generate() -> Response:
        """200 once a token was generated; 503 with the reason if none came within 10 s."""
        _require_well(service)
        if (error := await probe(service)) is not None:
            return error_answer(error)
        return JsonAnswer({"status": "generating"})

    return router


def _require_well(service: Service) -> None:
    service.require_ready()
    if service.trouble:
        raise Unavailable(service.trouble)


async def probe(service: Service, timeout: float = PROBE_SECONDS) -> ErrorInfo | None:
    """Generate one token from one token; what went wrong, or None."""
    first = service.source.eos_ids[0] if service.source.eos_ids else 0
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    try:
        stream = service.client.submit(IdsPrompt(pack([first])), params, PROBE_NAMESPACE)
    except SapwoodError as e:
        return e.info()
    tokens = 0
    try:
        async with asyncio.timeout(timeout):
            async for event in stream:
                if isinstance(event, Chunk):
                    tokens += len(event.ids) // 4
                elif isinstance(event, Ended) and event.error is not None:
                    return Unavailable(f"no token came out: {event.error.message}").info()
    except TimeoutError:
        return Unavailable(f"no token came out within {timeout:g} s").info()
    finally:
        stream.cancel()
    return None if tokens else Unavailable("the request ended without a token").info()
