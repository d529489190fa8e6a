"""What a step costs: by batch and context, and how much of it is not the kernels.

    python -m bench.steps [MODEL] [--batches 1,...] [--contexts 128,...] [--json FILE] [--svg FILE]
                          [--url URL]

The worker's own code runs decode steps over a pool filled with random K and V. Of each step `kernels` is the
time inside C++ (layers, head, sampling); `worker` is all of `Runner.run`. With --url a running server decodes
1 and 32 streams at a context of 128 to 256 tokens: `http` is its median time between tokens, and what it is
above the bare kernels is the overhead of everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.serve import run
from bench.sse_client import ask
from sapwood.kernels.ops import sampling
from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from sapwood.srt.messages import RowStart, Step
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.cpu import make_runner

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
MOST_SLOTS = 2**17
"""Positions of all rows together: beyond, the pool would not fit beside other things."""
HTTP_CONTEXT = 192
"""Half way through answers of 128 tokens to prompts of 128."""
STREAMS = (1, 32)
"""At once, through HTTP."""


class Clock:
    """Seconds spent in the functions it has wrapped."""

    def __init__(self) -> None:
        self.spent = 0.0

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self.spent += time.perf_counter() - begin

        return timed


class Bench:
    """One worker whose rows are filled without computing their prompts."""

    def __init__(self, model: str | None, slots: int, rows: int, **options: Any) -> None:
        config = make(model_path=model, max_total_tokens=slots, max_running_requests=rows, **options)
        source = resolve(config)
        self.name, self.context_length = source.name, source.context_length
        self.runner, pool, self.facts = make_runner(config, source)
        generator = torch.Generator().manual_seed(0)
        for part in (*pool.k, *pool.v):
            part.copy_(torch.randn(part.shape, generator=generator))
        self.clock = Clock()
        self.runner._forward = self.clock.wrap(self.runner._forward)
        decoder = self.runner._decoder
        decoder.logits = self.clock.wrap(decoder.logits)  # type: ignore[method-assign]
        sampling.sample = self.clock.wrap(sampling.sample)
        self._number = 0
        self._free: list[int] = []

    def measure(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Seconds of the median step of `batch` rows that have `context` positions before them."""
        self._free = list(range(batch * (context + steps + 1)))
        params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        starts = [
            RowStart(row, messages.pack(self._take(context)), params, 0, 0, context) for row in range(batch)
        ]
        kernels, worker = [], []
        for i in range(steps + 1):
            self.clock.spent = 0.0
            result = self.runner.run(self._step(batch, context + i, starts if i == 0 else []))
            if i > 0:  # the first one admits the rows
                kernels.append(self.clock.spent)
                worker.append(result.seconds)
        return {"kernels_s": statistics.median(kernels), "worker_s": statistics.median(worker)}

    def _take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _step(self, batch: int, position: int, admitted: list[RowStart]) -> Step:
        self._number += 1
        ones = messages.pack(np.ones(batch))
        return Step(
            number=self._number,
            released=b"",
            admitted=admitted,
            rows=messages.pack(np.arange(batch)),
            starts=messages.pack(np.full(batch, position)),
            counts=ones,
            ids=messages.pack(np.full(batch, 5 if admitted else -1)),
            slots=messages.pack(self._take(batch)),
            samples=ones,
        )


def growth(bench: Bench, batches: list[int], contexts: list[int], steps: int) -> list[dict[str, Any]]:
    rows = []
    for context in contexts:
        for batch in batches:
            if batch * (context + steps + 1) > MOST_SLOTS or context + steps + 1 > bench.context_length:
                continue
            row: dict[str, Any] = {"batch": batch, "context": context}
            row |= bench.measure(batch, context, steps)
            rows.append(row)
            print(
                f"batch {batch:3}  context {context:5}  kernels {1e3 * row['kernels_s']:8.2f} ms"
                f"  worker {1e3 * row['worker_s']:8.2f} ms  {batch / row['worker_s']:7.0f} tokens/s",
                flush=True,
            )
    return rows


def through_http(bench: Bench, url: str, steps: int, repeats: int = 3) -> list[dict[str, Any]]:
    """The time between tokens of 1 and of 32 streams, beside the bare kernels at the same mean context.

    Kernels are measured before and after, so that a machine whose speed drifts shows as such.
    """
    found = []
    for batch in STREAMS:
        kernels, gaps = [], []
        for repeat in range(repeats):
            kernels.append(bench.measure(batch, HTTP_CONTEXT, steps)["kernels_s"])
            gaps.append(run(_median_gap(url, batch, repeat)))
        row = {"batch": batch, "kernels_s": statistics.median(kernels), "http_s": statistics.median(gaps)}
        row["overhead"] = row["http_s"] / row["kernels_s"] - 1
        row["kernels_each_s"], row["http_each_s"] = kernels, gaps
        found.append(row)
        print(
            f"batch {batch:3}  kernels {1e3 * row['kernels_s']:.2f} ms  "
            f"through HTTP {1e3 * row['http_s']:.2f} ms  overhead {row['overhead']:.1%}",
            flush=True,
        )
    return found


async def _median_gap(url: str, batch: int, seed: int) -> float:
    """Seconds between tokens while all of `batch` streams decode."""
    random = np.random.default_rng(1000 * seed + batch)
    body = {"max_tokens": 128, "temperature": 0, "ignore_eos": True, "stream": True}
    asked = [
        ask(url, "/v1/completions", {**body, "prompt": random.integers(1000, 40000, 128).tolist()})
        for _ in range(batch)
    ]
    exchanges = await asyncio.gather(*asked)
    gaps: list[float] = []
    start = max(e.sent + e.answer().first for e in exchanges)
    for exchange in exchanges:
        answer = exchange.answer()
        if answer.error:
            raise SystemExit(f"{url}: {answer.error}")
        times = np.array(answer.times) + exchange.sent
        gaps += np.diff(times[times > start]).tolist()
    return statistics.median(gaps)


def svg(rows: list[dict[str, Any]], title: str) -> str:
    """Milliseconds of a step over the batch, a line for each context, both axes logarithmic."""
    width, height, left, bottom = 720, 440, 70, 50
    times = [1e3 * row["worker_s"] for row in rows]
    low, high = np.log10(min(times)) - 0.05, np.log10(max(times)) + 0.05
    widest = np.log2(max(row["batch"] for row in rows)) or 1.0

    def x(batch: float) -> float:
        return left + float(np.log2(batch) / widest) * (width - left - 150)

    def y(milliseconds: float) -> float:
        return 40 + float((high - np.log10(milliseconds)) / (high - low)) * (height - bottom - 40)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}</text>',
        f'<text x="{(left + width - 150) / 2:.0f}" y="{height - 10}">batch (rows of a step)</text>',
    ]
    for batch in sorted({row["batch"] for row in rows}):
        parts.append(
            f'<text x="{x(batch):.0f}" y="{height - bottom + 18}" text-anchor="middle">{batch}</text>'
        )
    for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if low <= np.log10(tick) <= high:
            parts.append(
                f'<line x1="{left}" x2="{width - 150}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
                f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick} ms</text>'
            )
    contexts = sorted({row["context"] for row in rows})
    for i, context in enumerate(contexts):
        line = [(x(r["batch"]), y(1e3 * r["worker_s"])) for r in rows if r["context"] == context]
        colour = f"hsl({int(300 * i / max(1, len(contexts) - 1))},70%,40%)"
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in line)
        end = line[-1]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            + "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in line)
            + f'<text x="{end[0] + 8:.1f}" y="{end[1] + 4:.1f}" fill="{colour}">{context} tokens</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--url")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    batches, contexts = ([int(n) for n in part.split(",")] for part in (args.batches, args.contexts))
    options: dict[str, Any] = {"cpu_isa": args.isa}
    if args.threads:
        options["num_threads"] = args.threads
    rows, slots = max(batches), min(MOST_SLOTS, max(batches) * (max(contexts) + args.steps + 1))
    if args.url:
        rows, slots = max(rows, *STREAMS), max(slots, max(STREAMS) * (HTTP_CONTEXT + args.steps + 1))
    bench = Bench(args.model, slots, rows, **options)
    for name, fact in bench.facts.items():
        print(f"{name}: {fact}")
    result: dict[str, Any] = {"facts": bench.facts, "rows": growth(bench, batches, contexts, args.steps)}
    if args.url:
        result["http"] = through_http(bench, args.url, args.steps)
    if args.svg:
        args.svg.write_text(svg(result["rows"], f"Decode step, {html.escape(bench.name)}"))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
