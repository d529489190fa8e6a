"""Time of the prefix cache's operations, in microseconds, in trees of 1k to 100k nodes.

    python -m bench.radix [--json FILE] [--nodes 1000 10000] [--sglang FOLDER]

Conversations of 32 nodes share their first half in groups of 8; every node holds 16 tokens. The measured
prompt is 4096 tokens long and is cached as 16 chunks of 256. Each number is the median of the repetitions, in
CPU time (none of this waits, and uses one thread), so that other work on the machine counts for less;
`evict` is the time a node, with several hundred evicted in each call, and `evict 64` one call that makes
room for 64 tokens. `insert` is of a new prompt, `insert split` of one that leaves a cached one midway.

With --sglang, the folder of an unpacked `sglang` wheel (`pip download --no-deps sglang; unzip`), SGLang's
caches go through the same operations in the same run, with the ids as arrays and the slots as tensors, as
they take them: its RadixCache, in Python, and the Rust tree beneath its UnifiedRadixCache, bare of the Python
that SGLang has around that. Their slots are freed for nothing; ours go back to the pool in `evict`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotArray, SlotPool

PROMPT, CHUNK, EDGE, CHAIN, GROUP = 4096, 256, 16, 32, 8
BOTH = ("match", "insert", "insert split", "evict", "evict 64")
OURS = ("peek", "allocate 64", "free 64")
GOALS = {"match": 25.0, "insert": 60.0, "evict": 5.0}

Ids = npt.NDArray[np.int32]


class Cache(Protocol):
    """A prefix cache under test. Keys and slots are in the form that it takes."""

    name: str

    def key(self, ids: Ids) -> Any:
        """The key of token ids."""

    def slots(self, n: int) -> Any:
        """Slots for `n` tokens."""

    def match(self, key: Any) -> int:
        """How many tokens of the prompt are cached; their slots are gathered."""

    def insert(self, key: Any, slots: Any) -> int:
        """Cache a prompt; how many tokens of it were cached already."""

    def evict(self, tokens: int) -> int:
        """Make room for so many tokens; how many nodes went."""

    def free(self, slots: Any) -> None:
        """Give slots back that no node took."""

    def join(self, parts: list[Any]) -> Any:
        """Slots in one."""


class Sapwood:
    """The cache of this package."""

    name = "sapwood"

    def __init__(self, capacity: int) -> None:
        self.pool = SlotPool(capacity)
        self.tree = RadixTree(self.pool)

    def key(self, ids: Ids) -> bytes:
        return ids.tobytes()

    def slots(self, n: int) -> SlotArray:
        return self.pool.allocate(n)

    def match(self, key: bytes) -> int:
        return self.tree.match("", key, len(key) // 4).length

    def insert(self, key: bytes, slots: SlotArray) -> int:
        return self.tree.insert("", key, slots).existing

    def evict(self, tokens: int) -> int:
        before = self.tree.num_nodes
        self.tree.evict(tokens)
        return before - self.tree.num_nodes

    def free(self, slots: SlotArray) -> None:
        self.pool.free(slots)

    def join(self, parts: list[SlotArray]) -> SlotArray:
        return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="an unpacked sglang wheel")
    args = parser.parse_args()
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
    }
    sides: list[Callable[[int], Cache]] = [Sapwood]
    if args.sglang is not None:
        from bench.sglang_radix import RadixCache, TreeCore, load

        versions |= load(args.sglang)
        sides += [RadixCache, TreeCore]
    print(f"{'nodes':>8} {'cache':>12} " + " ".join(f"{name:>12}" for name in BOTH + OURS) + "   (µs)")
    results: list[dict[str, Any]] = []
    for nodes in args.nodes:
        rows = [measure(side, nodes, args.repeat) for side in sides]
        for row in rows:
            _print(row["nodes"], row["cache"], row, "{:>12.2f}")
            if row is not rows[0]:
                row["ratio"] = {name: row[name] / rows[0][name] for name in BOTH}
                _print(row["nodes"], "ratio", row["ratio"], "{:>11.1f}x")
        results += rows
    print("goals: " + ", ".join(f"{name} <= {most:g}" for name, most in GOALS.items()))
    if args.json:
        args.json.write_text(
            json.dumps({"versions": versions, "unit": "microseconds", "results": results}, indent=1) + "\n"
        )


def _print(nodes: int, name: str, values: dict[str, Any], shape: str) -> None:
    cells = [shape.format(values[column]) if column in values else " " * 12 for column in BOTH + OURS]
    print(f"{nodes:>8} {name:>12} " + " ".join(cells), flush=True)


def measure(side: Callable[[int], Cache], nodes: int, repeat: int) -> dict[str, Any]:
    """The median time of every operation, in a tree with at least `nodes` nodes."""
    rng = np.random.default_rng(0)
    cache = side((nodes + 4 * CHAIN) * EDGE + (3 + 2 * repeat) * PROMPT)
    made = grow(cache, nodes, rng)
    prompt = random_ids(rng, PROMPT)
    slots = cache.slots(PROMPT)
    for end in range(CHUNK, PROMPT + 1, CHUNK):
        cache.insert(cache.key(prompt[:end]), slots[:end])
    row: dict[str, Any] = {"nodes": made + PROMPT // CHUNK, "cache": cache.name}
    request = cache.key(np.concatenate((prompt, random_ids(rng, 1))))
    row["match"] = median(repeat, lambda: cache.match(request))
    assert cache.match(request) == PROMPT
    if isinstance(cache, Sapwood):
        tree = cache.tree
        row["peek"] = median(repeat, lambda: tree.peek("", request, PROMPT))
    fresh = [random_ids(rng, PROMPT) for _ in range(repeat)]
    row["insert"] = median_insert(cache, fresh)
    cuts = 1 + rng.permutation(PROMPT - 1)[:repeat]
    forks = [np.concatenate((prompt[:at], random_ids(rng, PROMPT - int(at)))) for at in cuts]
    row["insert split"] = median_insert(cache, forks)
    if isinstance(cache, Sapwood):
        pool = cache.pool
        taken = [pool.allocate(64) for _ in range(16)]
        row["free 64"] = median(len(taken), lambda: pool.free(taken.pop()))
        row["allocate 64"] = median(repeat, lambda: taken.append(pool.allocate(64)))
    row["evict"], row["evict 64"] = measure_evict(cache, made // 2)
    if isinstance(cache, Sapwood):
        cache.tree.check()
    return row


def grow(cache: Cache, nodes: int, rng: np.random.Generator) -> int:
    """Fill the tree, chain by chain, to `nodes` nodes; the chunks of neighbours take turns in the pool."""
    made = 0
    while made < nodes:
        shared = random_ids(rng, CHAIN * EDGE // 2)
        chains = [np.concatenate((shared, random_ids(rng, CHAIN * EDGE // 2))) for _ in range(GROUP)]
        held: list[list[Any]] = [[] for _ in chains]
        for end in range(EDGE, CHAIN * EDGE + 1, EDGE):
            for i, chain in enumerate(chains):
                held[i].append(cache.slots(EDGE))
                existing = cache.insert(cache.key(chain[:end]), cache.join(held[i]))
                made += existing < end
                if existing == end:  # the first chain's are in the tree
                    cache.free(held[i][-1])
    return made


def random_ids(rng: np.random.Generator, n: int) -> Ids:
    return rng.integers(0, 128_000, n, dtype=np.int32)


def median(repeat: int, call: Callable[[], object]) -> float:
    """Microseconds of the median call."""
    times = []
    for _ in range(repeat):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1e3


def median_insert(cache: Cache, prompts: list[Ids]) -> float:
    """Inserts each prompt whole."""
    work = [(cache.key(prompt), cache.slots(PROMPT)) for prompt in prompts]
    duplicates: list[Any] = []

    def one() -> None:
        key, slots = work.pop()
        duplicates.append(slots[: cache.insert(key, slots)])

    result = median(len(work), one)
    cache.free(cache.join(duplicates))
    return result


def measure_evict(cache: Cache, nodes: int) -> tuple[float, float]:
    """Microseconds a node, while `nodes` nodes go in big calls, and of one small call."""
    single = median(50, lambda: cache.evict(64))
    per_node = []
    while nodes > 0:
        start = time.thread_time_ns()
        gone = cache.evict(512 * EDGE)
        per_node.append((time.thread_time_ns() - start) / gone)
        nodes -= gone
    return statistics.median(per_node) / 1e3, single


if __name__ == "__main__":
    main()
