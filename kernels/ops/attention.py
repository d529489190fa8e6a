"""Causal attention over KV slots: one algorithm for prefill chunks, decodes and anything between."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import DTYPE_CODES, expect


def attend(
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    hq: int,
    hkv: int,
    d: int,
    scale: float,
    out: Tensor,
    window: int = 0,
    shared: Tensor | None = None,
) -> None:
    """Row i's `counts[i]` new tokens, at positions from `starts[i]`, attend to positions up to their own: to
    all, or with a `window` (positions, Hugging Face's `sliding_window`) to the last that many.

    qkv float32 [m, (hq + 2 hkv) d] with the rows' tokens in order (only the rotated q is read); K and V come
    from the pools (float32 or float16 [slots, hkv, d]), the new tokens' included, where position p of row i
    lies in slot `slot_table[rows[i], p]`. slot_table int32 [max_rows, max_len]; rows, starts, counts int32
    [r]; out float32 [m, hq d]. A token's result depends on its own q and its positions' K and V only:
    never on chunking, other rows, slots' places or threads.

    `shared` (int32) names stretches of positions that several rows have in the same slots, one after
    another: begin, end (multiples of 64), how many rows, and their indices i. Each is read once, to the
    same result. A row's stretches ascend, do not overlap, and end before its new tokens; whether the slots
    are the same is not checked. Raises IndexError for a row, position or slot that does not exist,
    ValueError for a negative window or a stretch that cannot be.
    """
    r = rows.shape[0]
    m = out.shape[0]
    expect("qkv", qkv, torch.float32, m, (hq + 2 * hkv) * d)
    num_slots, dtype = k_pool.shape[0], k_pool.dtype
    max_rows, max_len = slot_table.shape
    expect("k_pool", k_pool, dtype, num_slots, hkv, d)
    expect("v_pool", v_pool, dtype, num_slots, hkv, d)
    expect("slot_table", slot_table, torch.int32, max_rows, max_len)
    expect("rows", rows, torch.int32, r)
    expect("starts", starts, torch.int32, r)
    expect("counts", counts, torch.int32, r)
    expect("out", out, torch.float32, m, hq * d)
    if shared is not None:
        expect("shared", shared, torch.int32, -1)
    if hq % hkv:
        raise ValueError(f"{hq} query heads cannot share {hkv} KV heads evenly")
    if window < 0:
        raise ValueError(f"a window is at least 1 position, or 0 for all, not {window}")
    wrong = kernels().attend(
        qkv.data_ptr(), m, k_pool.data_ptr(), v_pool.data_ptr(), DTYPE_CODES[dtype], num_slots,
        slot_table.data_ptr(), max_rows, max_len,
        rows.data_ptr(), starts.data_ptr(), counts.data_ptr(), r, hq, hkv, d, min(window, max_len), scale,
        out.data_ptr(), 0 if shared is None else shared.data_ptr(), 0 if shared is None else shared.numel(),
    )  # fmt: skip
    if wrong >= 0:
        raise IndexError(f"entry {wrong} of the step names a row, position or slot that does not exist")


def attend_reference(
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    hq: int,
    hkv: int,
    d: int,
    scale: float,
    out: Tensor,
    window: int = 0,
    shared: Tensor | None = None,
) -> None:
    token = 0
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        slots = slot_table[row, : start + count].long()
        k = k_pool[slots].float().repeat_interleave(hq // hkv, dim=1)
        v = v_pool[slots].float().repeat_interleave(hq // hkv, dim=1)
        q = qkv[token : token + count, : hq * d].view(count, hq, d)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        age = torch.arange(start, start + count)[:, None] - torch.arange(start + count)[None, :]
        hidden = (age < 0) | (age >= (window or start + count))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[token : token + count] = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, hq * d)
        token += count
