"""FlashInfer's kernels for this model, side by side: what has never run here is compiled at first use."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu.here import Here
from bench.gpu.parts import ATTENTION, CASCADE, FA3, OPS, SINGLE, short
from bench.gpu.place import NotHere, Place
from bench.gpu.shape import FULL
from bench.gpu.watch import die_with_parent
from sapwood.kernels.flashinfer import jit_progress
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.flashinfer import WORKSPACE_BYTES, FlashInferAttention
from sapwood.srt.worker.attention.paged import Paged, indptr_of
from sapwood.srt.worker.kv_pool import KvPool

Call = Callable[[], object]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = 64
"""Positions of each of two rows: a tile, which they may share."""
LOST = {
    "decode": ATTENTION, "prefill, short chunk": ATTENTION, "prefill, long chunk": FA3, "cascade": CASCADE,
    "norms": OPS, "rotation, store": OPS, "gate": OPS, "filters": OPS, SINGLE: SINGLE,
}  # fmt: skip
"""What is done without where one of these fails."""
JOBS = 4
"""Compilers that each of the tests' modules may have at once, as tests are measured meanwhile."""


def kernels(here: Here) -> None:
    """Raises NotHere where FlashInfer is not. Without attention, or with compilers still at work, the process
    must end."""
    begin = time.perf_counter()
    if (flashinfer := here.place.flashinfer()) is None:
        raise NotHere(here.place.plain)
    here.row("import of FlashInfer", time.perf_counter() - begin, "s")
    spec = spec_of(here.sizes.config)
    alone = replace(spec, q_heads=spec.kv_heads)
    calls = _attention(here, flashinfer, spec, BF16)
    calls[SINGLE] = _attention(here, flashinfer, alone, BF16)["decode"]
    _compile(here, flashinfer, _layer(here, flashinfer) | calls)


def attention_kernels(here: Here, kv_dtype: torch.dtype) -> None:
    """Those for a pool of another type, if there is FlashInfer. Raises RuntimeError as `kernels` does."""
    if (flashinfer := here.place.flashinfer()) is not None:
        calls = _attention(here, flashinfer, spec_of(here.sizes.config), kv_dtype)
        if CASCADE in here.place.without:
            del calls["cascade"]
        _compile(here, flashinfer, calls)


def of_the_tests(here: Here) -> None:
    """Those that tests/gpu has beside the model's, as many at once as leave room for the tests: each call has
    a workspace on the device, and each of its modules up to JOBS compilers."""
    flashinfer, calls = here.place.flashinfer(), dict[str, Call]()
    spec = replace(spec_of(here.sizes.config), q_heads=8, kv_heads=2)
    for kv_dtype in (BF16, FP8):
        for head_dim, window in ((128, 0), (64, 0), (256, 0), (128, 16)):
            for q_heads in (2, 8):
                kind = replace(spec, head_dim=head_dim, q_heads=q_heads, windows=(window,))
                made = _attention(here, flashinfer, kind, kv_dtype)
                calls |= {f"{name}, {kv_dtype}, {head_dim}, {window}, {q_heads}": made[name] for name in made}
    _side_by_side(here, flashinfer, calls, max(2, (os.cpu_count() or 2) // JOBS))


def _compile(here: Here, flashinfer: Any, calls: dict[str, Call]) -> None:
    """What is lost of these is done without. Raises RuntimeError where that is attention."""
    lost = _side_by_side(here, flashinfer, calls, len(calls))
    if ATTENTION in lost:
        raise RuntimeError("attention has no kernels")
    here.place.without |= lost


def _side_by_side(here: Here, flashinfer: Any, calls: dict[str, Call], most: int) -> set[str]:
    """What is lost of these, `most` at a time. Raises RuntimeError if not all have ended in the time that
    there is."""
    compiled: dict[str, list[str]] = {}

    def log(line: str) -> None:
        compiled.setdefault(threading.current_thread().name, []).append(line)

    def timed(name: str, work: Call) -> float:
        threading.current_thread().name = name
        start = time.perf_counter()
        work()
        here.place.wait()
        return time.perf_counter() - start

    lost: set[str] = set()
    pool = ThreadPoolExecutor(min(len(calls), most))
    with jit_progress(flashinfer, log, every=1000.0):
        open_ = {pool.submit(timed, name, work): name for name, work in calls.items()}
        try:
            for future in as_completed(open_, timeout=max(here.left, 0.0)):
                name = open_.pop(future)
                lines = [line for line in compiled.get(name, []) if line.startswith("compiled ")]
                lost |= _told(here, name, future, lines)
        except TimeoutError:
            for name in open_.values():
                lost |= _lost(here, name, "not compiled in time")
            raise RuntimeError(f"not compiled in time: {', '.join(open_.values())}") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return lost


def _told(here: Here, name: str, future: Future[float], compiled: list[str]) -> set[str]:
    """What is lost with a call that has ended."""
    if (error := future.exception()) is not None:
        traceback.print_exception(error)
        return _lost(here, name, f"failed: {type(error).__name__}: {short(str(error))}")
    what = f"{name}: {', '.join(compiled) or 'no module compiled'}"
    here.row(what, future.result(), "s", compiled=compiled)
    return set()


def _lost(here: Here, name: str, why: str) -> set[str]:
    lost = {LOST[name]} if name in LOST else set()
    here.row(f"{name}: {why}", None, **({"lost": LOST[name]} if lost else {}))
    return lost


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

    def filters() -> None:
        probs = torch.full((1, 128), 1 / 128, device=device)
        for name, most in (("top_k", torch.ones(1, dtype=torch.int32)), ("top_p", torch.ones(1) / 2)):
            getattr(flashinfer, f"{name}_renorm_probs")(probs, most.to(device), is_deterministic=True)

    return {"norms": norms, "rotation, store": store, "gate": gate, "filters": filters}


def _attention(here: Here, flashinfer: Any, of: DecoderSpec, kv_dtype: torch.dtype) -> dict[str, Call]:
    """Of each kind of step; on Hopper FlashInfer takes another kernel for more than 64 tokens of a row."""
    spec, device = replace(of, layers=1), here.place.device
    pool = KvPool(8 * TOKENS, 1, spec.kv_heads, spec.head_dim, kv_dtype, device)

    def attend(count: int, shared: list[int]) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        attention = FlashInferAttention(flashinfer, spec, pool, BF16, device, workspace, cascade_bytes=1)
        if shared:
            attention.warm_up()
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


if __name__ == "__main__":
    die_with_parent()
    of_the_tests(Here(Place(False, ""), FULL, lambda row: None, until=time.monotonic() + 3600))
