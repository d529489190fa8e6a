"""A line on how it goes, every 10 s while there is something to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sapwood.srt import log
from sapwood.srt.messages import Stats

INTERVAL_SECONDS = 10.0

logger = logging.getLogger("sapwood.throughput")


async def report(latest: Callable[[], Stats | None], interval: float = INTERVAL_SECONDS) -> None:
    """Log what was done since the last line, for ever."""
    before, when = latest(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, at = latest(), time.monotonic()
        if now is not None and (line := summary(before, now, at - when)) is not None:
            log.event(logger, "throughput", line)
        before, when = now, at


def summary(before: Stats | None, now: Stats, seconds: float) -> dict[str, float] | None:
    """Rates in tokens/s, and what share of the prompt tokens the cache had; None if nothing was done.

    `kv_used` is the share of the KV slots that running requests hold, the cached tokens they use included.
    """
    output = now.output_tokens - (before.output_tokens if before else 0)
    computed = now.prompt_tokens_computed - (before.prompt_tokens_computed if before else 0)
    cached = now.prompt_tokens_cached - (before.prompt_tokens_cached if before else 0)
    if not (output or computed or cached or now.running or now.waiting):
        return None
    line = {
        "running": now.running,
        "waiting": now.waiting,
        "prompt_tokens_per_s": round((computed + cached) / seconds, 1),
        "output_tokens_per_s": round(output / seconds, 1),
        "kv_used": round(now.slots_used / max(1, now.slots_total), 3),
    }
    if computed + cached:
        line["cache_hit_rate"] = round(cached / (computed + cached), 3)
    return line
