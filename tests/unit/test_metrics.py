"""The page that Prometheus scrapes: our own histogram says what the package's would."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from sapwood.srt.messages import Chunk, Ended, Stats, pack
from sapwood.srt.metrics import _SHORT, Latencies, Metrics


def page(registry: CollectorRegistry) -> list[str]:
    """Without the time of its making, which ours does not tell, and the sums."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line and "_sum" not in line]


def test_a_histogram_says_what_the_packages_own_says() -> None:
    rng = random.Random(0)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    plain = Histogram("x_seconds", "Some text", buckets=_SHORT, registry=theirs)
    latencies = Latencies("x_seconds", "Some text", _SHORT)
    ours.register(latencies)
    for seconds in [*_SHORT, 0.0, 100.0, *(rng.expovariate(10) for _ in range(300))]:
        count = rng.randrange(1, 5)
        latencies.observe(seconds, count)
        for _ in range(count):
            plain.observe(seconds)
    assert page(ours) == page(theirs)
    ((family,), (other,)) = (list(latencies.collect()), list(plain.collect()))
    (ours_sum,) = (s.value for s in family.samples if s.name == "x_seconds_sum")
    (their_sum,) = (s.value for s in other.samples if s.name == "x_seconds_sum")
    assert abs(ours_sum - their_sum) < 1e-6


def test_tokens_of_one_chunk_share_its_time() -> None:
    metrics = Metrics()
    metrics.on_chunk(Chunk("r", 0, "a", pack([1])), 0.0, 1.5)
    metrics.on_chunk(Chunk("r", 0, "bcd", pack([2, 3, 4])), 0.0, 1.8)
    metrics.on_chunk(Chunk("r", 1, "x", pack([2])), 0.0, 1.9)
    metrics.on_ended(Ended("r"), 0.0)
    lines = dict(line.rsplit(" ", 1) for line in metrics.page().decode().splitlines() if line[0] != "#")
    assert lines["sapwood_time_to_first_token_seconds_count"] == "1.0"
    assert lines["sapwood_time_to_first_token_seconds_sum"] == "1.5"
    name = "sapwood_inter_token_latency_seconds"
    assert float(lines[f"{name}_count"]) == 3
    assert abs(float(lines[f"{name}_sum"]) - 0.3) < 1e-9
    assert float(lines[f'{name}_bucket{{le="0.1"}}']) - float(lines[f'{name}_bucket{{le="0.05"}}']) in (0, 3)


def test_drafts_are_counted() -> None:
    metrics = Metrics()
    metrics.follow(lambda: Stats(*range(12), 0.5, drafted_tokens=7, accepted_tokens=4))
    lines = dict(line.rsplit(" ", 1) for line in metrics.page().decode().splitlines() if line[0] != "#")
    assert lines["sapwood_drafted_tokens_total"] == "7.0"
    assert lines["sapwood_grammars_compiled_total"] == "0.0"
    assert lines["sapwood_accepted_tokens_total"] == "4.0"
