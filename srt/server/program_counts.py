"""What a program's requests have used, and its end. Needs no web framework: the offline Engine asks too."""

from __future__ import annotations

import msgspec

from sapwood.srt.server.service import Service
from sapwood.srt.server.tenants import PlaceFields


class ProgramRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The program of the caller's requests that say this `program` and this `cache_salt`."""

    program: str
    cache_salt: str | None = None


class ProgramCounts(msgspec.Struct, omit_defaults=True):
    """What the requests of a program have used, in tokens.

    `requests` have begun, with `prompt_tokens`, of which `cached_tokens` were in the cache. Computed were
    `computed_tokens` of prompts, `decoded_tokens` of outputs and `drafted_tokens` that were only proposed:
    together all positions of all forward passes. After `accepted_tokens` of the proposed ones another token
    was drawn. Of the first two, `recomputed_tokens` had been computed before for the same request, and were
    no longer cached: it was `retracted`, or another choice had computed them. The choices that have ended
    have `output_tokens`; `surplus_tokens` were drawn after an end, and dropped. An end has let go of
    `released_tokens` that were kept for the program alone.
    """

    program: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    output_tokens: int
    surplus_tokens: int
    retracted: int
    released_tokens: int | None = None


async def counts(
    service: Service, body: ProgramRequest, key: bytes = b"", *, end: bool = False
) -> ProgramCounts:
    """What the program of a caller under `key` has used; with `end` it is ended first.

    Raises BadRequest, ProgramNotFound, Unavailable.
    """
    service.require_ready()
    namespace, scheduling = service.tenants.place(
        PlaceFields(cache_salt=body.cache_salt, program=body.program), key
    )
    options = {"program": scheduling.program, "tenant": scheduling.tenant, "end": end}
    found = await service.client.ask("program", namespace=namespace, options=options)
    return msgspec.convert(found, ProgramCounts)
