"""Dense weights on a device: floats, or 8-bit floats with a scale for each output; and products with them."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
FP8_BLOCK = 16
"""Both dimensions of an 8-bit weight are multiples: the tensor cores' demand."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_PIECE = 2**24
"""Values of a weight rounded to 8 bits at a time."""
_NO_KERNEL = re.compile(r"CUBLAS_STATUS_(NOT_SUPPORTED|INVALID_VALUE)")


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight [n, k], contiguous: `data` in floats, or in float8_e4m3fn, whose row i is multiplied by
    `scale[i]` (float32 [n])."""

    data: Tensor
    scale: Tensor | None = None

    @property
    def n(self) -> int:
        return self.data.shape[0]


def quantise_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [m, k] as float8_e4m3fn [m, k], and the float32 scale [m] of each row: its largest magnitude
    becomes 448. A row of zeros stays one."""
    largest = torch.linalg.vector_norm(rows, math.inf, dim=-1, dtype=torch.float32)
    scale = (largest / LARGEST_FP8).clamp_min(_SMALLEST_SCALE)
    return (rows / scale[:, None]).to(FP8), scale


def fp8_weight(data: Tensor) -> DenseWeight:
    """A weight [n, k] of floats in 8 bits, each output with its own scale.

    Raises ValueError unless n and k are multiples of FP8_BLOCK.
    """
    n, k = data.shape
    if n % FP8_BLOCK or k % FP8_BLOCK:
        raise ValueError(f"8-bit weights have dimensions that are multiples of {FP8_BLOCK}, not {n} x {k}")
    codes = torch.empty_like(data, dtype=FP8, memory_format=torch.contiguous_format)
    scale = torch.empty(n, dtype=torch.float32, device=data.device)
    step = max(1, _PIECE // k)
    for begin in range(0, n, step):
        codes[begin : begin + step], scale[begin : begin + step] = quantise_fp8(data[begin : begin + step])
    return DenseWeight(codes, scale)


def linear_dense(x: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """`out = x @ weight.T`, summed in float32: x [m, k], out [m, n] of x's type or float32.

    Of an 8-bit weight, each row of x is rounded to 8 bits with a scale of its own first (W8A8). On a GPU a
    row's last bits may depend on m, as the library's kernels do; `widens` and `fp8_linear` must have been
    asked there before a graph is captured, and a product with an 8-bit weight run with the same m.
    """
    if not x.shape[0]:
        return
    if weight.scale is not None:
        (fp8_linear(x.device) if x.is_cuda else linear_fp8_reference)(x, weight, out)
    elif x.dtype is out.dtype and (x.is_cuda or x.dtype is torch.float32):
        torch.mm(x, weight.data.t(), out=out)
    elif x.is_cuda and widens(x.device, x.dtype):
        torch.mm(x, weight.data.t(), out_dtype=torch.float32, out=out)
    elif x.is_cuda:
        out.copy_(torch.mm(x, weight.data.t()))
    else:
        linear_dense_reference(x, weight, out)


def linear_dense_reference(x: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """The same on any device, of a weight in floats: float32 inside, rounded once."""
    out.copy_(x.float() @ weight.data.float().t())


class Fp8Linear:
    """The product with an 8-bit weight by torch's kernels: on a GPU of compute capability 8.9 or higher.

    cuBLAS has no kernel that scales by rows for every shape (on Hopper none for few rows and a long k, see
    pytorch/ao issue 4582; on compute capability 12.0 none at all): there the product is scaled after it. A
    shape for which there is none is tried once, and must have been before it is captured in a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._one = torch.ones((), device=device)
        self._unscaled: set[tuple[int, int, int]] = set()

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        rows, scales = quantise_fp8(x)
        shape = (*weight.data.shape, len(x))
        if shape not in self._unscaled:
            if _scaled_by_rows(rows, scales, weight, out):
                return
            self._unscaled.add(shape)
        product = torch._scaled_mm(
            rows, weight.data.t(), scale_a=self._one, scale_b=self._one,
            out_dtype=torch.float32, use_fast_accum=False,
        )  # fmt: skip
        assert weight.scale is not None
        torch.mul(product.mul_(scales[:, None]), weight.scale, out=out)


def _scaled_by_rows(rows: Tensor, scales: Tensor, weight: DenseWeight, out: Tensor) -> bool:
    """False where the library has no kernel for it: then nothing was launched."""
    assert weight.scale is not None
    # bfloat16 is the one type that the row-wise kernels of every torch write. Without fast accumulation:
    # Hopper's 8-bit tensor cores keep 14 bits of a sum.
    direct = {"out": out} if out.dtype is torch.bfloat16 else {}
    try:
        product = torch._scaled_mm(
            rows, weight.data.t(), scale_a=scales[:, None], scale_b=weight.scale[None, :],
            out_dtype=torch.bfloat16, use_fast_accum=False, **direct,
        )  # fmt: skip
    except RuntimeError as e:
        if not _NO_KERNEL.search(str(e)):
            raise
        return False
    if not direct:
        out.copy_(product)
    return True


@functools.cache
def fp8_linear(device: torch.device) -> Fp8Linear:
    """That of a device, of which there is one: what it has found out holds for all weights."""
    return Fp8Linear(device)


def linear_fp8_reference(x: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """The same on any device: products of what the 8 bits stand for, in float32."""
    assert weight.scale is not None
    rows, scales = quantise_fp8(x)
    out.copy_((rows.float() @ weight.data.float().t()) * scales[:, None] * weight.scale)


@functools.cache
def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch.mm there can write its float32 sums as they are, not rounded to `dtype` first.

    Raises torch.OutOfMemoryError where there is no room to find out.
    """
    a = torch.full((16, 64), 1 + 2**-7, dtype=dtype, device=device)
    out = torch.zeros((16, 16), dtype=torch.float32, device=device)
    try:
        torch.mm(a, a[:16].t(), out_dtype=torch.float32, out=out)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return bool((out == 64 * (1 + 2**-7) ** 2).all())
