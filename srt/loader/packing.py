"""Stored matrices into packed weights, some rows at a time: no large matrix ever lies in memory as floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sapwood.kernels.ops.gemm import FORMATS, PANEL, PackedWeight, pack, pack_codes
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader.codes import LARGEST_HALF, Codes, common_format
from sapwood.srt.loader.quantise import quantise4, quantise8
from sapwood.srt.models.weights import Storage

PIECE = 2**18
"""Values unpacked at a time."""
COPIED = 2**22
"""Values that are given as they are stored at a time: beside one copy the calls for it take no time."""

_FORMATS: dict[Storage, str] = {"float32": "float32", "float16": "float16", "w8": "q8", "w4": "q4"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [n, k] in a file.

    `kind` is what its type is called, `format` the smallest packed format that holds its values as they are,
    `rows(begin, end)` some of its rows: floats as they are stored, which may lie in the file's own memory and
    in strides, or, of a quantised one, codes.
    """

    name: str
    n: int
    k: int
    kind: str
    format: str
    rows: Callable[[int, int], Tensor | Codes]

    def floats(self, begin: int, end: int) -> Tensor:
        """Some of its rows in float32, contiguous and of their own memory."""
        return _in_float32(self.rows(begin, end))

    def pieces(self) -> Iterator[Tensor]:
        """All its rows in order, some at a time: floats as `rows` gives them, codes in float32."""
        step = max(1, (PIECE if FORMATS[self.format].dtype is None else COPIED) // self.k)
        for begin in range(0, self.n, step):
            rows = self.rows(begin, min(self.n, begin + step))
            yield _in_float32(rows) if isinstance(rows, Codes) else rows

    def cut(self, rows: range | None, columns: range | None, group: int = 1) -> Matrix:
        """Those rows and columns of it. Raises ModelError for columns that part a group of codes or, where
        floats are to be rounded to codes, of so many inputs."""
        down, across = rows or range(self.n), columns or range(self.k)
        self._require_groups(across, group)

        def some(begin: int, end: int) -> Tensor | Codes:
            values = self.rows(down.start + begin, down.start + end)
            if len(across) == self.k:
                return values
            if isinstance(values, Codes):
                self._require_groups(across, values.group)
                return values.cut(across)
            return values[:, across.start : across.stop]

        return replace(self, n=len(down), k=len(across), rows=some)

    def _require_groups(self, across: range, group: int) -> None:
        if across.start % group or (across.stop % group and across.stop < self.k):
            raise ModelError(
                f"{self.name}: its {self.kind} values are quantised in groups of {group}: they cannot be "
                f"shared out from {across.start} to {across.stop} (--tensor-parallel-size)"
            )


def pack_matrices(matrices: Sequence[Matrix], storage: Storage) -> PackedWeight:
    """The rows of the matrices one after another as one packed weight.

    Raises ConfigError for a `storage` of w8 or w4 if a matrix is quantised already, ModelError for values
    that the storage asked for cannot hold.
    """
    format = common_format({m.format for m in matrices}) if storage == "stored" else _FORMATS[storage]
    whole = PackedWeight(sum(m.n for m in matrices), matrices[0].k, format)
    panel = 0
    for parts in _pieces(matrices):
        piece = _pack(parts, format, storage).data
        whole.data[panel : panel + len(piece)] = piece
        panel += len(piece)
    return whole


def _pieces(matrices: Sequence[Matrix]) -> Iterator[list[tuple[Matrix, Tensor | Codes]]]:
    """Rows for whole panels, from one or more matrices."""
    step = max(1, PIECE // (matrices[0].k * PANEL)) * PANEL
    parts: list[tuple[Matrix, Tensor | Codes]] = []
    room = step
    for matrix in matrices:
        begin = 0
        while begin < matrix.n:
            end = min(matrix.n, begin + room)
            parts.append((matrix, matrix.rows(begin, end)))
            room -= end - begin
            begin = end
            if not room:
                yield parts
                parts, room = [], step
    if parts:
        yield parts


def _pack(parts: Sequence[tuple[Matrix, Tensor | Codes]], format: str, storage: Storage) -> PackedWeight:
    if FORMATS[format].dtype is not None:
        floats = [_floats(matrix, rows, format) for matrix, rows in parts]
        return pack(torch.cat(floats) if len(floats) > 1 else floats[0], format)
    fitted = [
        rows.fit(format)
        if isinstance(rows, Codes) and storage == "stored"
        else _quantised(matrix, rows, storage)
        for matrix, rows in parts
    ]
    codes, scales, lows = (
        torch.cat([torch.from_numpy(part[i]) for part in fitted]) if fitted[0][i] is not None else None
        for i in range(3)
    )
    assert codes is not None
    assert scales is not None
    return pack_codes(codes, scales, lows, format)


def _in_float32(rows: Tensor | Codes) -> Tensor:
    if isinstance(rows, Codes):
        return torch.from_numpy(rows.values())
    return rows.to(torch.float32, copy=True).contiguous()


def _floats(matrix: Matrix, rows: Tensor | Codes, format: str) -> Tensor:
    floats = _in_float32(rows)
    loses = format == "float16" and matrix.format != "float16"
    if loses and not float(floats.abs().max()) <= LARGEST_HALF:
        raise ModelError(
            f"{matrix.name} holds values beyond {LARGEST_HALF:g}, the largest of float16: use --dtype float32"
        )
    return floats


def _quantised(matrix: Matrix, rows: Tensor | Codes, storage: Storage) -> Codes:
    if isinstance(rows, Codes):
        raise ConfigError(
            f"--quantization {storage} is for weights in floats, but {matrix.name} is {matrix.kind} already: "
            "without it, weights are computed on as they are stored",
            param="quantization",
        )
    try:
        return (quantise8 if storage == "w8" else quantise4)(_in_float32(rows).numpy())
    except OverflowError as e:
        raise ModelError(f"{matrix.name} cannot be rounded to {storage}: {e}") from None
