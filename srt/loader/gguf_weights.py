"""The tensors of a GGUF file, from its blocks straight into packed weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.srt.loader.codes import Codes
from sapwood.srt.loader.gguf_kinds import QUANTISED, codes_of, dequantise, format_of
from sapwood.srt.loader.gguf_model import config_of
from sapwood.srt.loader.gguf_names import TABLES, family_of
from sapwood.srt.loader.gguf_parts import GgufFile
from sapwood.srt.loader.packing import Matrix

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class GgufReader:
    """Reads by Hugging Face name, and gives each tensor as the Hugging Face checkpoint has it: rows that the
    file keeps as interleaved rotary pairs go back to halves, norms that it keeps with 1 added lose it."""

    def __init__(self, path: str) -> None:
        self._file = GgufFile(path)
        self.place = str(self._file.path)
        config = config_of(self._file)
        self._family = family_of(self._file)
        self._own = {self._family.hf_name(n): n for n in self._file.tensors if n not in TABLES}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self._file.tensors[own].shape for name, own in self._own.items()
        }
        self._heads = {
            ".q_proj.": config["num_attention_heads"],
            ".k_proj.": config["num_key_value_heads"],
        }

    def read(self, name: str) -> Tensor:
        shape = self._file.tensors[self._own[name]].shape
        kind, rows = self._rows(name)
        values = dequantise(rows, kind).reshape(shape)
        if self._family.is_raised(name):
            values -= np.float32(1)
        return torch.from_numpy(values)

    def kind(self, name: str) -> str:
        return self._file.tensors[self._own[name]].kind.upper()

    def matrix(self, name: str) -> Matrix:
        n, k = self._file.tensors[self._own[name]].shape
        kind, rows = self._rows(name)
        return Matrix(name, n, k, kind.upper(), format_of(rows, kind), functools.partial(_piece, rows, kind))

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


def _piece(rows: npt.NDArray[np.uint8], kind: str, begin: int, end: int) -> Tensor | Codes:
    part = rows[begin:end]
    return codes_of(part, kind) if kind in QUANTISED else torch.from_numpy(part).view(_FLOATS[kind])
