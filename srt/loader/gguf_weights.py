"""The tensors of a GGUF file, from its blocks straight into packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.ops.gemm import PackedWeight, pack
from sapwood.kernels.ops.quant import dequantise, pack_quantised
from sapwood.srt.loader.gguf import GgufFile
from sapwood.srt.loader.gguf_model import ROPE_FACTORS, config_of, hf_name, is_permuted


class GgufReader:
    """Reads by Hugging Face name. Rows that the file keeps as interleaved rotary pairs go back to halves."""

    def __init__(self, path: str) -> None:
        self.place = path
        self._file = GgufFile(path)
        self._own = {hf_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}
        config = config_of(self._file)
        self._heads = {
            ".q_proj.": config["num_attention_heads"],
            ".k_proj.": config["num_key_value_heads"],
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[own].shape for name, own in self._own.items()}

    def read(self, name: str) -> Tensor:
        shape = self._file.tensors[self._own[name]].shape
        kind, blocks = self._blocks(name)
        return dequantise(blocks, kind, blocks.shape[0], shape[-1] if len(shape) > 1 else 1).view(shape)

    def pack(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        parts = [self._blocks(name) for name in names]
        kinds = {kind for kind, _ in parts}
        if len(kinds) > 1:  # a file may keep, say, v in more bits than q and k
            return pack(torch.cat([self.read(name) for name in names]), dtype)
        rows = torch.cat([blocks for _, blocks in parts]) if len(parts) > 1 else parts[0][1]
        columns = self._file.tensors[self._own[names[0]]].shape[-1]
        return pack_quantised(rows, kinds.pop(), rows.shape[0], columns, dtype)

    def _blocks(self, name: str) -> tuple[str, Tensor]:
        """(kind, uint8 [rows, bytes of a row]); a vector counts as a matrix of one column."""
        tensor = self._file.tensors[self._own[name]]
        rows = self._file.raw(tensor.name).reshape(tensor.shape[0], -1)
        if is_permuted(name):
            heads = next(count for part, count in self._heads.items() if part in name)
            paired = rows.reshape(heads, tensor.shape[0] // heads // 2, 2, -1)
            rows = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(tensor.shape[0], -1)
        return tensor.kind, torch.from_numpy(rows)
