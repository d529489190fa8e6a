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
    """The rows of these parts one after another, [n, k] of `dtype` on `device`: allocated once, and filled a
    piece at a time from pinned memory, to which what is stored is copied as it is. Pieces may come from the
    device already.

    Raises ModelError, naming the part, for values that float16 cannot hold.
    """
    found = [source.stored(part) for part in parts]
    matrix = torch.empty((sum(part.n for part in found), found[0].k), dtype=dtype, device=device)
    begin = 0
    for part, stored in zip(parts, found, strict=True):
        for piece in stored.pieces:
            place = matrix[begin : begin + len(piece)]
            begin += len(piece)
            sent = piece if piece.device.type == device.type else _pinned(piece)
            if piece.dtype is not dtype:
                sent = sent.to(device, non_blocking=True)  # a copy that converts does so where it comes from
            # torch keeps pinned memory until the copies from it are done.
            place.copy_(sent, non_blocking=True)
            if dtype is torch.float16:  # looked at on the device: the host is slow at it
                _require_held(place if piece.dtype is dtype else sent, part)
    return matrix


def _pinned(piece: Tensor) -> Tensor:
    """Contiguous, so that it goes in one copy."""
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)


def _require_held(rows: Tensor, part: Part) -> None:
    largest = torch.finfo(torch.float16).max
    if not float(rows.abs().max()) <= largest:
        raise ModelError(
            f"{part} holds values beyond {largest:g}, the largest of float16: use --dtype bfloat16"
        )
