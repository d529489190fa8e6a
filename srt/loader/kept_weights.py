"""Quantised weights as they were packed, kept in one file of the cache folder: the next start maps it.

The file: 8 bytes that name its kind, the length and the CRC-32 of the header (uint32, little-endian), the
header in JSON, then the panels of each weight at multiples of 64 bytes. The header says what the panels were
made of (path, size and time of change of each file), how the kernels lay panels out, where each weight lies,
and how long the rest is. A file that says anything else than it must is made again. The panels themselves are
not summed up at a start, no more than a model's own file is; but the file is synced before it is moved to its
place, so that neither a crash nor another server can leave half of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from sapwood.kernels.ops.gemm import FORMATS, PackedWeight, pack_codes
from sapwood.srt.loader.kept import label_of, put

VERSION = 1
"""Raise it when other codes are made of the same files."""

_MAGIC = b"SAPWOODW"
_HEAD = struct.Struct("<8sII")
_ALIGNMENT = 64
_SMALLEST = 8 * 2**20
"""Bytes below which packing again takes no time to speak of."""
_ABANDONED = 3600.0
"""Seconds after which a half-written file was left by a process that is gone."""

_ODD = (OSError, ValueError, KeyError, TypeError, struct.error)
"""What reading a file raises that is not one of these, or not whole."""

_log = logging.getLogger("sapwood")


class KeptWeights:
    """The quantised weights of `files`, packed as `storage`: found in `folder` or, after `save`, kept there.

    A folder that cannot be read or written costs time alone, and is logged at debug.
    """

    def __init__(self, folder: Path, files: Sequence[str], storage: str) -> None:
        paths = [Path(file).resolve() for file in files]
        self._files = [str(path) for path in paths]
        name = hashlib.sha256("\0".join([storage, *self._files]).encode("utf-8", "surrogateescape"))
        self.path = folder / f"{name.hexdigest()[:24]}.weights"
        self._label = [storage, *(label_of(path, VERSION) for path in paths), _layout()]
        self._found = _read(self.path, self._label)
        self._used: dict[str, PackedWeight] = {}

    @property
    def is_found(self) -> bool:
        """Whether there was a file to map."""
        return bool(self._found)

    @property
    def nbytes(self) -> int:
        """Bytes mapped from the file: the system counts them as free memory that it can have back."""
        return sum(weight.nbytes for weight in self._found.values())

    def get(self, names: Sequence[str]) -> PackedWeight | None:
        """The weight of these matrices, mapped from the file; None if it is not there."""
        return self._found.get(" ".join(names))

    def add(self, names: Sequence[str], weight: PackedWeight) -> None:
        """Take note of a weight, whether it was found or packed; of floats none are kept."""
        if FORMATS[weight.format].dtype is None:
            self._used[" ".join(names)] = weight

    def save(self) -> None:
        """Keep all that was added, if any of it was not found."""
        size = sum(weight.nbytes for weight in self._used.values())
        if size < _SMALLEST or all(name in self._found for name in self._used):
            return
        try:
            _sweep(self.path)
            _write(self.path, {"label": self._label, "files": self._files}, self._used)
        except OSError as e:
            _log.debug("packed weights are not kept in %s: %s", self.path, e)


def _open(path: Path) -> tuple[mmap.mmap, dict[str, Any], int]:
    """The file's map, its header, and where its panels begin. Raises what says that it is none."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    magic, length, crc = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or zlib.crc32(text) != crc:
        raise ValueError("its header is damaged")
    return data, json.loads(text), _aligned(_HEAD.size + length)


def _read(path: Path, label: list[Any]) -> dict[str, PackedWeight]:
    try:
        data, header, start = _open(path)
        if header["label"] != label or len(data) != start + header["size"]:
            raise ValueError("it is cut short, or belongs to other files or another version")
        weights = {}
        for name, (format, n, k, begin, end) in dict(header["weights"]).items():
            panels = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=start + begin)
            weights[name] = PackedWeight(n, k, format, panels.view(-(-n // 16), -1))
    except FileNotFoundError:
        return {}
    except _ODD as e:
        _log.debug("%s is made again: %r", path, e)
        return {}
    data.madvise(mmap.MADV_WILLNEED)
    return weights


def _sweep(path: Path) -> None:
    """Remove what killed processes left of this file, and what was kept of models that are gone."""
    for left in path.parent.glob(f"{path.stem}.*.tmp"):
        if time.time() - left.stat().st_mtime > _ABANDONED:
            left.unlink(missing_ok=True)
    for other in path.parent.glob(f"*{path.suffix}"):
        try:
            _data, header, _start = _open(other)
            gone = not all(Path(file).exists() for file in header["files"])
        except _ODD:
            continue
        if gone:
            other.unlink(missing_ok=True)


def _write(path: Path, about: dict[str, Any], weights: dict[str, PackedWeight]) -> None:
    """Put the whole file at `path` or nothing, whoever else does the same."""
    places, end = {}, 0
    for name, weight in weights.items():
        places[name] = weight.format, weight.n, weight.k, end, end + weight.nbytes
        end = _aligned(end + weight.nbytes)
    header = json.dumps({**about, "size": end, "weights": places}).encode()

    def fill(file: IO[bytes]) -> None:
        file.write(_HEAD.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
        for weight in weights.values():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(weight.data.numpy().data)
        file.write(bytes(-file.tell() % _ALIGNMENT))

    put(path, fill)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _layout() -> int:
    """Stands for the way the kernels lay quantised panels out: the sum of one small weight in each format."""
    crc = 0
    codes = (torch.arange(17 * 72) * 7 % 16).to(torch.int8).view(17, 72)
    for name, format in FORMATS.items():
        if format.dtype is None:
            scales = torch.arange(1, 17 * -(-72 // format.group) + 1, dtype=torch.float32).view(17, -1) / 8
            packed = pack_codes(codes, scales, -scales if format.lows else None, name)
            crc = zlib.crc32(packed.data.numpy().data, crc)
    return crc
