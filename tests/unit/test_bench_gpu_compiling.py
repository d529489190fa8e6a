"""`bench.gpu` compiles what only tests/gpu has beside the tests that it measures, and says what it needs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import __main__ as program, compiling, suite
from bench.gpu.parts import ATTENTION
from tests.unit.test_bench_gpu_parts import here_of, suite_here


@pytest.mark.parametrize(("cores", "most"), [(16, 4), (2, 2)])
def test_the_tests_kernels_leave_room_for_the_tests(
    cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, now, highest, ended = threading.Lock(), 0, 0, 0

    def compiles() -> None:
        nonlocal now, highest, ended
        with lock:
            now += 1
            highest = max(highest, now)
        time.sleep(0.005)
        with lock:
            now -= 1
            ended += 1

    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(compiling, "_attention", lambda *of: {"decode": compiles, "cascade": compiles})
    compiling.of_the_tests(here_of([]))
    assert (highest <= most, ended) == (True, 32)


@pytest.mark.parametrize("given", [{}, {"MAX_JOBS": "7"}])
def test_a_module_of_the_tests_has_few_compilers(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    @contextlib.contextmanager
    def grouped(command: Any, environment: Any, out: Any) -> Iterator[None]:
        started.append(environment["MAX_JOBS"])
        yield

    monkeypatch.delenv("MAX_JOBS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    here = suite_here(monkeypatch, [])
    monkeypatch.setattr(suite, "versions_found", lambda: SimpleNamespace(compiled=False))
    monkeypatch.setattr(suite, "_grouped", grouped)
    with suite._compiling(here):
        pass
    assert started == [given.get("MAX_JOBS", "4")]


def test_the_documentation_names_all_without_which_there_is_no_attention() -> None:
    needed = [name for name, lost in compiling.LOST.items() if lost == ATTENTION]
    assert needed == ["decode", "prefill, short chunk"]
    for text in (program.__doc__ or "", (suite.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")):
        assert re.search(r"without\s+those\s+of\s+decode\s+or\s+of\s+short\s+prefills", text)
