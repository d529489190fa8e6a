"""GGUF block formats, dequantised to float32 or straight into a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import DTYPE_CODES, expect
from sapwood.kernels.ops.gemm import PackedWeight, pack_reference

KINDS = {"f32": (0, 1, 4), "f16": (1, 1, 2), "q8_0": (2, 32, 34), "q4_0": (3, 32, 18), "q4_1": (4, 32, 20)}
"""Format → (code for C++, weights in a block, bytes of a block)."""


def row_bytes(kind: str, k: int) -> int:
    """Bytes of one row of k weights; ValueError if the format is unknown or k is not whole blocks."""
    if kind not in KINDS:
        raise ValueError(f"unknown block format {kind!r}; known are {', '.join(KINDS)}")
    _code, weights, size = KINDS[kind]
    if k < 1 or k % weights:
        raise ValueError(f"a row of {k} weights is not made of whole {kind} blocks of {weights}")
    return k // weights * size


def dequantise(blocks: Tensor, kind: str, n: int, k: int) -> Tensor:
    """float32 [n, k] from `blocks`: uint8, contiguous, `n * row_bytes(kind, k)` of them in any shape.

    Equals the reference implementation of GGUF bit for bit.
    """
    _expect_blocks(blocks, kind, n, k)
    out = torch.empty((n, k), dtype=torch.float32)
    kernels().dequantise(blocks.data_ptr(), KINDS[kind][0], n, k, out.data_ptr())
    return out


def pack_quantised(blocks: Tensor, kind: str, n: int, k: int, dtype: torch.dtype) -> PackedWeight:
    """`pack(dequantise(...), dtype)` in one pass, without the float32 copy between."""
    _expect_blocks(blocks, kind, n, k)
    packed = PackedWeight(n, k, dtype)
    kernels().pack(blocks.data_ptr(), KINDS[kind][0], n, k, packed.data.data_ptr(), DTYPE_CODES[dtype])
    return packed


def pack_quantised_reference(blocks: Tensor, kind: str, n: int, k: int, dtype: torch.dtype) -> PackedWeight:
    return pack_reference(dequantise_reference(blocks, kind, n, k), dtype)


def dequantise_reference(blocks: Tensor, kind: str, n: int, k: int) -> Tensor:
    _expect_blocks(blocks, kind, n, k)
    rows = blocks.reshape(n * k // KINDS[kind][1], KINDS[kind][2])
    if kind == "f32":
        return rows.view(torch.float32).reshape(n, k).clone()
    if kind == "f16":
        return rows.view(torch.float16).reshape(n, k).float()
    scale = rows[:, :2].contiguous().view(torch.float16).float()
    if kind == "q8_0":
        return (scale * rows[:, 2:].contiguous().view(torch.int8).float()).reshape(n, k)
    codes = torch.cat([rows[:, -16:] & 15, rows[:, -16:] >> 4], dim=1).float()
    if kind == "q4_0":
        return (scale * (codes - 8.0)).reshape(n, k)
    low = rows[:, 2:4].contiguous().view(torch.float16).float()
    return (scale * codes + low).reshape(n, k)


def _expect_blocks(blocks: Tensor, kind: str, n: int, k: int) -> None:
    flat = blocks.view(-1) if blocks.is_contiguous() else blocks
    expect(f"{kind} blocks of a [{n}, {k}] weight", flat, torch.uint8, n * row_bytes(kind, k))
