"""Time of the prefix cache's operations, in microseconds, in trees of 1k to 100k nodes.

    python -m bench.radix [--json FILE] [--nodes 1000 10000]

Conversations of 32 nodes share their first half in groups of 8; every node holds 16 tokens. The measured
prompt is 4096 tokens long and is cached as 16 chunks of 256. Each number is the median of the repetitions;
`evict` is the time a node, with several hundred evicted in each call, and `evict 64` one call that makes
room for 64 tokens. `insert` is of a new prompt, `insert split` of one that leaves a cached one midway.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool

PROMPT, CHUNK, EDGE, CHAIN, GROUP = 4096, 256, 16, 32, 8
COLUMNS = ("match", "peek", "insert", "insert split", "evict", "evict 64", "allocate 64", "free 64")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    print(f"{'nodes':>8} " + " ".join(f"{name:>12}" for name in COLUMNS) + "   (µs)")
    results = []
    for nodes in args.nodes:
        row = measure(nodes, args.repeat)
        results.append(row)
        print(f"{row['nodes']:>8} " + " ".join(f"{row[name]:>12.2f}" for name in COLUMNS), flush=True)
    if args.json:
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        }
        args.json.write_text(
            json.dumps({"versions": versions, "unit": "microseconds", "results": results}, indent=1)
        )


def measure(nodes: int, repeat: int) -> dict[str, Any]:
    """The median time of every operation, in a tree with at least `nodes` nodes."""
    rng = np.random.default_rng(0)
    pool = SlotPool((nodes + 4 * CHAIN) * EDGE + (3 + 2 * repeat) * PROMPT)
    tree = RadixTree(pool)
    grow(tree, pool, nodes, rng)
    prompt = ids_of(rng, PROMPT)
    slots = pool.allocate(PROMPT)
    for end in range(CHUNK, PROMPT + 1, CHUNK):
        tree.insert("", prompt[: 4 * end], slots[:end])
    row: dict[str, Any] = {"nodes": tree.num_nodes}
    request = prompt + ids_of(rng, 1)
    row["match"] = median(repeat, lambda: tree.match("", request, PROMPT))
    row["peek"] = median(repeat, lambda: tree.peek("", request, PROMPT))
    row["insert"] = median_insert(tree, pool, [ids_of(rng, PROMPT) for _ in range(repeat)])
    forks = [prompt[: 4 * at] + ids_of(rng, PROMPT - at) for at in 1 + rng.permutation(PROMPT - 1)[:repeat]]
    row["insert split"] = median_insert(tree, pool, forks)
    taken = [pool.allocate(64) for _ in range(16)]
    row["free 64"] = median(len(taken), lambda: pool.free(taken.pop()))
    row["allocate 64"] = median(repeat, lambda: taken.append(pool.allocate(64)))
    row["evict"], row["evict 64"] = measure_evict(tree)
    tree.check()
    return row


def grow(tree: RadixTree, pool: SlotPool, nodes: int, rng: np.random.Generator) -> None:
    """Fill the tree, chain by chain, to `nodes` nodes; the chunks of neighbours take turns in the pool."""
    while tree.num_nodes < nodes:
        shared = ids_of(rng, CHAIN * EDGE // 2)
        chains = [shared + ids_of(rng, CHAIN * EDGE // 2) for _ in range(GROUP)]
        held: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * GROUP
        for end in range(EDGE, CHAIN * EDGE + 1, EDGE):
            for i, chain in enumerate(chains):
                held[i] = np.concatenate((held[i], pool.allocate(EDGE)))
                tree.insert("", chain[: 4 * end], held[i])
        for i, chain in enumerate(chains):
            own = tree.match("", chain, CHAIN * EDGE).node.path_slots()
            pool.free(held[i][held[i] != own])


def ids_of(rng: np.random.Generator, n: int) -> bytes:
    return rng.integers(0, 128_000, n, dtype=np.int32).tobytes()


def median(repeat: int, call: Callable[[], object]) -> float:
    """Microseconds of the median call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def median_insert(tree: RadixTree, pool: SlotPool, prompts: list[bytes]) -> float:
    """Inserts each prompt whole."""
    work = [(prompt, pool.allocate(PROMPT)) for prompt in prompts]

    def one() -> None:
        prompt, slots = work.pop()
        existing, _ = tree.insert("", prompt, slots)
        duplicates.append(slots[:existing])

    duplicates: list[npt.NDArray[np.int32]] = []
    result = median(len(work), one)
    pool.free(np.concatenate(duplicates))
    return result


def measure_evict(tree: RadixTree) -> tuple[float, float]:
    """Microseconds a node, while half of the tree goes in big calls, and of one small call."""
    single = median(50, lambda: tree.evict(64))
    per_node = []
    goal = tree.num_nodes // 2
    while tree.num_nodes > goal:
        before = tree.num_nodes
        start = time.perf_counter_ns()
        tree.evict(512 * EDGE)
        took = time.perf_counter_ns() - start
        per_node.append(took / max(1, before - tree.num_nodes))
    return statistics.median(per_node) / 1e3, single


if __name__ == "__main__":
    main()
