"""How `bench.gpu` ends a process of parts, in bounded time whatever becomes of that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import watch
from tests.unit.test_bench_gpu import SELF


@pytest.fixture
def hung() -> Iterator[watch._Child]:
    """A process of parts that goes no further."""
    child = watch._Child(SELF, ["--script", json.dumps({"found": ["row", "hang"]}), "--only", "found"], 60.0)
    try:
        for _ in range(2):
            assert child.next(30.0) is not None
        yield child
    finally:
        child._process.kill()
        subprocess.Popen.wait(child._process)


def test_what_cannot_be_ended_is_not_waited_for(hung: watch._Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "KILLING", 0.3, raising=False)
    until = time.monotonic() + 10

    def for_ever(session: int) -> list[int]:
        assert time.monotonic() < until, "it is waited for"
        return [session]

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "it is waited for"
        raise subprocess.TimeoutExpired("hung", timeout)

    monkeypatch.setattr(watch, "_of_session", for_ever)
    monkeypatch.setattr(hung._process, "wait", wait)
    hung.kill()


def test_a_session_that_another_user_has_by_now_is_left_alone(
    hung: watch._Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "KILLING", 0.3, raising=False)
    real, other, tried = os.kill, 1 << 30, list[int]()

    def kill(pid: int, number: int) -> None:
        if pid == other:
            tried.append(pid)
            raise PermissionError
        real(pid, number)

    monkeypatch.setattr(watch, "_of_session", lambda session: [other])
    monkeypatch.setattr(os, "kill", kill)
    hung.kill()
    assert tried
    assert hung._process.returncode == -signal.SIGKILL


def test_a_part_that_hangs_is_ended_where_no_processes_are_to_be_seen(
    hung: watch._Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = hung._process
    monkeypatch.setattr(watch, "_of_session", lambda session: [])
    monkeypatch.setattr(process, "wait", lambda timeout=10.0: subprocess.Popen.wait(process, timeout))
    hung.kill()
    assert hung._process.returncode == -signal.SIGKILL


def test_a_process_whose_name_is_cut_within_a_character_is_seen() -> None:
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"caf\xc3\n"
            assert watch._of_session(process.pid) == [process.pid]
        finally:
            process.kill()
