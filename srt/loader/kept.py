"""Files made from others: made once, then found again in the cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sapwood.srt.errors import ModelError


def label_of(source: Path, version: int) -> str:
    """What stands for a large file's content: its path, size and time of change."""
    stat = source.stat()
    return f"{version}:{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"


def kept(folder: Path, label: str, make: Callable[[], str]) -> Path:
    """The tokenizer.json in `folder` that belongs to `label`, made (whole, or not at all) if it is not there.

    ModelError if the folder cannot be written.
    """
    key = hashlib.sha256(label.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    target = folder / f"{key}.tokenizer.json"
    if target.is_file():
        return target
    text = make()
    try:
        put(target, lambda file: file.write(text.encode()))
    except OSError as e:
        raise ModelError(
            f"cannot keep a tokenizer in {folder}: {e}; set SAPWOOD_CACHE to a folder that can"
        ) from None
    return target


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def put(target: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Put all that `fill` writes at `target` or nothing, whoever else does the same. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            # As open() would: a temporary file is its maker's alone, but a cache may be several users'.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
