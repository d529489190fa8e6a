"""The tensors of a GGUF file, from its blocks straight into packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.kernels.ops.gemm import PANEL, PackedWeight, pack
from sapwood.kernels.ops.quant import KINDS as KERNEL_KINDS
from sapwood.kernels.ops.quant import pack_quantised
from sapwood.srt.loader.gguf_kinds import dequantise
from sapwood.srt.loader.gguf_model import config_of
from sapwood.srt.loader.gguf_names import TABLES, family_of
from sapwood.srt.loader.gguf_parts import GgufFile

ROWS = 256 * PANEL
"""Rows dequantised at a time on the way into a packed weight."""


class GgufReader:
    """Reads by Hugging Face name, and gives each tensor as the Hugging Face checkpoint has it: rows that the
    file keeps as interleaved rotary pairs go back to halves, norms that it keeps with 1 added lose it."""

    def __init__(self, path: str) -> None:
        self._file = GgufFile(path)
        self.place = str(self._file.path)
        config = config_of(self._file)
        self._family = family_of(self._file)
        self._own = {self._family.hf_name(n): n for n in self._file.tensors if n not in TABLES}
        self._heads = {
            ".q_proj.": config["num_attention_heads"],
            ".k_proj.": config["num_key_value_heads"],
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[own].shape for name, own in self._own.items()}

    def read(self, name: str) -> Tensor:
        shape = self._file.tensors[self._own[name]].shape
        kind, rows = self._rows(name)
        values = dequantise(rows, kind).reshape(shape)
        if self._family.is_raised(name):
            values -= np.float32(1)
        return torch.from_numpy(values)

    def pack(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        parts = [self._rows(name) for name in names]
        columns = self._file.tensors[self._own[names[0]]].shape[-1]
        kinds = {kind for kind, _ in parts}
        if len(kinds) == 1 and kinds <= KERNEL_KINDS.keys():
            rows = np.concatenate([rows for _, rows in parts]) if len(parts) > 1 else parts[0][1]
            return pack_quantised(torch.from_numpy(rows), kinds.pop(), rows.shape[0], columns, dtype)
        if any(rows.shape[0] % PANEL for _, rows in parts[:-1]):
            return pack(torch.cat([self.read(name) for name in names]), dtype)
        return _pack_in_pieces(parts, columns, dtype)

    def _rows(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """(kind, uint8 [rows, bytes of a row]); a vector counts as a matrix of one row or, where its rows are
        put in order, of one column."""
        tensor = self._file.tensors[self._own[name]]
        count = tensor.shape[0] if len(tensor.shape) > 1 or self._family.is_paired(name) else 1
        rows = self._file.raw(tensor.name).reshape(count, -1)
        if self._family.is_paired(name):
            heads = next(count for part, count in self._heads.items() if part in name)
            paired = rows.reshape(heads, tensor.shape[0] // heads // 2, 2, -1)
            rows = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(tensor.shape[0], -1)
        return tensor.kind, rows


def _pack_in_pieces(
    parts: Sequence[tuple[str, npt.NDArray[np.uint8]]], columns: int, dtype: torch.dtype
) -> PackedWeight:
    """The matrices one below another, without the whole of them in float32 between; each but the last is
    whole panels, and so are the pieces."""
    packed = PackedWeight(sum(rows.shape[0] for _, rows in parts), columns, dtype)
    panel = 0
    for kind, rows in parts:  # a file may keep, say, v in more bits than q and k
        for begin in range(0, rows.shape[0], ROWS):
            piece = pack(torch.from_numpy(dequantise(rows[begin : begin + ROWS], kind)), dtype)
            packed.data[panel : panel + piece.data.shape[0]] = piece.data
            panel += piece.data.shape[0]
    return packed
