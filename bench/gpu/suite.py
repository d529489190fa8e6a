"""tests/gpu by pytest, in a process of its own with a limit: first what is compiled, then the rest."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.gpu.compiling import JOBS
from bench.gpu.here import Here
from bench.gpu.place import NotHere
from bench.gpu.watch import die_with_parent
from sapwood.kernels.flashinfer import versions_found

ROOT = Path(__file__).parents[2]
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
DRY_TESTS = ("tests/gpu/test_gpu_attention.py", "-k", "scores and double")
ELSEWHERE = (
    "test_flashinfer_double", "test_gpu_graphs", "test_gpu_memory", "test_gpu_runner", "test_gpu_streams",
    "test_gpu_waiting",
)  # fmt: skip
"""What needs no GPU: doubles, and the runner on a CPU that stands in for one. Nor do tests whose names have
`double` or `host`."""
PYTEST = (
    "-v", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist",
    "-W", "default",  # a package's own warnings are no failures
)  # fmt: skip
GRACE = 3.0


@dataclass(slots=True)
class Run:
    """What pytest has said, whether it ended by itself, and its exit status."""

    text: str = ""
    ended: bool = False
    status: int = 0
    counts: Counter[str] = field(default_factory=Counter)


def tests(here: Here) -> None:
    """On a GPU without those that can be done anywhere. Counts go by pytest's lines, so that a run that is
    cut short has them too."""
    for package in ("pytest", "hypothesis"):  # which tests/conftest.py imports
        if importlib.util.find_spec(package) is None:
            raise NotHere(f"{package} is not installed")
    here.close()  # what it takes of the memory, the tests may need
    if importlib.util.find_spec("sapwood.kernels._C") is None:
        here.row("no C++ kernels (python setup.py build_ext --inplace): what needs them is skipped", None)
    if here.place.dry:
        _told(here, "", _run(DRY_TESTS, {}, here.left))
        return
    from tests.gpu.backends import ONLY

    only = {ONLY: "nothing" if here.place.plain else "compiled"}
    with _compiling(here):
        first = _run([*chosen(), "-k", "not double and not host"], only, here.left)
        _told(here, "", first)
        if first.ended and (waiting := uncompiled(first.text)):
            _told(here, ", compiled now", _run(waiting, {}, here.left))


def chosen() -> list[str]:
    """The files, that of the device itself first."""
    files = [file for file in (ROOT / "tests/gpu").glob("test_*.py") if file.stem not in ELSEWHERE]
    files.sort(key=lambda file: (file.stem != "test_gpu_device", file.stem))
    return [str(file.relative_to(ROOT)) for file in files]


def counted(text: str) -> Counter[str]:
    """Of `pytest -v`'s lines so far."""
    return Counter(re.findall(rf"^\S+::.* ({'|'.join(OUTCOMES)})\b", text, re.MULTILINE))


def uncompiled(text: str) -> list[str]:
    """The tests that were left out as their kernels were not there."""
    from tests.gpu.backends import UNCOMPILED

    return re.findall(rf"^(\S+::.*) SKIPPED \({UNCOMPILED}\)", text, re.MULTILINE)


def _told(here: Here, kind: str, run: Run) -> None:
    for outcome in OUTCOMES:
        most = {"most": 0} if outcome in ("FAILED", "ERROR") else {}
        here.row(f"{outcome.lower()}{kind}", run.counts[outcome], "tests", **most)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", run.text, re.MULTILINE)
    waiting = len(uncompiled(run.text))
    end = "ran to the end" if run.ended else "cut at its limit"
    left = f", {waiting} of those skipped wait for a kernel" if waiting else ""
    here.row(f"tests/gpu{kind}: {end}{left}", run.ended, failed=failed)
    if run.ended and (run.status not in (0, 1) or not run.counts):
        raise RuntimeError(f"pytest ended with {run.status}: {run.text[-600:]}")


def _run(arguments: Sequence[str], environment: Mapping[str, str], limit: float) -> Run:
    command = [sys.executable, "-m", "bench.gpu.suite", *PYTEST, *arguments]
    # Wide enough for a line to say why a test was skipped.
    surroundings = {**os.environ, "COLUMNS": "1000", **environment}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        _grouped(command, surroundings, out) as process,
    ):
        ended = _wait(process, limit - 2 * GRACE)
        out.seek(0)
        text = out.read()
    return Run(text, ended, process.returncode, counted(text))


@contextlib.contextmanager
def _compiling(here: Here) -> Iterator[None]:
    """Inside, the kernels that only the tests have are compiled, in a process of their own."""
    if here.place.plain or versions_found().compiled:
        yield
        return
    # Without a limit ninja takes a compiler a core, for each module.
    limited = {"MAX_JOBS": str(JOBS), **os.environ}
    with _grouped([sys.executable, "-m", "bench.gpu.compiling"], limited, sys.stderr):
        yield


@contextlib.contextmanager
def _grouped(
    command: Sequence[str], environment: Mapping[str, str], out: IO[str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with all that it has started, compilers say."""
    process: subprocess.Popen[bytes] = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether it ended by itself; else it is interrupted, which makes pytest tell what has failed."""
    for patience, end in ((max(limit, 1.0), signal.SIGINT), (GRACE, signal.SIGKILL)):
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.send_signal(end)
            continue
        return end == signal.SIGINT
    process.wait()
    return False


if __name__ == "__main__":
    import pytest

    die_with_parent()
    raise SystemExit(pytest.main(sys.argv[1:]))
