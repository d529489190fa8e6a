"""Prometheus metrics: latencies seen by the server, and the scheduler's own numbers."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from sapwood.srt import namespaces
from sapwood.srt.messages import Chunk, Ended, GrammarStats, Started, Stats

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)

MAX_NAMESPACES = 50
"""Namespaces that get a label of their own; those that come later are counted together, as "other"."""

_GAUGES = (
    ("sapwood_running_requests", "Choices that are being computed", "running"),
    ("sapwood_waiting_requests", "Requests that wait for admission", "waiting"),
    ("sapwood_kv_slots_used", "KV slots (tokens) that running requests hold", "slots_used"),
    ("sapwood_kv_slots_cached", "KV slots (tokens) in the radix tree", "slots_cached"),
    (
        "sapwood_kv_slots_pinned",
        "KV slots (tokens) of paths that are kept for later",
        "slots_pinned",
    ),
    ("sapwood_kv_slots_capacity", "KV slots (tokens) of the pool", "slots_total"),
    ("sapwood_programs", "Programs that live", "programs"),
)
_COUNTERS = (
    ("sapwood_retracted", "Retractions of running requests for want of KV slots", "retracted"),
    ("sapwood_steps", "Steps of the worker", "steps"),
    ("sapwood_prompt_tokens_computed", "Prompt tokens computed", "prompt_tokens_computed"),
    ("sapwood_output_tokens", "Tokens generated", "output_tokens"),
    ("sapwood_surplus_tokens", "Tokens generated after the end of a request and dropped", "surplus_tokens"),
    ("sapwood_evicted_tokens", "Tokens evicted from the cache", "evicted_tokens"),
    ("sapwood_drafted_tokens", "Tokens proposed as drafts", "drafted_tokens"),
    ("sapwood_accepted_tokens", "Drafted tokens that were drawn", "accepted_tokens"),
)
_GRAMMAR_COUNTERS = (
    ("sapwood_grammars_compiled", "Constraints that were compiled", "compiled"),
    ("sapwood_grammars_refused", "Constraints that were refused when they were compiled", "refused"),
    ("sapwood_grammars_known", "Constraints that were known from an earlier request", "known"),
    ("sapwood_grammar_seconds", "Seconds of computing that compiling took", "seconds"),
)


class StatsCollector(Collector):
    """The latest numbers of scheduler and grammar process, read when the page is asked for; nothing before
    the scheduler's first came."""

    def __init__(self, latest: Callable[[], Stats | None], grammars: Callable[[], GrammarStats]) -> None:
        self._latest = latest
        self._grammars = grammars

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats, grammars = self._latest(), self._grammars()
        if stats is None:
            return
        for name, text, field in _GRAMMAR_COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(grammars, field))
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))


class Latencies(Collector):
    """A histogram in seconds that takes a fifth of the time of the package's own, once for each token.

    It belongs to one thread, so it needs no locks.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        """`count` times the same."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        ends = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """Observes the streams of a Client; its registry is its own. Times are in seconds.

    `model` is a label of what is counted by cache namespace, whose label is a hash (see namespaces.py).
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self.label_of: Callable[[str], str] = namespaces.label
        self.registry = CollectorRegistry()
        self._latest: Callable[[], Stats | None] = lambda: None
        self._grammars: Callable[[], GrammarStats] = GrammarStats
        self.registry.register(StatsCollector(lambda: self._latest(), lambda: self._grammars()))
        self._first = self._histogram("time_to_first_token", "From arrival to the first token", _LONG)
        self._between = Latencies(
            "sapwood_inter_token_latency_seconds", "Between two tokens of a choice", _SHORT
        )
        self.registry.register(self._between)
        self._whole = self._histogram("request_duration", "From arrival to the end", _LONG)
        self._queued = self._histogram("queue_time", "From arrival to admission", _LONG)
        self._ends = Counter(
            "sapwood_requests",
            "Choices by finish reason; a request that fails or loses its client counts once",
            ["finish_reason"],
            registry=self.registry,
        )
        self._prompt = self._by_namespace("prompt_tokens", "Tokens of the prompts that were admitted")
        self._cached = self._by_namespace("cached_prompt_tokens", "Those of them that the cache had")
        self._saved = self._by_namespace(
            "prefill_saved_seconds", "Seconds of prefill that cached tokens saved"
        )
        self._lookups = Counter(
            "sapwood_prefix_lookups",
            "Prompts looked up in the cache, by why the lookup stopped",
            ["stopped"],
            registry=self.registry,
        )
        self._http = Counter(
            "sapwood_http_requests",
            "HTTP requests that were answered",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._restarts = Counter(
            "sapwood_worker_restarts", "Workers that died and were replaced", registry=self.registry
        )
        self._labels: set[str] = set()
        self._times: dict[str, dict[int, float]] = {}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sapwood_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def _by_namespace(self, name: str, text: str) -> Counter:
        return Counter(f"sapwood_{name}", text, ["model", "namespace"], registry=self.registry)

    def follow(
        self, latest: Callable[[], Stats | None], grammars: Callable[[], GrammarStats] = GrammarStats
    ) -> None:
        """Where the numbers of scheduler and grammar process come from."""
        self._latest = latest
        self._grammars = grammars

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def on_restart(self) -> None:
        """The worker has died, and another one is being started."""
        self._restarts.inc()

    def on_answer(self, route: str, method: str, status: int) -> None:
        """An HTTP request was answered; `route` is its path as a template."""
        self._http.labels(route, method, str(status)).inc()

    def on_started(self, event: Started, namespace: str) -> None:
        self._queued.observe(event.queued)
        label = self._label(namespace)
        self._prompt.labels(self.model, label).inc(len(event.prompt_ids) // 4)
        self._cached.labels(self.model, label).inc(event.verdict.matched)
        self._saved.labels(self.model, label).inc(event.saved)
        self._lookups.labels(event.verdict.stopped).inc()

    def _label(self, namespace: str) -> str:
        """That of the namespace; "other" once there are many. Those that have one in common count once."""
        label = self.label_of(namespace)
        if len(self._labels) < MAX_NAMESPACES:
            self._labels.add(label)
        return label if label in self._labels else "other"

    def on_chunk(self, event: Chunk, arrived: float, now: float) -> None:
        tokens = len(event.ids) // 4
        if tokens:
            times = self._times.setdefault(event.rid, {})
            if not times:
                self._first.observe(now - arrived)
            if (before := times.get(event.choice)) is not None:
                self._between.observe((now - before) / tokens, tokens)
            times[event.choice] = now
        if event.finish is not None:
            self._ends.labels(event.finish.reason).inc()

    def on_ended(self, event: Ended, arrived: float) -> None:
        self._times.pop(event.rid, None)
        self._whole.observe(time.monotonic() - arrived)
        if event.error is not None:
            gone = event.error.code == "client_disconnected"
            self._ends.labels("abort" if gone else "error").inc()
