"""One GGUF file: metadata and tensor table over a memory map. Every length is checked against the file."""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_kinds import KINDS, kind_of

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**20


class GgufTensor(NamedTuple):
    """One entry of the tensor table. `shape` is in row-major order: rows first, the contiguous axis last."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


class GgufPart:
    """An open GGUF file: a whole model, or one part of a split one.

    `metadata` maps keys to Python values; arrays of numbers are numpy arrays, arrays of strings lists.
    Raises ModelError naming the file, and the tensor or key at fault, for anything that is not a whole,
    little-endian GGUF of version 2 or 3 with supported tensor types.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        cursor = _Cursor(self._data, self.path)
        tensors, keys = _header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.text("a metadata key")
            self.metadata[key] = cursor.value(cursor.u32(key), key)
        self.tensors = _table(cursor, tensors, self.metadata.get("general.alignment", 32))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, shape [bytes], a private view of the file (nothing is copied)."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)


class _Cursor:
    """Reads forward through the file; what would pass its end raises ModelError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they begin."""
        begin = self.at
        if size > len(self.data) - begin:
            raise ModelError(
                f"{self.path}: is cut short or damaged: {what} at byte {begin} needs {size} bytes, "
                f"the file has {len(self.data)}"
            )
        self.at = begin + size
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def text(self, what: str) -> str:
        size = self.u64(what)
        begin = self.take(size, what)
        return self.data[begin : begin + size].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: metadata key {key!r} has the unknown type {kind}")
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code), key))[0]

    def _array(self, key: str) -> Any:
        kind, count = self.u32(key), self.u64(key)
        if kind == _STRING:
            if count * 8 > len(self.data) - self.at:
                self.take(count * 8, key)
            return self._texts(count, key)
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: metadata key {key!r} is an array of the unsupported type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind])
        begin = self.take(count * dtype.itemsize, key)
        return np.frombuffer(self.data, dtype, count, begin)

    def _texts(self, count: int, key: str) -> list[str]:
        """What `text` reads, so many times, but faster: a vocabulary has hundreds of thousands."""
        data, last, read, at = self.data, len(self.data) - _U64.size, _U64.unpack_from, self.at
        texts = []
        for _ in range(count):
            if at > last or (size := read(data, at)[0]) > last - at:
                break
            begin = at + _U64.size
            at = begin + size
            texts.append(str(data[begin:at], "utf-8", "replace"))
        self.at = at
        if len(texts) < count:
            self.text(key)  # raises
        return texts


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private map: its pages count as writable, which torch asks of memory that it shares.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ModelError(f"{path}: is empty") from None
    except OSError as e:
        raise ModelError(f"{path}: cannot be read: {e.strerror}") from None


def _header(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and metadata keys."""
    begin = cursor.take(4, "the magic number")
    if cursor.data[begin : begin + 4] != b"GGUF":
        raise ModelError(f"{cursor.path}: is not a GGUF file")
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path}: has GGUF version {version}; 2 and 3 (little-endian) are supported")
    return cursor.u64("the tensor count"), cursor.u64("the key count")


def _table(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    path = cursor.path
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, not from 1 to {_MAX_ALIGNMENT}")
    entries = [_entry(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        tensor = entry._replace(offset=start + entry.offset)
        if tensor.name in tensors:
            raise ModelError(f"{path}: holds the tensor {tensor.name} twice")
        if tensor.offset + tensor.size > len(cursor.data):
            raise ModelError(
                f"{path}: is cut short: tensor {tensor.name} ends at byte {tensor.offset + tensor.size}, "
                f"the file has {len(cursor.data)}"
            )
        tensors[tensor.name] = tensor
    return tensors


def _entry(cursor: _Cursor) -> GgufTensor:
    """One row of the table, its offset still counted from the start of the data."""
    path, name = cursor.path, cursor.text("a tensor name")
    dims = cursor.u32(name)
    if not 1 <= dims <= _MAX_DIMS:
        raise ModelError(f"{path}: tensor {name} has {dims} dimensions, not 1 to {_MAX_DIMS}")
    shape = tuple(cursor.u64(name) for _ in range(dims))[::-1]
    number, offset = cursor.u32(name), cursor.u64(name)
    kind = kind_of(number)
    if kind is None or kind.name not in KINDS:
        known = ", ".join(name.upper() for name in KINDS)
        given = kind.name.upper() if kind else number
        raise ModelError(f"{path}: tensor {name} has the type {given}, not supported; supported: {known}")
    if 0 in shape or shape[-1] % kind.values:
        raise ModelError(
            f"{path}: tensor {name} of shape {list(shape)} cannot be stored as {kind.name.upper()}"
        )
    return GgufTensor(name, shape, kind.name, offset, math.prod(shape) // kind.values * kind.size)
