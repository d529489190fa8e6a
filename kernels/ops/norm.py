"""Root-mean-square norms, of whole rows and of attention heads."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import expect, expect_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`out = x / sqrt(mean(x**2) + eps) * weight` per row: x and out float32 [m, h], weight [h].

    `out` may be `x` itself.
    """
    m, h = x.shape
    x_stride = expect_rows("x", x, m, h)
    out_stride = expect_rows("out", out, m, h)
    expect("weight", weight, torch.float32, h)
    kernels().rms_norm(x.data_ptr(), x_stride, m, 1, h, weight.data_ptr(), eps, out.data_ptr(), out_stride)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """The same on any device, x and out of any type: float32 inside (or float64), rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out.copy_(weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Norm each head in place: x float32 [m, heads, d], a view of rows in which heads follow each other.

    weight float32 [d].
    """
    m, heads, d = x.shape
    expect("weight", weight, torch.float32, d)
    if x.dtype is not torch.float32 or x.stride(2) != 1 or (heads > 1 and x.stride(1) != d):
        raise ValueError(
            f"x must be torch.float32 [m, heads, d] with dense heads, got {x.dtype} strides {x.stride()}"
        )
    kernels().rms_norm(
        x.data_ptr(), x.stride(0), m, heads, d, weight.data_ptr(), eps, x.data_ptr(), x.stride(0)
    )


def head_norm_reference(x: Tensor, weight: Tensor, eps: float) -> None:
    """The same on any device and of any type."""
    rms_norm_reference(x, weight, eps, x)
