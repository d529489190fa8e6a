"""FlashInfer's kernels for this model, side by side: what has never run here is compiled at first use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu.here import Here
from bench.gpu.place import NotHere
from sapwood.kernels.flashinfer import jit_progress
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.registry import spec_of
from sapwood.srt.worker.attention.flashinfer import WORKSPACE_BYTES, FlashInferAttention
from sapwood.srt.worker.attention.paged import Paged, indptr_of
from sapwood.srt.worker.kv_pool import KvPool

Call = Callable[[], object]
BF16 = torch.bfloat16
TOKENS = 64
"""Positions of each of two rows: a tile, which they may share."""


def kernels(here: Here) -> None:
    """Raises NotHere where FlashInfer is not; what does not compile ends the process."""
    begin = time.perf_counter()
    if (flashinfer := here.place.flashinfer()) is None:
        raise NotHere(here.place.plain)
    here.row("import of FlashInfer", time.perf_counter() - begin, "s")
    _side_by_side(here, flashinfer, _layer(here, flashinfer) | _attention(here, flashinfer, BF16))


def attention_kernels(here: Here, kv_dtype: torch.dtype) -> None:
    """Those for a pool of another type, if there is FlashInfer."""
    if (flashinfer := here.place.flashinfer()) is not None:
        _side_by_side(here, flashinfer, _attention(here, flashinfer, kv_dtype))


def _side_by_side(here: Here, flashinfer: Any, calls: dict[str, Call]) -> None:
    compiled: dict[str, list[str]] = {}

    def log(line: str) -> None:
        compiled.setdefault(threading.current_thread().name, []).append(line)

    def timed(name: str, work: Call) -> tuple[str, float]:
        threading.current_thread().name = name
        start = time.perf_counter()
        work()
        here.place.wait()
        return name, time.perf_counter() - start

    with jit_progress(flashinfer, log, every=1000.0), ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(timed, *call) for call in calls.items()]:
            name, took = future.result()
            lines = [line for line in compiled.get(name, []) if line.startswith("compiled ")]
            here.row(f"{name}: {', '.join(lines) or 'was there'}", took, "s", compiled=lines)


def _layer(here: Here, flashinfer: Any) -> dict[str, Call]:
    """One of each kernel of a layer but attention's."""
    spec, device, m = spec_of(here.sizes.config), here.place.device, 2
    ops = DeviceOps(device, BF16, flashinfer)
    scale = ops.vector(torch.ones(spec.hidden))
    table = torch.ones(TOKENS, spec.rotary, device=device)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=BF16, device=device)

    def norms() -> None:
        x, y = zeros(m, spec.hidden), zeros(m, spec.hidden)
        ops.rms_norm(x, scale, 1e-5, y)
        ops.add_rms_norm(x, y, scale, 1e-5, x)

    def store() -> None:
        qkv, places = zeros(m, spec.qkv_width), torch.arange(m, dtype=torch.int32, device=device)
        k, v = (zeros(TOKENS, spec.kv_heads, spec.head_dim) for _ in range(2))
        ops.rope_store(qkv, places, places, table, spec.q_heads, spec.kv_heads, spec.head_dim, k, v)

    def gate() -> None:
        ops.gated_mul(zeros(m, 2 * spec.intermediate), spec.activation, zeros(m, spec.intermediate))

    return {"norms": norms, "rotation, store": store, "gate": gate}


def _attention(here: Here, flashinfer: Any, kv_dtype: torch.dtype) -> dict[str, Call]:
    """Of each kind of step; on Hopper FlashInfer takes another kernel for more than 64 tokens of a row."""
    spec, device = replace(spec_of(here.sizes.config), layers=1), here.place.device
    pool = KvPool(8 * TOKENS, 1, spec.kv_heads, spec.head_dim, kv_dtype, device)

    def attend(count: int, shared: list[int]) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        attention = FlashInferAttention(flashinfer, spec, pool, BF16, device, workspace, cascade_bytes=1)
        attention.plan(_paged(device, count, shared))
        qkv = torch.zeros(2 * count, spec.qkv_width, dtype=BF16, device=device)
        attention.attend(0, qkv, torch.zeros_like(qkv[:, : spec.q_heads * spec.head_dim].contiguous()))

    return {
        "decode": lambda: attend(1, []),
        "prefill, short chunk": lambda: attend(TOKENS // 2, []),
        "prefill, long chunk": lambda: attend(2 * TOKENS, []),
        "cascade": lambda: attend(1, [0, TOKENS, 2, 0, 1]),
    }


def _paged(device: torch.device, count: int, shared: list[int]) -> Paged:
    """Two rows with TOKENS positions before so many new ones."""
    starts, counts = np.full(2, TOKENS, np.int32), np.full(2, count, np.int32)
    kv_indptr = indptr_of(starts + counts)
    length = TOKENS + count
    slots = torch.arange(length, dtype=torch.int32, device=device)
    own = slots + length if not shared else torch.cat([slots[:TOKENS], slots[TOKENS:] + length])
    return Paged(
        starts=starts, counts=counts, qo_indptr=indptr_of(counts), kv_indptr=kv_indptr,
        last_page_len=torch.ones(2, dtype=torch.int32), kv_indices=torch.cat([slots, own]),
        shared=np.array(shared, np.int32),
    )  # fmt: skip
