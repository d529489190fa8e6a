"""Matrices of a model onto a device, in the type that is computed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood.srt.errors import ModelError
from sapwood.srt.models.weights import Part, WeightSource


def device_matrix(
    source: WeightSource, parts: Sequence[Part], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The rows of these parts one after another, [n, k] of `dtype` on `device`: allocated once, filled from
    pinned memory a piece at a time. Pieces may come from the device already.

    Raises ModelError, naming the part, for values that float16 cannot hold.
    """
    pieces = [_rounded(rows, part, dtype) for part in parts for rows in source.floats([part])]
    shape = (sum(len(piece) for piece in pieces), pieces[0].shape[1])
    matrix = torch.empty(shape, dtype=dtype, device=device)
    begin = 0
    for piece in pieces:
        staged = piece.pin_memory() if device.type == "cuda" and not piece.is_cuda else piece
        # torch keeps pinned memory until the copies from it are done.
        matrix[begin : begin + len(piece)].copy_(staged, non_blocking=True)
        begin += len(piece)
    return matrix


def _rounded(rows: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    if dtype is torch.float16 and not float(rows.abs().max()) <= largest:
        raise ModelError(
            f"{part} holds values beyond {largest:g}, the largest of float16: use --dtype bfloat16"
        )
    return rows.to(dtype)
