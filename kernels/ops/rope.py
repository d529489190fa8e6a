"""Rotary positions (half-rotated, as in NeoX and Hugging Face Llama), with the write to the KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.dense import FP8, LARGEST_FP8
from sapwood.kernels.ops.expect import DTYPE_CODES, expect


def rope_table(inv_freq: Tensor, max_len: int, scaling: float = 1.0) -> Tensor:
    """float32 [max_len, r]: for each position the r / 2 cosines, then the r / 2 sines, times `scaling`.

    inv_freq float32 [r / 2]. Angles and functions are float32, as Hugging Face computes them.
    """
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq.float()[None, :]
    return torch.cat([angles.cos() * scaling, angles.sin() * scaling], dim=1).contiguous()


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    hq: int,
    hkv: int,
    d: int,
    k_pool: Tensor,
    v_pool: Tensor,
) -> None:
    """Rotate q and k of each token in place, then round its K and V to the pool's type and store them.

    qkv float32 [m, (hq + 2 hkv) d]; positions and slots int32 [m]; table [max_len, r] from `rope_table`: the
    first r of each head's d channels turn; k_pool and v_pool float32 or float16 [slots, hkv, d]. Raises
    IndexError, with nothing written, for a position outside the table or a slot outside the pool.
    """
    m = positions.shape[0]
    expect("qkv", qkv, torch.float32, m, (hq + 2 * hkv) * d)
    expect("positions", positions, torch.int32, m)
    expect("slots", slots, torch.int32, m)
    max_len, num_slots, dtype = table.shape[0], k_pool.shape[0], k_pool.dtype
    rotary = table.shape[-1]
    expect("table", table, torch.float32, max_len, rotary)
    if rotary % 2 or rotary > d:
        raise ValueError(f"the table turns {rotary} channels; an even number up to the head's {d} is needed")
    expect("k_pool", k_pool, dtype, num_slots, hkv, d)
    expect("v_pool", v_pool, dtype, num_slots, hkv, d)
    wrong = kernels().rope_store(
        qkv.data_ptr(), m, positions.data_ptr(), slots.data_ptr(), table.data_ptr(), max_len,
        hq, hkv, d, rotary, k_pool.data_ptr(), v_pool.data_ptr(), DTYPE_CODES[dtype], num_slots,
    )  # fmt: skip
    if wrong >= 0:
        raise IndexError(_outside(int(positions[wrong]), int(slots[wrong]), table, k_pool))


def rope_store_reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    hq: int,
    hkv: int,
    d: int,
    k_pool: Tensor,
    v_pool: Tensor,
) -> None:
    for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
        if not (0 <= position < table.shape[0] and 0 <= slot < k_pool.shape[0]):
            raise IndexError(_outside(position, slot, table, k_pool))
    rope_reference(qkv, positions, table, hq, hkv, d)
    store_kv(qkv, slots, hq, hkv, d, k_pool, v_pool)


def rope_reference(qkv: Tensor, positions: Tensor, table: Tensor, hq: int, hkv: int, d: int) -> None:
    """Rotate q and k of each token in place, on any device and of any type: float32 inside, rounded once.

    qkv, positions and table as in `rope_store`; positions are not checked.
    """
    heads = qkv.view(qkv.shape[0], hq + 2 * hkv, d)
    cos, sin = table.index_select(0, positions)[:, None, :].chunk(2, dim=-1)
    rotated = heads[:, : hq + hkv, : table.shape[-1]]
    low, high = rotated.to(torch.promote_types(qkv.dtype, torch.float32)).chunk(2, dim=-1)
    rotated.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))


def store_kv(qkv: Tensor, slots: Tensor, hq: int, hkv: int, d: int, k_pool: Tensor, v_pool: Tensor) -> None:
    """Round K and V of each token to the pool's type and store them, on any device and of any type.

    qkv and slots as in `rope_store`; pools of any floats [slots, hkv, d]: what is beyond the range of
    float8_e4m3fn becomes its end. Slots are not checked.
    """
    heads, index = qkv.view(qkv.shape[0], hq + 2 * hkv, d), slots.long()
    for pool, values in ((k_pool, heads[:, hq : hq + hkv]), (v_pool, heads[:, hq + hkv :])):
        if pool.dtype is FP8:
            pool.view(torch.uint8)[index] = saturated_fp8(values).view(torch.uint8)
        else:
            pool[index] = values.to(pool.dtype)


def saturated_fp8(values: Tensor) -> Tensor:
    """Values of any floats in float8_e4m3fn, those beyond its range at its end (some torch make them NaN)."""
    return values.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def _outside(position: int, slot: int, table: Tensor, pool: Tensor) -> str:
    return (
        f"position {position} must be from 0 to {table.shape[0] - 1} "
        f"and slot {slot} from 0 to {pool.shape[0] - 1}"
    )
