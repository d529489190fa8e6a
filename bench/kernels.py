"""CPU kernels: this machine's limits, linear layers against torch's, attention, and sampling.

    python -m bench.kernels [--isa auto] [--threads N] [--json FILE]

Every number is the best of several runs. `ratio` is torch's time over ours in the same process: above 1, ours
is faster. `share` is that of the limit a linear layer is nearest to: reading its weight, or the arithmetic of
its format, both as measured by loops that do nothing else. Attention's is that of reading its K and V.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from sapwood.kernels import machine, native
from sapwood.kernels.native import kernels
from sapwood.kernels.ops.attention import attend
from sapwood.kernels.ops.gemm import FORMATS, PackedWeight, linear, pack, pack_codes
from sapwood.kernels.ops.sampling import sample

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
"""The layers of SmolLM2-135M: outputs, inputs."""
BATCHES = (1, 4, 8, 16, 32, 64, 256, 1024)
LINEAR_FORMATS = ("float32", "float16", "q8", "q4")
COLD = 64 << 20
"""Bytes of copies used in turn: a step finds a layer's weight, K and V in memory, not in a cache."""
LIMITS = {"read": 0, "float multiply-adds": 1, "16-bit dot products": 2, "q4 groups": 3}
"""Loops of csrc/limits.hpp; the last has the conversions and scales of a q4 weight's groups besides."""
HEADS = (9, 3, 64)
CALLS = (
    *((rows, context, 1, 0, False) for rows in (1, 8, 32) for context in (128, 1024, 4096)),
    (32, 1024, 1, 0, True),
    (32, 1024, 1, 896, False),
    (1, 256, 256, 0, False),
    (1, 1024, 256, 0, False),
)
"""Rows, positions and new tokens of a call of attention; positions that all rows share; random slots."""


def best(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run of `work`, tried for about `seconds`."""
    work()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def limit(kind: str, threads: int, seconds: float) -> float:
    """Bytes (of `read`) or operations a second that this machine can do at most."""
    if kind == "read":  # at another place each time: what a call has read is still in cache at the next
        memory, work = torch.ones(128 << 20, dtype=torch.uint8), 4 << 20
        places = cycle(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, work))
    else:
        work = threads * 8 * (64 if kind == "q4 groups" else 4096)
        places = cycle((0,))
    done = kernels().limit(LIMITS[kind], next(places), work)
    return float(done / best(lambda: kernels().limit(LIMITS[kind], next(places), work), seconds))


def bench_limits(seconds: float, threads: int) -> list[dict[str, Any]]:
    unit = {"read": "gbytes"}
    return [
        {"op": f"limit: {kind}", "size": f"threads={threads}", unit.get(kind, "gflops"): value / 1e9}
        for kind in LIMITS
        for value in [limit(kind, threads, seconds)]
    ]


def random_weight(n: int, k: int, format: str) -> PackedWeight:
    chosen = FORMATS[format]
    if chosen.dtype is not None:
        return pack(torch.randn(n, k) / k**0.5, format)
    codes = torch.randint(0, 2**chosen.bits, (n, k)).to(torch.int8)
    scales = torch.rand(n, -(-k // chosen.group)) / 2**chosen.bits / k**0.5
    return pack_codes(codes, scales, -scales if chosen.lows else None, format)


def linear_row(name: str, w: PackedWeight, m: int, theirs: float, seconds: float) -> dict[str, Any]:
    x, out = torch.randn(m, w.k), torch.empty(m, w.n)
    copies = min(-(-COLD // w.nbytes), 64) if m <= 16 else 1
    weights = cycle([w] + [PackedWeight(w.n, w.k, w.format, w.data.clone()) for _ in range(copies - 1)])
    ours = best(lambda: linear(x, next(weights), out), seconds)
    return {
        "op": f"{name} [{w.n}, {w.k}] {w.format}",
        "size": f"m={m}",
        "us": ours * 1e6,
        "gflops": 2 * m * w.n * w.k / ours / 1e9,
        "gbytes": w.nbytes / ours / 1e9,
        "ratio": theirs / ours,
        "arithmetic": "float multiply-adds" if FORMATS[w.format].dtype else "q4 groups",
    }


def bench_linear(seconds: float, threads: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    limits = dict.fromkeys(LIMITS, 0.0)  # the best of many times: other processes only ever lower them
    for name, (n, k) in SHAPES.items():
        plain = torch.randn(n, k)
        limits = {kind: max(limits[kind], limit(kind, threads, seconds)) for kind in LIMITS}
        packed = [random_weight(n, k, format) for format in LINEAR_FORMATS]
        for m in BATCHES:
            if n * m > 49152 * 64:
                continue
            x = torch.randn(m, k)
            theirs = best(partial(torch.nn.functional.linear, x, plain), seconds)
            rows += [linear_row(name, w, m, theirs, seconds) for w in packed]
    for row in rows:
        arithmetic = row["gflops"] * 1e9 / limits[row.pop("arithmetic")]
        row["share"] = max(arithmetic, row["gbytes"] * 1e9 / limits["read"])
    return rows


def attention_call(
    dtype: torch.dtype, r: int, context: int, count: int, same: int, scattered: bool
) -> tuple[Callable[[], None], int]:
    """A call of attention, and how many bytes of K and V it has to read."""
    hq, hkv, d = HEADS
    slots = same + r * (context - same)
    pool = torch.randn(2, slots, hkv, d).to(dtype)
    pools = cycle([pool] + [pool.clone() for _ in range(min(COLD // pool.nbytes, 32))])
    order = (torch.randperm(slots) if scattered else torch.arange(slots)).int()
    table = torch.cat([order[:same].expand(r, same), order[same:].view(r, -1)], dim=1).contiguous()
    rows = torch.arange(r, dtype=torch.int32)
    starts, counts = torch.full_like(rows, context - count), torch.full_like(rows, count)
    shared = torch.cat([torch.tensor([0, same, r], dtype=torch.int32), rows]) if same else None
    qkv, out = torch.randn(r * count, (hq + 2 * hkv) * d), torch.empty(r * count, hq * d)

    def call() -> None:
        k, v = next(pools)
        attend(qkv, k, v, table, rows, starts, counts, hq, hkv, d, d**-0.5, out, shared=shared)

    return call, pool.nbytes


def bench_attention(seconds: float, threads: int) -> list[dict[str, Any]]:
    hq, _, d = HEADS
    rows = []
    for dtype in (torch.float32, torch.float16):
        for r, context, count, same, scattered in CALLS:
            call, size = attention_call(dtype, r, context, count, same, scattered)
            took = best(call, seconds)
            seen = r * count * (context - (count - 1) / 2)
            told = f" shared={same}" * (same > 0) + " scattered" * scattered
            row = {
                "op": f"attention {str(dtype).removeprefix('torch.')}",
                "size": f"rows={r} ctx={context} new={count}{told}",
                "us": took * 1e6,
                "gflops": 4 * seen * hq * d / took / 1e9,
                "gbytes": size / took / 1e9,
            }
            if count == 1 and not same:
                row["share"] = size / limit("read", threads, seconds) / took
            rows.append(row)
    return rows


def bench_sample(seconds: float, threads: int) -> list[dict[str, Any]]:
    rows = []
    for n in (1, 32):
        logits = torch.randn(n, 49152) * 3
        integers = [torch.arange(n, dtype=torch.int32) for _ in range(3)]
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("plain", 1.0, 0, 1.0),
            ("top_k 40", 1.0, 40, 1.0),
            ("top_p 0.95", 1.0, 0, 0.95),
        ):
            arguments = (
                logits, integers[0], torch.full((n,), temperature), torch.full((n,), top_k).int(),
                torch.full((n,), top_p), torch.zeros(n), torch.arange(n), integers[1], integers[2],
                torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.int32),
            )  # fmt: skip
            took = best(lambda a=arguments: sample(*a), seconds)
            rows.append({"op": f"sample {name}", "size": f"n={n}", "us": took * 1e6})
    return rows


def shown(row: dict[str, Any]) -> str:
    columns = (("us", 10, 1), ("gflops", 10, 1), ("gbytes", 8, 1), ("ratio", 8, 2), ("share", 8, 2))
    cells = (f"{row[key]:{width}.{digits}f}" if key in row else " " * width for key, width, digits in columns)
    return f"{row['op']:<32}{row['size']:<28}{''.join(cells)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=machine.choose_threads()[0])
    parser.add_argument("--seconds", type=float, default=0.1, help="for each number")
    parser.add_argument("--only", default="", help="only groups whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    facts = {
        "isa": native.load(args.isa, args.threads),
        "threads": args.threads,
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
    }
    print("  ".join(f"{name}={value}" for name, value in facts.items()))
    print(f"{'op':<32}{'size':<28}{'us':>10}{'GFLOP/s':>10}{'GB/s':>8}{'ratio':>8}{'share':>8}")
    rows: list[dict[str, Any]] = []
    for group in (bench_limits, bench_linear, bench_attention, bench_sample):
        if args.only not in group.__name__:
            continue
        for row in group(args.seconds, args.threads):
            rows.append(row)
            print(shown(row))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"facts": facts, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
