"""bench/tensor_parallel.py finds every rank, and sees which of them outlives the others."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from bench import tensor_parallel
from bench.tensor_parallel import alive, ranks_of

ARGV = ["python", "-P", "-m", "sapwood.srt.lifeline", "worker", "sapwood.srt.worker.loop", "9"]


class Process:
    """One of the system's, as psutil shows it."""

    def __init__(self, argv: list[str] | None, status: str = psutil.STATUS_SLEEPING) -> None:
        self._argv, self._status = argv, status

    def cmdline(self) -> list[str]:
        if self._argv is None:
            raise psutil.ZombieProcess(7)
        return self._argv

    def status(self) -> str:
        return self._status

    def is_running(self) -> bool:
        return True


def test_all_ranks_are_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Process(ARGV), Process([*ARGV, "rank=1"])
    scheduler = Process([*ARGV[:4], "scheduler", "sapwood.srt.scheduler.loop", "8"])
    children: list[Any] = [second, Process(None), scheduler, Process([]), first]

    class Parent:
        def __init__(self, _pid: int) -> None:
            pass

        def children(self, recursive: bool) -> list[Any]:
            assert recursive
            return children

    monkeypatch.setattr(tensor_parallel.psutil, "Process", Parent)
    assert ranks_of(1) == [first, second]


def test_a_rank_that_outlives_the_others_is_counted() -> None:
    ended: Any = Process(ARGV, psutil.STATUS_ZOMBIE)
    left: Any = Process([*ARGV, "rank=1"])
    assert (alive([ended]), alive([ended, left])) == (0, 1)
