"""A GGUF model of one file, or of the parts that a large one was split into."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf import GgufPart, GgufTensor

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile:
    """An open GGUF model. Of a split one any part may be given: the others lie beside it.

    `metadata` is the first part's; `tensors` are those of all parts, `files` the parts in order.
    Raises ModelError as GgufPart does, and for a part that is missing or belongs to another split, or a
    tensor that two parts hold.
    """

    def __init__(self, path: str | Path) -> None:
        given = GgufPart(path)
        self.files = part_files(given)
        # The first part alone has the model's metadata, and is what messages name.
        self.path = self.files[0]
        self._parts = [given if file == given.path else GgufPart(file) for file in self.files]
        self.metadata: dict[str, Any] = self._parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._homes: dict[str, GgufPart] = {}
        for number, part in enumerate(self._parts):
            if len(self._parts) > 1:
                _check(part, number, len(self._parts))
            for name, tensor in part.tensors.items():
                if name in self._homes:
                    raise ModelError(
                        f"{part.path}: holds the tensor {name}, which {self._homes[name].path.name} holds too"
                    )
                self._homes[name] = part
                self.tensors[name] = tensor
        total = self.scalar("split.tensors.count", len(self.tensors))
        if len(self._parts) > 1 and total != len(self.tensors):
            raise ModelError(
                f"{self.path}: says that the parts hold {total} tensors together, but there are "
                f"{len(self.tensors)}"
            )

    def scalar(self, key: str, default: Any = None) -> Any:
        """A single value of the metadata, `default` if there is none; ModelError if it is a list."""
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, (str, int, float)):
            raise ModelError(f"{self.path}: {key} is a list, where a single value is needed")
        return value

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, shape [bytes], a private view of its file (nothing is copied)."""
        return self._homes[name].raw(name)


def part_files(given: GgufPart) -> list[Path]:
    """The files of the model that `given` is, or is a part of; ModelError names one that is missing."""
    count = given.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [given.path]
    named = _PART_NAME.fullmatch(given.path.name)
    if named is None or int(named["count"]) != count:
        raise ModelError(
            f"{given.path}: is one of {count} parts of a split GGUF, so its name must end in "
            f"-00001-of-{count:05}.gguf (with its own number)"
        )
    files = [
        given.path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{given.path}: of its {count} parts these are missing: {', '.join(missing[:5])}")
    return files


def part_names(name: str) -> list[str]:
    """The names of all parts of the split GGUF that has a part called `name`; else the name alone."""
    named = _PART_NAME.fullmatch(name)
    if named is None:
        return [name]
    count = int(named["count"])
    return [f"{named['stem']}-{number:05}-of-{named['count']}.gguf" for number in range(1, count + 1)]


def _check(part: GgufPart, number: int, count: int) -> None:
    """That the file is the part that its name says."""
    found = part.metadata.get("split.count"), part.metadata.get("split.no")
    if found != (count, number):
        raise ModelError(
            f"{part.path}: is named part {number + 1} of {count}, but says split.count {found[0]} and "
            f"split.no {found[1]} (counted from 0)"
        )
