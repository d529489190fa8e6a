"""CPU kernels: linear layers against torch's, attention, and sampling, on this machine.

    python -m bench.kernels [--isa auto] [--threads N] [--json FILE]

Every number is the best of several runs. `ratio` is torch's time over ours in the same process: above 1, ours
is faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from sapwood.kernels import native
from sapwood.kernels.ops.attention import attend
from sapwood.kernels.ops.gemm import linear, pack
from sapwood.kernels.ops.sampling import sample

SHAPES = ((1536, 576), (576, 1536), (49152, 576))
BATCHES = (1, 4, 16, 32, 64, 256, 1024)
HEADS = (9, 3, 64)
CALLS = ((1, 128, 1), (1, 1024, 1), (32, 128, 1), (32, 1024, 1), (1, 1024, 256), (1, 256, 256))
"""Rows, positions and new tokens of a call of attention."""


def best(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run of `work`, tried for about `seconds`."""
    work()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def bench_linear(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for n, k in SHAPES:
        weight = torch.randn(n, k) / k**0.5
        packed = {dtype: pack(weight, dtype) for dtype in (torch.float32, torch.float16)}
        for m in BATCHES:
            if n * m > 49152 * 64:
                continue
            x, out = torch.randn(m, k), torch.empty(m, n)
            theirs = best(lambda x=x, w=weight: torch.nn.functional.linear(x, w), seconds)
            for dtype, w in packed.items():
                ours = best(lambda x=x, w=w, out=out: linear(x, w, out), seconds)
                rows.append(
                    {
                        "op": f"linear [{n}, {k}] {str(dtype).removeprefix('torch.')}",
                        "size": f"m={m}",
                        "us": ours * 1e6,
                        "gflops": 2 * m * n * k / ours / 1e9,
                        "gbytes": w.nbytes / ours / 1e9,
                        "ratio": theirs / ours,
                    }
                )
    return rows


def bench_attention(seconds: float) -> list[dict[str, Any]]:
    rows = []
    hq, hkv, d = HEADS
    for dtype in (torch.float32, torch.float16):
        for r, context, count in CALLS:
            pool = torch.randn(2, r * context, hkv, d).to(dtype)
            table = torch.arange(r * context, dtype=torch.int32).view(r, context)
            columns = (
                torch.arange(r).int(),
                torch.full((r,), context - count).int(),
                torch.full((r,), count).int(),
            )
            qkv, out = torch.randn(r * count, (hq + 2 * hkv) * d), torch.empty(r * count, hq * d)
            took = best(
                lambda a=(qkv, pool[0], pool[1], table, *columns), out=out: attend(
                    *a, hq, hkv, d, d**-0.5, out
                ),
                seconds,
            )
            seen = r * count * (context - (count - 1) / 2)
            rows.append(
                {
                    "op": f"attention {str(dtype).removeprefix('torch.')}",
                    "size": f"rows={r} ctx={context} new={count}",
                    "us": took * 1e6,
                    "gflops": 4 * seen * hq * d / took / 1e9,
                    "gbytes": pool.numel() * pool.element_size() / took / 1e9,
                }
            )
    return rows


def bench_sample(seconds: float) -> list[dict[str, Any]]:
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
    columns = (("us", 10, 1), ("gflops", 10, 1), ("gbytes", 8, 1), ("ratio", 8, 2))
    cells = (f"{row[key]:{width}.{digits}f}" if key in row else " " * width for key, width, digits in columns)
    return f"{row['op']:<32}{row['size']:<28}{''.join(cells)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=native.usable_cores())
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
    print(f"{'op':<32}{'size':<28}{'us':>10}{'GFLOP/s':>10}{'GB/s':>8}{'ratio':>8}")
    rows: list[dict[str, Any]] = []
    for group in (bench_linear, bench_attention, bench_sample):
        if args.only not in group.__name__:
            continue
        for row in group(args.seconds):
            rows.append(row)
            print(shown(row))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"facts": facts, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
