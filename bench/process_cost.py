"""What a tree of processes costs: CPU seconds, memory, and how much of the machine others took."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

TICK = os.sysconf("SC_CLK_TCK")
SHORTEST_WAIT = 1.0
SHARE = 100
"""Reading a big process's memory takes it milliseconds under a lock: at most 1 % of the time is spent so."""


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants that live."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU time of the tree so far; that of ended children whose parent waited for them counts too."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(f) for f in fields[11:15])
    return ticks / TICK


def pss_bytes(pid: int) -> int:
    """Memory of the tree: the sum of proportional set sizes, shared pages counted once. 0 if not readable."""
    total = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def machine_busy_seconds() -> float:
    """CPU seconds that the machine has spent on anything, including what its host took from it."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICK  # without idle and iowait


class Meter:
    """Measures a tree of processes, this process and all others while its `with` block runs.

    Afterwards: `wall`, `client_cpu` and `sampler_cpu` in seconds; and, None without a pid, `server_cpu` in
    seconds, `peak_pss` in bytes, `foreign`, the share of the machine that neither tree nor this process took.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.wall = self.client_cpu = self.sampler_cpu = 0.0
        self.server_cpu: float | None = None
        self.peak_pss: int | None = None
        self.foreign: float | None = None

    def __enter__(self) -> Meter:
        self._busy = machine_busy_seconds()
        self._server = cpu_seconds(self._pid) if self._pid else 0.0
        self._own = time.process_time()
        self._begin = time.perf_counter()
        if self._pid:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.wall = time.perf_counter() - self._begin
        own = time.process_time() - self._own
        busy = machine_busy_seconds() - self._busy
        if self._pid:
            self.server_cpu = cpu_seconds(self._pid) - self._server
            self._stop.set()
            self._sampler.join()
            cores = os.cpu_count() or 1
            self.foreign = max(0.0, busy - self.server_cpu - own) / (self.wall * cores)
        self.client_cpu = max(0.0, own - self.sampler_cpu)

    def _sample(self) -> None:
        assert self._pid is not None
        stopped, wait = False, SHORTEST_WAIT
        while not stopped:
            stopped = self._stop.wait(wait)
            begin = time.perf_counter()
            self.peak_pss = max(self.peak_pss or 0, pss_bytes(self._pid)) or None
            if not stopped:  # the last look is after the measured time
                wait = max(SHORTEST_WAIT, SHARE * (time.perf_counter() - begin))
                self.sampler_cpu = time.thread_time()


def wait_quiet(seconds: float, share: float = 0.1) -> bool:
    """Wait until a second passes in which less than `share` of the machine was used; False if none did."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        busy, begin = machine_busy_seconds(), time.perf_counter()
        time.sleep(1.0)
        used = machine_busy_seconds() - busy
        if used < share * (time.perf_counter() - begin) * (os.cpu_count() or 1):
            return True
    return False
