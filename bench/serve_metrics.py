"""The numbers of one run of a workload, from its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.process_cost import Meter
from bench.sse_client import Answer


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the values lie, interpolated; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def speeds(answers: Sequence[Answer], asked: int, output: int, seconds: float) -> dict[str, Any]:
    """Rates in tokens per second over all of `seconds`; TTFT, TPOT and ITL in seconds, p50 and p99.

    TTFT: from sending to the first text. TPOT: from there to the end, over the tokens after the first, per
    request. ITL: between two pieces of text. Failed requests count in none of these; `failed` includes those
    never sent, `short` are those with fewer tokens than `output` by the server's own count. `cached_tokens`
    is None if the server does not report it.
    """
    good = [a for a in answers if a.error is None]
    tokens, prompts = sum(a.tokens for a in good), sum(a.prompt_tokens for a in good)
    cached = [a.cached for a in good if a.cached is not None]
    per_token = [(a.end - a.first) / (a.tokens - 1) for a in good if a.tokens > 1]
    gaps = [b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)]
    row: dict[str, Any] = {
        "seconds": seconds,
        "requests": asked,
        "failed": asked - len(good),
        "short": sum(a.counted and a.tokens < output for a in good),
        "errors": sorted({a.error for a in answers if a.error})[:5],
        "output_tokens": tokens,
        "prompt_tokens": prompts,
        "cached_tokens": sum(cached) if cached else None,
        "output_per_s": tokens / seconds,
        "total_per_s": (tokens + prompts) / seconds,
    }
    for name, values in (("ttft", [a.first for a in good]), ("tpot", per_token), ("itl", gaps)):
        row[f"{name}_p50_s"] = percentile(values, 0.5)
        row[f"{name}_p99_s"] = percentile(values, 0.99)
    return row


def costs(meter: Meter, tokens: int) -> dict[str, Any]:
    """CPU seconds of the server and of the client, the server's peak memory, the share that others took."""
    return {
        "server_cpu_s": meter.server_cpu,
        "peak_pss_bytes": meter.peak_pss,
        "foreign_share": meter.foreign,
        "client_cpu_s": meter.client_cpu,
        "client_us_per_token": 1e6 * meter.client_cpu / tokens if tokens else None,
        "sampler_cpu_s": meter.sampler_cpu,
    }
