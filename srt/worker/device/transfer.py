"""Arrays on their way between host and device: many in one copy, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pinned = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Host memory [shape] from and to which is copied without waiting. What is given up while a copy is under way
is not given again before its end: so does torch with pinned memory."""

_ALIGNED = 16
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device, pinned: Pinned) -> dict[str, Tensor]:
    """Each array on the device. The arrays may change at once; the tensors are there for what is launched
    after this on the same stream."""
    sizes = [-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays.values()]
    staging = pinned((max(_ALIGNED, sum(sizes)),), torch.uint8)
    host, at = staging.numpy(), 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += size
    sent, at, result = staging.to(device, non_blocking=True), 0, {}
    for (name, array), size in zip(arrays.items(), sizes, strict=True):
        result[name] = sent[at : at + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        at += size
    return result


class Download:
    """int32, float32 and float64 tensors that go to the host in one copy."""

    def __init__(self, tensors: Sequence[Tensor], pinned: Pinned) -> None:
        """Puts them together, on the stream that they were made on."""
        self._pinned = pinned
        self._parts = [(tensor.shape, tensor.dtype, tensor.nbytes // 4) for tensor in tensors]
        flat = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        self._packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        self._host: Tensor | None = None

    def fetch(self) -> None:
        """Begin the copy, on this stream."""
        self._host = self._pinned(tuple(self._packed.shape), torch.int32)
        self._host.copy_(self._packed, non_blocking=True)

    def read(self) -> list[npt.NDArray[Any]]:
        """The values, once the copy is done."""
        assert self._host is not None, "fetched before it is read"
        at, result = 0, []
        for shape, dtype, size in self._parts:
            part = self._host[at : at + size]
            # A double may lie at an odd place here, where a view of doubles cannot begin.
            part = part.clone() if dtype == torch.float64 else part
            result.append(part.view(dtype).view(shape).numpy())
            at += size
        return result
