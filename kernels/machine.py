"""What this process may take of the machine: cores and memory, its control groups' bounds included."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")
NO_LIMIT = 2**60
"""Version 1 says "unlimited" with a number of bytes near 2^63."""


class Group(NamedTuple):
    """A control group that bounds this process; its version, 1 or 2, says what its files are called."""

    version: int
    folder: Path


def groups(controller: str, proc: Path = PROC) -> Iterator[Group]:
    """This process's own control group and those above it that can be seen, the own first, of both versions.

    Each of them counts: a bound on any is a bound on all that is in it.
    """
    try:
        paths = dict(_paths(proc / "self/cgroup"))
        mounts = _lines(proc / "self/mountinfo")
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ")[:3]
        if kind == "cgroup2":
            version, path = 2, paths.get("")
        elif kind == "cgroup" and controller in options.split(","):
            version, path = 1, paths.get(controller)
        else:
            continue
        if path is not None:
            root, top = (_unescaped(field) for field in before.split(" ")[3:5])
            yield from (Group(version, folder) for folder in _upwards(Path(top), root, path))


def _paths(table: Path) -> Iterator[tuple[str, str]]:
    """(controller, path in its hierarchy); the controller of version 2 is called ""."""
    for line in _lines(table):
        _number, controllers, path = line.split(":", 2)
        yield from ((controller, path) for controller in controllers.split(","))


def _lines(table: Path) -> list[str]:
    """The lines of a table with paths in it, which need not be UTF-8."""
    return table.read_text(errors="surrogateescape").splitlines()


def _upwards(top: Path, root: str, path: str) -> Iterator[Path]:
    """The folders from the group `path` up to `top`, where the part of the hierarchy below `root` is mounted.

    A path outside that part, as a container without a namespace for its groups has it, is the top's own.
    """
    root = root.rstrip("/")
    inside = path.removeprefix(root) if (path + "/").startswith(root + "/") else ""
    parts = [part for part in inside.split("/") if part]
    for depth in range(0 if ".." in parts else len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _numbers(path: Path) -> list[int]:
    """The numbers that a file begins with; none for "max" and for a file that is not there."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def cpu_quota(proc: Path = PROC) -> float | None:
    """Cores' worth of time that the control groups grant; None if none of them sets a bound."""
    bounds = []
    for version, folder in groups("cpu", proc):
        if version == 2:
            numbers = _numbers(folder / "cpu.max")
        else:
            numbers = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(numbers) == 2 and min(numbers) > 0:
            bounds.append(numbers[0] / numbers[1])
    return min(bounds, default=None)


def choose_threads(proc: Path = PROC, cpus: Path = CPUS) -> tuple[int, str]:
    """(threads for the kernels, why): one a core that this process may use, as far as its quota goes.

    Two hardware threads of a core share its arithmetic units: the second is left to the other processes,
    unless there is one core only.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len({_siblings(cpus, cpu) for cpu in usable})
    count, why = len(usable), "all usable cores"
    if 1 < cores < count:
        count, why = cores, f"one a core of {len(usable)} usable hardware threads"
    quota = cpu_quota(proc)
    if quota is not None and quota < count:
        count, why = max(1, int(quota)), f"the control group grants {quota:g} cores"
    return count, why


def _siblings(cpus: Path, cpu: int) -> str:
    """Names the core that the hardware thread `cpu` is of."""
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def free_memory(proc: Path = PROC) -> int:
    """Bytes that this process may still take: of the machine, or of a control group if that is less.

    What a group holds of files that nobody has used lately can be had too: it does not count as taken.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, kib in _fields(proc / "meminfo"):
        if name == "MemAvailable:":
            free = kib * 1024
    for version, folder in groups("memory", proc):
        new = version == 2
        names = ("memory.max", "memory.high") if new else ("memory.limit_in_bytes",)
        limits = [n for name in names for n in _numbers(folder / name) if n < NO_LIMIT]
        used = _numbers(folder / ("memory.current" if new else "memory.usage_in_bytes"))
        if limits and used:
            stat = dict(_fields(folder / "memory.stat"))
            files = stat.get("inactive_file" if new else "total_inactive_file", 0)
            free = min(free, min(limits) - max(0, used[0] - files))
    return max(free, 0)


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """(name, number) of each line of a file; nothing of one that cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, number, *_unit = line.split()
        yield name, int(number)
