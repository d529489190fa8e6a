"""Checks that stand between a tensor and C++, which sees addresses only."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.float16: 1}
"""How C++ is told a storage type."""


def expect(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless `tensor` is a contiguous CPU tensor of this type and shape (-1: any size)."""
    if tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu:
        have = tensor.shape
        if have == shape or (
            len(have) == len(shape) and all(s in (-1, h) for s, h in zip(shape, have, strict=True))
        ):
            return
    raise ValueError(f"{name} must be a contiguous CPU tensor of {dtype} {list(shape)}, got {_told(tensor)}")


def expect_rows(name: str, tensor: Tensor, rows: int, columns: int) -> int:
    """Raise ValueError unless `tensor` is float32 [rows, columns] with dense rows; return their stride."""
    if tensor.dtype is torch.float32 and tensor.is_cpu and tensor.shape == (rows, columns):
        row_stride, column_stride = tensor.stride()
        if (column_stride == 1 or columns == 1) and (row_stride >= columns or rows <= 1):
            return row_stride
    raise ValueError(
        f"{name} must be a CPU tensor of torch.float32 [{rows}, {columns}] with dense rows, "
        f"got {_told(tensor)}"
    )


def _told(tensor: Tensor) -> str:
    return f"{tensor.device.type} {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
