"""What a running runtime says of itself. Needs no web framework: the offline Engine says it too."""

from __future__ import annotations

from typing import Any

import msgspec

import sapwood
from sapwood.srt.errors import SapwoodError
from sapwood.srt.server.service import Service

STATE_SECONDS = 2.0
SECRET = ("api_key", "admin_api_key")


async def server_info(service: Service) -> dict[str, Any]:
    """The configuration, the model, what was chosen at start, and the scheduler's state, as JSON values.

    `state` is null if the scheduler does not answer within 2 s.
    """
    stats = service.client.latest_stats
    return {
        "version": sapwood.__version__,
        "model": service.model,
        "status": "dead" if service.client.failure else service.state,
        "max_request_tokens": service.max_request_tokens,
        "facts": service.facts,
        "config": {
            name: "***" if name in SECRET and value else value
            for name, value in msgspec.to_builtins(service.config).items()
        },
        "source": facts_of_source(service),
        "stats": stats and {name: getattr(stats, name) for name in stats.__struct_fields__},
        "state": await _state(service),
    }


def facts_of_source(service: Service) -> dict[str, Any]:
    names = ("name", "format", "architecture", "vocab_size", "context_length", "eos_ids", "sampling_defaults")
    return {name: getattr(service.source, name) for name in names}


async def _state(service: Service) -> dict[str, Any] | None:
    if service.obstacle is not None:
        return None
    try:
        return await service.client.ask("state", STATE_SECONDS)
    except SapwoodError:
        return None
