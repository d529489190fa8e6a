"""Random weights from a config alone, the same in every process on a device of a kind: for tests and for
measuring."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from sapwood.srt.loader.packing import Matrix
from sapwood.srt.models.spec import DecoderSpec, tensor_shapes

ROWS = 64
"""Rows that are drawn together, so that a large matrix can be made in pieces."""


class DummyReader:
    """Matrices keep the scale of their input; norms are ones; each tensor is seeded by its name.

    Matrices are drawn on `device`, where a large model takes seconds, and stay there.
    """

    place = "dummy weights"

    def __init__(self, spec: DecoderSpec, device: torch.device | None = None) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = tensor_shapes(spec)
        self._device = device or torch.device("cpu")

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(shape)
        return self._rows(name, 0, shape[0]).cpu()

    def kind(self, name: str) -> str:
        return "random"

    def matrix(self, name: str) -> Matrix:
        n, k = self.shapes[name]
        return Matrix(name, n, k, self.kind(name), "float32", functools.partial(self._rows, name))

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Whole blocks are drawn, of which the ends are cut."""
        shape, first = self.shapes[name], begin // ROWS
        blocks = []
        for index in range(first, -(-end // ROWS)):
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{name}:{index}".encode()))
            size = (min(ROWS, shape[0] - index * ROWS), *shape[1:])
            drawn = torch.randn(size, generator=generator, device=self._device)
            blocks.append(drawn.mul_(shape[-1] ** -0.5))
        return torch.cat(blocks)[begin - first * ROWS : end - first * ROWS].contiguous()
