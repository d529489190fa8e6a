"""Random weights from a config alone, the same in every process: for tests and for measuring."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sapwood.kernels.ops.gemm import PackedWeight, pack
from sapwood.srt.models.spec import DecoderSpec, tensor_shapes


class DummyReader:
    """Matrices keep the scale of their input; norms are ones; each tensor is seeded by its name."""

    place = "dummy weights"

    def __init__(self, spec: DecoderSpec) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = tensor_shapes(spec)

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)

    def pack(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        return pack(torch.cat([self.read(name) for name in names]), dtype)
