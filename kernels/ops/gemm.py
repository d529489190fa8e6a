"""Linear layers over packed weights, exact in the rows: a row's result is the same in any batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import expect, expect_rows

PANEL = 16
"""Output channels that lie side by side in a packed weight."""


@dataclass(frozen=True, slots=True)
class Format:
    """A storage of packed weights: its code for C++ and, if it is quantised, codes of `bits` in groups of
    `group` inputs, with scales (and `lows`, if any) of the type `scale`: a weight is scale * code + low."""

    code: int
    dtype: torch.dtype | None = None
    bits: int = 0
    group: int = 1
    scale: torch.dtype = torch.float16
    lows: bool = False

    def panel_bytes(self, k: int) -> int:
        """Bytes of 16 output channels of k inputs; csrc/formats.hpp says how they lie."""
        if self.dtype is not None:
            return PANEL * k * self.dtype.itemsize
        groups = -(-k // self.group)
        scales = -(-groups * PANEL * self.scale.itemsize // 64) * 64
        return scales * (2 if self.lows else 1) + groups * PANEL * self.group * self.bits // 8


FORMATS = {
    "float32": Format(0, torch.float32),
    "float16": Format(1, torch.float16),
    "q8": Format(2, None, 8, 32),
    "q4": Format(3, None, 4, 32, lows=True),
    "q8w": Format(4, None, 8, 16, torch.float32, lows=True),
    "q4w": Format(5, None, 4, 32, torch.float32, lows=True),
}
"""q8 holds GGUF's Q8_0, q4 its Q4_0 and Q4_1; the wide ones hold every K-quant."""


class PackedWeight:
    """A weight [n, k] in panels of 16 output channels; `data` is uint8 [ceil(n / 16), bytes of a panel].

    float32 and float16 are storage, all arithmetic is float32; what quantised formats are multiplied with is
    rounded to integers too (see `linear`).
    """

    __slots__ = ("data", "format", "k", "n")

    def __init__(self, n: int, k: int, format: str, data: Tensor | None = None) -> None:
        if format not in FORMATS:
            raise ValueError(f"a packed weight is one of {', '.join(FORMATS)}, not {format}")
        if n < 1 or k < 1:
            raise ValueError(f"a packed weight needs at least one row and column, got [{n}, {k}]")
        self.n, self.k, self.format = n, k, format
        shape = (-(-n // PANEL), FORMATS[format].panel_bytes(k))
        if data is not None:
            expect("data", data, torch.uint8, *shape)
        self.data = torch.empty(shape, dtype=torch.uint8) if data is None else data

    @property
    def code(self) -> int:
        """The format's code for C++."""
        return FORMATS[self.format].code

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def unpack(self) -> Tensor:
        """The weight as float32 [n, k]."""
        out = torch.empty((self.n, self.k))
        embed(torch.arange(self.n, dtype=torch.int32), self, out)
        return out


def pack(weight: Tensor, format: str) -> PackedWeight:
    """Pack `weight` (float32 [n, k]) as "float32" or "float16", which rounds to nearest even."""
    expect("weight", weight, torch.float32, -1, -1)
    if FORMATS[format].dtype is None:
        raise ValueError(f"floats are packed as float32 or float16, not {format}; see pack_codes()")
    packed = PackedWeight(weight.shape[0], weight.shape[1], format)
    kernels().pack(weight.data_ptr(), packed.n, packed.k, packed.data.data_ptr(), packed.code)
    return packed


def pack_reference(weight: Tensor, format: str) -> PackedWeight:
    packed = PackedWeight(weight.shape[0], weight.shape[1], format)
    padded = torch.zeros(packed.data.shape[0] * PANEL, packed.k)
    padded[: packed.n] = weight
    panels = padded.view(-1, PANEL, packed.k).transpose(1, 2).to(FORMATS[format].dtype)
    packed.data.copy_(panels.contiguous().view(torch.uint8).reshape(packed.data.shape))
    return packed


def pack_codes(codes: Tensor, scales: Tensor, lows: Tensor | None, format: str) -> PackedWeight:
    """Pack the weight whose row is `scales * codes + lows`, group by group of `FORMATS[format].group` inputs.

    codes int8 [n, k] (0 to 15 for 4 bits); scales and lows float32 [n, groups], stored in the format's type.
    """
    (n, k), chosen = codes.shape, FORMATS[format]
    groups = -(-k // chosen.group)
    expect("codes", codes, torch.int8, n, k)
    expect("scales", scales, torch.float32, n, groups)
    if (lows is None) == chosen.lows:
        raise ValueError(f"{format} weights have {'' if chosen.lows else 'no '}lows")
    if lows is not None:
        expect("lows", lows, torch.float32, n, groups)
    packed = PackedWeight(n, k, format)
    kernels().pack_codes(
        codes.data_ptr(), scales.data_ptr(), 0 if lows is None else lows.data_ptr(), n, k,
        packed.data.data_ptr(), packed.code,
    )  # fmt: skip
    return packed


def linear(x: Tensor, w: PackedWeight, out: Tensor, accumulate: bool = False) -> None:
    """`out = x @ w.T` or, with `accumulate`, `out += x @ w.T` (the finished sum is added once).

    x float32 [m, k] and out float32 [m, n], dense rows at any stride, not overlapping. With float weights
    each element is one chain of fused multiply-adds over k in order. For a quantised one x is rounded, group
    by group, to integers of 16 bits, whose products are exact and are scaled and added group by group. So a
    row does not depend on m, on other rows or on threads.
    """
    m = x.shape[0]
    x_stride = expect_rows("x", x, m, w.k)
    out_stride = expect_rows("out", out, m, w.n)
    kernels().linear(
        x.data_ptr(), x_stride, m, w.data.data_ptr(), w.code, w.n, w.k,
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
    wrong = kernels().embed(ids.data_ptr(), ids.shape[0], w.data.data_ptr(), w.code, w.n, w.k, out.data_ptr())
    if wrong >= 0:
        raise IndexError(f"token id {int(ids[wrong])} is not from 0 to {w.n - 1}")


def embed_reference(ids: Tensor, w: PackedWeight, out: Tensor) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < w.n:
        raise IndexError(f"a token id is not from 0 to {w.n - 1}")
    out.copy_(w.unpack()[ids.long()])
