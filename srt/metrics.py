"""Prometheus metrics: latencies seen by the server, and the scheduler's own numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sapwood.srt.messages import Chunk, Ended, Started, Stats

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)

_GAUGES = (
    ("sapwood_running_requests", "Choices that are being computed", "running"),
    ("sapwood_waiting_requests", "Requests that wait for admission", "waiting"),
    ("sapwood_kv_slots_used", "KV slots (tokens) that running requests hold", "slots_used"),
    ("sapwood_kv_slots_cached", "KV slots (tokens) in the radix tree", "slots_cached"),
    ("sapwood_kv_slots_capacity", "KV slots (tokens) of the pool", "slots_total"),
)
_COUNTERS = (
    ("sapwood_retracted", "Retractions of running requests for want of KV slots", "retracted"),
    ("sapwood_steps", "Steps of the worker", "steps"),
    ("sapwood_prompt_tokens_cached", "Prompt tokens found in the cache", "prompt_tokens_cached"),
    ("sapwood_prompt_tokens_computed", "Prompt tokens computed", "prompt_tokens_computed"),
    ("sapwood_output_tokens", "Tokens generated", "output_tokens"),
    ("sapwood_surplus_tokens", "Tokens generated after the end of a request and dropped", "surplus_tokens"),
    ("sapwood_evicted_tokens", "Tokens evicted from the cache", "evicted_tokens"),
    ("sapwood_prefill_saved_seconds", "Seconds of prefill that cached tokens saved", "seconds_saved"),
)


class StatsCollector(Collector):
    """The scheduler's latest numbers, read when the page is asked for; nothing before the first came."""

    def __init__(self, latest: Callable[[], Stats | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._latest()
        if stats is None:
            return
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))


class Metrics:
    """Observes the streams of a Client; its registry is its own. Times are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._latest: Callable[[], Stats | None] = lambda: None
        self.registry.register(StatsCollector(lambda: self._latest()))
        self._first = self._histogram("time_to_first_token", "From arrival to the first token", _LONG)
        self._between = self._histogram("inter_token_latency", "Between two tokens of a choice", _SHORT)
        self._whole = self._histogram("request_duration", "From arrival to the end", _LONG)
        self._queued = self._histogram("queue_time", "From arrival to admission", _LONG)
        self._ends = Counter(
            "sapwood_requests",
            "Choices by finish reason; a request that fails or loses its client counts once",
            ["finish_reason"],
            registry=self.registry,
        )
        self._times: dict[str, dict[int, float]] = {}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sapwood_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def follow(self, latest: Callable[[], Stats | None]) -> None:
        """Where the scheduler's numbers come from."""
        self._latest = latest

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def on_started(self, event: Started) -> None:
        self._queued.observe(event.queued)

    def on_chunk(self, event: Chunk, arrived: float) -> None:
        tokens = len(event.ids) // 4
        if tokens:
            now = time.monotonic()
            times = self._times.setdefault(event.rid, {})
            if not times:
                self._first.observe(now - arrived)
            if (before := times.get(event.choice)) is not None:
                for _ in range(tokens):
                    self._between.observe((now - before) / tokens)
            times[event.choice] = now
        if event.finish is not None:
            self._ends.labels(event.finish.reason).inc()

    def on_ended(self, event: Ended, arrived: float) -> None:
        self._times.pop(event.rid, None)
        self._whole.observe(time.monotonic() - arrived)
        if event.error is not None:
            gone = event.error.code == "client_disconnected"
            self._ends.labels("abort" if gone else "error").inc()
