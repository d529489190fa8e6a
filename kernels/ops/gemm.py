"""Linear layers over packed weights, exact in the rows: a row's result is the same in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import DTYPE_CODES, expect, expect_rows

PANEL = 16
"""Output channels that lie side by side in a packed weight."""


class PackedWeight:
    """A weight [n, k] in panels of 16 output channels: `data` is [ceil(n / 16), k, 16], zero-padded.

    `dtype` (float32 or float16) is the storage; all arithmetic is float32.
    """

    __slots__ = ("data", "dtype", "k", "n")

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPE_CODES:
            raise ValueError(f"a packed weight is float32 or float16, not {dtype}")
        if n < 1 or k < 1:
            raise ValueError(f"a packed weight needs at least one row and column, got [{n}, {k}]")
        self.n, self.k, self.dtype = n, k, dtype
        self.data = torch.empty((-(-n // PANEL), k, PANEL), dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def unpack(self) -> Tensor:
        """The weight as float32 [n, k]."""
        return self.data.transpose(1, 2).reshape(-1, self.k)[: self.n].float()


def pack(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    """Pack `weight` (float32 [n, k]); float16 storage rounds to nearest even."""
    expect("weight", weight, torch.float32, -1, -1)
    packed = PackedWeight(weight.shape[0], weight.shape[1], dtype)
    kernels().pack(weight.data_ptr(), 0, packed.n, packed.k, packed.data.data_ptr(), DTYPE_CODES[dtype])
    return packed


def pack_reference(weight: Tensor, dtype: torch.dtype) -> PackedWeight:
    packed = PackedWeight(weight.shape[0], weight.shape[1], dtype)
    padded = torch.zeros(packed.data.shape[0] * PANEL, packed.k)
    padded[: packed.n] = weight
    packed.data.copy_(padded.view(-1, PANEL, packed.k).transpose(1, 2))
    return packed


def linear(x: Tensor, w: PackedWeight, out: Tensor, accumulate: bool = False) -> None:
    """`out = x @ w.T` or, with `accumulate`, `out += x @ w.T` (the finished sum is added once).

    x float32 [m, k] and out float32 [m, n], dense rows at any stride, not overlapping. Each element is one
    chain of fused multiply-adds over k in order, so a row does not depend on m, on other rows or on threads.
    """
    m = x.shape[0]
    x_stride = expect_rows("x", x, m, w.k)
    out_stride = expect_rows("out", out, m, w.n)
    kernels().linear(
        x.data_ptr(), x_stride, m, w.data.data_ptr(), DTYPE_CODES[w.dtype], w.n, w.k,
        out.data_ptr(), out_stride, accumulate,
    )  # fmt: skip


def linear_reference(x: Tensor, w: PackedWeight, out: Tensor, accumulate: bool = False) -> None:
    result = x @ w.unpack().T
    if accumulate:
        out += result
    else:
        out.copy_(result)


def embed(ids: Tensor, w: PackedWeight, out: Tensor) -> None:
    """Write row `ids[i]` of the weight to `out[i]`: ids int32 [m], out float32 [m, k].

    Raises IndexError for an id that is not a row of the weight.
    """
    expect("ids", ids, torch.int32, -1)
    expect("out", out, torch.float32, ids.shape[0], w.k)
    wrong = kernels().embed(
        ids.data_ptr(), ids.shape[0], w.data.data_ptr(), DTYPE_CODES[w.dtype], w.n, w.k, out.data_ptr()
    )
    if wrong >= 0:
        raise IndexError(f"token id {int(ids[wrong])} is not from 0 to {w.n - 1}")


def embed_reference(ids: Tensor, w: PackedWeight, out: Tensor) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < w.n:
        raise IndexError(f"a token id is not from 0 to {w.n - 1}")
    index = ids.long()
    out.copy_(w.data[index // PANEL, :, index % PANEL])
