"""The tensors of one or more safetensors files, memory-mapped by the safetensors library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.folder import INDEX, weight_map
from sapwood.srt.loader.packing import Matrix

FORMATS = {"F32": "float32", "F16": "float16", "BF16": "float32"}
"""The packed format that holds each type; float16 would cut the range of bfloat16."""


class SafetensorsReader:
    """Reads float32, float16 and bfloat16 tensors: as float32, or the rows of a matrix as they are stored.

    Raises ModelError naming a file that is cut short, a tensor that two files hold or that the index places
    where it is not, and, when it is read, a tensor of another type.
    """

    def __init__(self, folder: str, files: Sequence[str]) -> None:
        self.place = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        index = Path(folder) / INDEX
        strays: dict[str, Path] = {}
        homes = weight_map(index) if len(files) > 1 and index.is_file() else {}
        for path in map(Path, files):
            self._add(path, _open(path), homes, strays)
        for name, home in homes.items():
            if name not in self._shapes:
                raise ModelError(f"{Path(folder) / home}: has no tensor {name}, which {INDEX} places there")
            if name in strays:
                raise ModelError(f"{strays[name]}: holds the tensor {name}, which {INDEX} places in {home}")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.float32, copy=True).contiguous()

    def kind(self, name: str) -> str:
        return self._kinds[name]

    def matrix(self, name: str) -> Matrix:
        kind, view = self._kinds[name], self._files[name].get_slice(name)

        def rows(begin: int, end: int) -> Tensor:
            part: Tensor = view[begin:end]
            return part

        n, k = self._shapes[name]
        return Matrix(name, n, k, kind, FORMATS[kind], rows)

    def _add(self, path: Path, file: Any, homes: Mapping[str, str], strays: dict[str, Path]) -> None:
        for name in file.keys():  # noqa: SIM118 - no mapping
            if homes.get(name, path.name) != path.name:
                strays[name] = path
                continue
            if name in self._files:
                raise ModelError(f"{path}: holds the tensor {name}, which another file holds too")
            view = file.get_slice(name)
            if view.get_dtype() not in FORMATS:
                raise ModelError(
                    f"{path}: tensor {name} has the type {view.get_dtype()}; supported: {', '.join(FORMATS)}"
                )
            self._files[name], self._kinds[name] = file, view.get_dtype()
            self._shapes[name] = tuple(view.get_shape())


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path}: is no whole safetensors file: {e}") from None
