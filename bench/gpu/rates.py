"""What the device can do at most, by loops that do nothing else: reading, copying, multiplying."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.gpu.here import Here

CALLS = 10
"""Launched in one go, so that a launch costs nothing."""
ROUNDS = 5


def rates(here: Here) -> None:
    """The roofline of decode is reading: the highest of three loops, as a share of anything less would
    flatter. That of prefill is a product of bf16 matrices."""
    _reading(here)
    device = here.place.device
    n = here.sizes.matmul
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    took = _seconds(here, lambda: torch.mm(a, b, out=out))
    here.row(f"matmul: bf16, {n}^3", 2 * n**3 / took / 1e12, "TFLOP/s", roofline="matmul")
    _small_copy(here)


def _reading(here: Here) -> None:
    device, size = here.place.device, here.sizes.copy_bytes
    source = torch.randn(size // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    took = _seconds(here, lambda: target.copy_(source))
    found = {"copy": 2 * source.nbytes / took}
    here.row("copy, bytes read and written", found["copy"] / 1e9, "GB/s")
    found["sum"] = source.nbytes / _seconds(here, lambda: source.view(torch.float32).sum())
    here.row("sum of float32", found["sum"] / 1e9, "GB/s")
    matrix, vector = source.view(-1, 4096), source[:4096]
    found["mv"] = source.nbytes / _seconds(here, lambda: torch.mv(matrix, vector))
    here.row("matrix times vector, bf16", found["mv"] / 1e9, "GB/s")
    best = max(found, key=lambda name: found[name])
    here.row(f"read: the highest of these ({best})", found[best] / 1e9, "GB/s", roofline="read")


def _seconds(here: Here, work: Callable[[], object]) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(ROUNDS):
        work()
        here.place.wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        here.place.wait()
        found.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(found)


def _small_copy(here: Here) -> None:
    host = here.place.accelerator.pinned((1024,), torch.int32)
    target, found = torch.empty(1024, dtype=torch.int32, device=here.place.device), []
    for _ in range(100):
        begin = time.perf_counter()
        target.copy_(host, non_blocking=True)
        here.place.wait()
        found.append(time.perf_counter() - begin)
    here.row("4 KiB from the host, waited for", statistics.median(found) * 1e6, "us")
