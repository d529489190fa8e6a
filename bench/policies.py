"""What the scheduler's policies do, on a virtual clock: cache hits, starvation, fairness.

    python -m bench.policies hits [--traces FOLDER] [--json FILE]
    python -m bench.policies starvation [--json FILE]
    python -m bench.policies fairness [--json FILE]

`hits`: batches that all wait at once, as share of the offline optimum (each distinct prefix token computed
once, as a depth-first order does); timed traces beside Belady's eviction on leaves and beside a cache of
blocks of 16 tokens in the order of arrival. `starvation`: 95 % of the requests share a prefix, 5 % share
nothing. `fairness`: one tenant sends ten times what nine others send together. All numbers come from the real
scheduler; only the worker's time is a formula (bench/virtual.py).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.offline_cache import belady, blocks, distinct_tokens
from bench.virtual import CPU, GPU, Cost, Served, Virtual
from sapwood.srt.params import Scheduling
from sapwood.srt.scheduler.policy import SHARE, Queue

POOLS = (0.1, 0.3, 1.0)
POLICIES = ("lpm", "dfs-weight", "fair", "fcfs")
ROWS = 16
Ids = np.ndarray[Any, np.dtype[np.int32]]


class Texts:
    """Fixed random tokens by name."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._known: dict[object, Ids] = {}

    def __call__(self, name: object, length: int) -> Ids:
        ids = self._known.get(name)
        if ids is None:
            ids = self._known[name] = self._random.integers(10, 2**30, length, dtype=np.int32)
        return ids


def few_shot(rng: random.Random, text: Texts) -> list[list[Ids]]:
    """20 groups of 20 questions after the same 1,000 tokens."""
    return [[text(("shots", g), 1000), text(("q", g, q), 50)] for g in range(20) for q in range(20)]


def tree_of_thought(rng: random.Random, text: Texts) -> list[list[Ids]]:
    """8 problems of 300 tokens; each thought has 5 continuations of 60, 3 deep; all prefixes are asked."""
    prompts: list[list[Ids]] = []

    def grow(parts: list[Ids], name: tuple[int, ...], depth: int) -> None:
        prompts.append(parts)
        for i in range(5 if depth else 0):
            grow([*parts, text((*name, i), 60)], (*name, i), depth - 1)

    for problem in range(8):
        grow([text((problem,), 300)], (problem,), 3)
    return prompts


def agents(rng: random.Random, text: Texts) -> list[list[Ids]]:
    """40 agents: a system prompt of 800 tokens, one of 5 sets of tools of 500, 8 turns of 100, each asked."""
    prompts = []
    for agent in range(40):
        parts = [text("system", 800), text(("tools", agent % 5), 500)]
        for turn in range(8):
            parts = [*parts, text((agent, turn), 100)]
            prompts.append(parts)
    return prompts


def rag(rng: random.Random, text: Texts) -> list[list[Ids]]:
    """300 questions over 3 of 30 documents of 200 tokens, the popular ones more often, in any order."""
    weights = [1 / (rank + 1) for rank in range(30)]
    prompts = []
    for question in range(300):
        chosen: list[int] = []
        while len(chosen) < 3:
            document = rng.choices(range(30), weights)[0]
            if document not in chosen:
                chosen.append(document)
        prompts.append(
            [text("system", 100), *(text(("doc", d), 200) for d in chosen), text(("question", question), 30)]
        )
    return prompts


BATCHES: dict[str, Callable[[random.Random, Texts], list[list[Ids]]]] = {
    "few-shot": few_shot, "tree of thought": tree_of_thought, "agents": agents, "rag, permuted": rag,
}  # fmt: skip


def batch_hits(pools: tuple[float, ...]) -> list[dict[str, Any]]:
    """Hit ratios of batches whose requests all wait when the first step is planned."""
    results = []
    for name, make in BATCHES.items():
        rng = random.Random(1)
        prompts = [np.concatenate(parts) for parts in make(rng, Texts(1))]
        rng.shuffle(prompts)
        total, distinct = sum(map(len, prompts)), distinct_tokens(prompts)
        best = 1 - distinct / total
        for share in pools:
            row: dict[str, Any] = {"batch": name, "requests": len(prompts), "pool": share, "optimum": best}
            longest = max(map(len, prompts)) + 16
            slots = max(int(share * distinct), 2 * longest)
            for policy in POLICIES:
                world = Virtual(
                    slots, longest, CPU, schedule_policy=policy, max_running_requests=ROWS,
                    max_queued_requests=1_000_000,
                )  # fmt: skip
                served = [Served(ids.tobytes(), 8) for ids in prompts]
                world.run(served)
                row[policy] = sum(s.matched for s in served) / total
            row["share of the optimum"] = max(row[policy] for policy in POLICIES) / best
            results.append(row)
            print_row(row)
    return results


def trace_hits(folder: Path, pools: tuple[float, ...]) -> list[dict[str, Any]]:
    """Hit ratios of recorded arrivals, 16 tokens a block, lengths and time scaled down alike."""
    results = []
    for name in ("mooncake_conversation_first2000.jsonl", "mooncake_synthetic_first1000.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        text = Texts(2)
        prompts, times, outputs = [], [], []
        for number, line in enumerate(lines):
            ids = np.concatenate([text(block, 16) for block in line["hash_ids"]])
            length = max(1, min(len(ids), line["input_length"] // 32))
            # What is not a whole block is the request's own.
            own = text(("own", number), 16)[: length % 16]
            prompts.append(np.concatenate([ids[: length - length % 16], own]).astype(np.int32))
            times.append(line["timestamp"] / 1000)
            outputs.append(max(1, line["output_length"] // 32))
        total, distinct = sum(map(len, prompts)), distinct_tokens(prompts)
        longest = max(map(len, prompts)) + max(outputs) + 16
        for share in pools:
            slots = max(int(share * distinct), 2 * longest)
            row: dict[str, Any] = {
                "trace": name, "requests": len(prompts), "pool": share,
                "belady": belady(prompts, slots) / total, "blocks of 16": blocks(prompts, slots, 16) / total,
            }  # fmt: skip
            for policy, eviction in (
                *((policy, "lru") for policy in POLICIES),
                ("lpm", "lfu"),
                ("lpm", "slru"),
            ):
                world = Virtual(
                    slots, longest, GPU, schedule_policy=policy, max_running_requests=ROWS,
                    max_queued_requests=1_000_000, radix_eviction_policy=eviction,
                )  # fmt: skip
                served = [
                    Served(p.tobytes(), out, at) for p, at, out in zip(prompts, times, outputs, strict=True)
                ]
                world.run(served)
                found = sum(s.matched for s in served) / total
                row[policy if eviction == "lru" else f"{policy}, {eviction}"] = found
            results.append(row)
            print_row(row)
    return results


def starvation(seed: int, cost: Cost, load: float) -> dict[str, Any]:
    """Time to the first token of cold requests (1,000 tokens of their own) among hot ones (1,000 shared and
    30 of their own). They come at `load` times the rate at which a queue of them is served by `fcfs`."""
    rng, text = random.Random(seed), Texts(seed)
    kinds = [rng.random() < 0.05 for _ in range(2000)]
    gaps = [rng.expovariate(1.0) for _ in kinds]

    def request(i: int, arrives: float) -> Served:
        parts = [text(("cold", i), 1000)] if kinds[i] else [text("hot", 1000), text(("q", i), 30)]
        return Served(np.concatenate(parts).tobytes(), 16, arrives)

    def world(policy: str, share: float = SHARE) -> Virtual:
        made = Virtual(
            40_000, 1100, cost, schedule_policy=policy, max_running_requests=ROWS, max_queued_requests=10_000
        )
        state = made.state
        state.queue = Queue(state.tree, state.config, state.budget, state.outputs, share)
        return made

    pace = world("fcfs").run([request(i, 0.0) for i in range(500)]) / 500 / load
    arrivals = np.cumsum(gaps) * pace
    results: dict[str, Any] = {"load": load}
    for label, policy, bound in (("fcfs", "fcfs", SHARE), ("lpm", "lpm", SHARE), ("unbounded", "lpm", 1e9)):
        served = [request(i, float(at)) for i, at in enumerate(arrivals)]
        seconds = world(policy, bound).run(served)
        cold = [s for s, kind in zip(served, kinds, strict=True) if kind]
        hot = [s for s, kind in zip(served, kinds, strict=True) if not kind]
        results[label] = {
            "cold p50": quantile(cold, 0.5),
            "cold p99": quantile(cold, 0.99),
            "hot p99": quantile(hot, 0.99),
            "tokens/s": sum(s.tokens + s.max_tokens for s in served) / seconds,
        }
    results["cold p99, lpm/fcfs"] = results["lpm"]["cold p99"] / results["fcfs"]["cold p99"]
    results["tokens/s, lpm/unbounded"] = results["lpm"]["tokens/s"] / results["unbounded"]["tokens/s"]
    return results


def fairness(seed: int, cost: Cost, load: float) -> dict[str, Any]:
    """Latency (first token, and whole) of nine tenants that together bring `load` of what can be served,
    alone and beside one that brings ten times as much."""
    results: dict[str, Any] = {"load of the nine": load}
    # A request of 200 + 32 tokens in a batch of half of the rows.
    each = cost.of(200, 0) + 32 * cost.of(0, ROWS // 2) / (ROWS // 2)
    for label, policy, flooded in (
        ("alone", "fair", False), ("fair", "fair", True), ("lpm", "lpm", True), ("fcfs", "fcfs", True),
    ):  # fmt: skip
        rng, text = random.Random(seed), Texts(seed)
        theirs = poisson(rng, text, "t", 9, load / each, 600)
        flood = poisson(rng, text, "flood", 1, 10 * load / each, 6000) if flooded else []
        world = Virtual(
            60_000, 300, cost, schedule_policy=policy, max_running_requests=ROWS, max_queued_requests=100_000
        )
        world.run([*theirs, *flood], until=max(s.arrives for s in theirs) + 60)
        results[label] = {
            "first p99": quantile(theirs, 0.99),
            "whole p50": quantile(theirs, 0.5, whole=True),
            "whole p99": quantile(theirs, 0.99, whole=True),
            "retracted": world.state.counters.retracted,
        }
    for what in ("first p99", "whole p99"):
        results[f"{what}, fair/alone"] = results["fair"][what] / results["alone"][what]
    return results


def poisson(
    rng: random.Random, text: Texts, name: str, tenants: int, rate: float, count: int
) -> list[Served]:
    """`count` requests of `tenants` tenants, `rate` a second in all."""
    served, now = [], 0.0
    for i in range(count):
        now += rng.expovariate(rate)
        tenant = f"{name}{rng.randrange(tenants)}"
        ids = np.concatenate([text((tenant, "system"), 100), text((tenant, i), 100)])
        served.append(Served(ids.tobytes(), 32, now, tenant, Scheduling(tenant=tenant)))
    return served


def quantile(served: list[Served], q: float, whole: bool = False) -> float:
    """Of the seconds from arrival to the first token, or to the end; what never came counts as for ever."""
    times = [(s.done if whole else s.first) for s in served]
    waits = [t - s.arrives if t >= 0 else float("inf") for t, s in zip(times, served, strict=True)]
    return float(np.quantile(waits, q, method="higher"))


def print_row(row: dict[str, Any]) -> None:
    print(
        "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["hits", "starvation", "fairness"])
    parser.add_argument("--traces", type=Path, help="the folder of the Mooncake traces")
    parser.add_argument("--pool", type=float, nargs="+", default=POOLS, help="share of the distinct tokens")
    parser.add_argument("--load", type=float, default=0.2, help="of the nine tenants, as share of capacity")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: Any
    if args.what == "hits":
        results = batch_hits(tuple(args.pool))
        if args.traces is not None:
            results += trace_hits(args.traces, tuple(args.pool))
    elif args.what == "starvation":
        loads = (0.8, 1.0, 1.5)
        results = {
            name: [starvation(1, cost, load) for load in loads] for name, cost in (("cpu", CPU), ("gpu", GPU))
        }
        print(json.dumps(results, indent=1))
    else:
        results = {name: fairness(1, cost, args.load) for name, cost in (("cpu", CPU), ("gpu", GPU))}
        print(json.dumps(results, indent=1))
    if args.json:
        args.json.write_text(json.dumps({args.what: results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
