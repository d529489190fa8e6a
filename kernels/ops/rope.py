"""Rotary positions (half-rotated, as in NeoX and Hugging Face Llama), with the write to the KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
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
    heads = qkv.view(qkv.shape[0], hq + 2 * hkv, d)
    cos, sin = table[positions.long()][:, None, :].chunk(2, dim=-1)
    rotated = heads[:, : hq + hkv, : table.shape[-1]]
    low, high = (part.clone() for part in rotated.chunk(2, dim=-1))
    rotated.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
    k_pool[slots.long()] = heads[:, hq : hq + hkv].to(k_pool.dtype)
    v_pool[slots.long()] = heads[:, hq + hkv :].to(v_pool.dtype)


def _outside(position: int, slot: int, table: Tensor, pool: Tensor) -> str:
    return (
        f"position {position} must be from 0 to {table.shape[0] - 1} "
        f"and slot {slot} from 0 to {pool.shape[0] - 1}"
    )
