"""Cores and memory that this process may take, read from made-up /proc and control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sapwood.kernels.machine import choose_threads, cpu_quota, free_memory, groups

MIB = 2**20


class FakeMachine:
    """A /proc of which this process's own control groups and their mounts are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.put("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\n")
        self.put("proc/self/cgroup", "")
        self.put("proc/self/mountinfo", "20 1 0:4 / /proc rw - proc proc rw\n")

    def put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def put_all(self, group: str, **files: str) -> None:
        for name, text in files.items():
            self.put(f"{group}/{name.replace('_', '.', 1)}", text + "\n")

    def mount(self, where: str, version: int, path: str, root: str = "/", controllers: str = "") -> None:
        """Mount the hierarchy's part below `root` at `where`; this process is in its group `path`."""
        point = str(self.folder / where).replace(" ", r"\040")
        kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controllers}"
        for name, line in (
            ("mountinfo", f"35 31 0:32 {root} {point} rw,relatime shared:7 - {kind}"),
            ("cgroup", f"{0 if version == 2 else 4}:{controllers}:{path}"),
        ):
            table = self.proc / "self" / name
            with table.open("ab") as lines:
                lines.write(os.fsencode(line + "\n"))


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "a machine")


def use(monkeypatch: pytest.MonkeyPatch, cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))


def cores(fake: FakeMachine, *siblings: str) -> Path:
    for number, of in enumerate(siblings):
        fake.put(f"cpus/cpu{number}/topology/thread_siblings_list", of + "\n")
    return fake.folder / "cpus"


def test_without_groups_the_machine_is_the_bound(fake: FakeMachine) -> None:
    assert list(groups("memory", fake.proc)) == []
    assert cpu_quota(fake.proc) is None
    assert free_memory(fake.proc) == 4096 * MIB


def test_without_proc_all_memory_counts_as_free(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("own", "above", "top", "cores"),
    [
        ("max 100000", "max 100000", None, None),
        ("150000 100000", "max 100000", None, 1.5),
        ("max 100000", "50000 100000", None, 0.5),
        ("400000 100000", "max 100000", "300000 100000", 3.0),
    ],
)
def test_every_group_of_version_2_up_to_the_top_bounds_the_time(
    fake: FakeMachine, own: str, above: str, top: str | None, cores: float | None
) -> None:
    fake.mount("cgroup", 2, "/service/part")
    fake.put_all("cgroup/service/part", cpu_max=own)
    fake.put_all("cgroup/service", cpu_max=above)
    if top is not None:
        fake.put_all("cgroup", cpu_max=top)
    assert cpu_quota(fake.proc) == cores


@pytest.mark.parametrize(
    ("own", "above", "cores"), [("-1", "-1", None), ("-1", "250000", 2.5), ("70000", "-1", 0.7)]
)
def test_version_1_bounds_it_in_two_files(
    fake: FakeMachine, own: str, above: str, cores: float | None
) -> None:
    fake.mount("cpu", 1, "/docker/ab", controllers="cpu,cpuacct")
    fake.put_all("cpu/docker/ab", cpu_cfs_quota_us=own, cpu_cfs_period_us="100000")
    fake.put_all("cpu/docker", cpu_cfs_quota_us=above, cpu_cfs_period_us="100000")
    assert cpu_quota(fake.proc) == cores


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/", "/", ""),
        ("/", "/kube/pod/box", "kube/pod/box"),
        ("/kube/pod", "/kube/pod", ""),
        ("/kube/pod", "/kube/pod/box", "box"),
        ("/kube/pod", "/kube/pods/box", ""),
        ("/kube/pod", "/elsewhere", ""),
        ("/", "/../other", ""),
    ],
)
def test_a_container_sees_only_its_own_part(fake: FakeMachine, root: str, path: str, folder: str) -> None:
    fake.mount("cgroup", 2, path, root)
    found = [group.folder for group in groups("cpu", fake.proc)]
    top = fake.folder / "cgroup"
    assert found[0] == top / folder
    assert found[-1] == top
    assert len(found) == 1 + len(Path(folder).parts)


def test_paths_need_not_be_utf_8(fake: FakeMachine) -> None:
    fake.mount("caf\udce9", 2, "/d\udce9j\udce0")
    assert b"/caf\xe9 " in (fake.proc / "self/mountinfo").read_bytes()
    fake.put_all("caf\udce9/d\udce9j\udce0", cpu_max="50000 100000")
    assert cpu_quota(fake.proc) == 0.5


def test_another_controllers_hierarchy_does_not_count(fake: FakeMachine) -> None:
    fake.mount("pids", 1, "/", controllers="pids")
    fake.put_all("pids", cpu_cfs_quota_us="100", cpu_cfs_period_us="100000")
    assert cpu_quota(fake.proc) is None


@pytest.mark.parametrize("name", ["memory_max", "memory_high"])
def test_memory_is_what_the_narrowest_group_has_left(fake: FakeMachine, name: str) -> None:
    fake.mount("cgroup", 2, "/service/part")
    fake.put_all("cgroup/service/part", memory_max="max", memory_high="max", memory_current=str(10 * MIB))
    fake.put_all("cgroup/service", memory_current=str(300 * MIB), **{name: str(1000 * MIB)})
    assert free_memory(fake.proc) == 700 * MIB
    stat = f"anon {100 * MIB}\ninactive_file {50 * MIB}"
    fake.put_all("cgroup/service", memory_stat=stat)
    assert free_memory(fake.proc) == 750 * MIB
    fake.put_all("cgroup/service", memory_current=str(2000 * MIB))
    assert free_memory(fake.proc) == 0


def test_memory_of_version_1(fake: FakeMachine) -> None:
    fake.mount("memory", 1, "/a/b", controllers="memory")
    unlimited = str(2**63 - 4096)
    fake.put_all("memory/a/b", memory_limit_in_bytes=unlimited, memory_usage_in_bytes=str(5 * MIB))
    assert free_memory(fake.proc) == 4096 * MIB
    fake.put_all("memory/a", memory_limit_in_bytes=str(600 * MIB), memory_usage_in_bytes=str(500 * MIB))
    fake.put_all("memory/a", memory_stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}")
    assert free_memory(fake.proc) == 120 * MIB


@pytest.mark.parametrize(
    ("siblings", "threads", "why"),
    [
        (["0", "1", "2", "3"], 4, "all usable cores"),
        (["0,2", "1,3", "0,2", "1,3"], 2, "one a core of 4 usable hardware threads"),
        (["0-1", "0-1"], 2, "all usable cores"),
    ],
)
def test_one_thread_a_core_unless_there_is_only_one(
    fake: FakeMachine, monkeypatch: pytest.MonkeyPatch, siblings: list[str], threads: int, why: str
) -> None:
    use(monkeypatch, len(siblings))
    assert choose_threads(fake.proc, cores(fake, *siblings)) == (threads, why)


@pytest.mark.parametrize(
    ("quota", "threads", "why"),
    [
        ("800000", 4, "all usable cores"),
        ("300000", 3, "the control group grants 3 cores"),
        ("250000", 2, "the control group grants 2.5 cores"),
        ("50000", 1, "the control group grants 0.5 cores"),
    ],
)
def test_no_more_threads_than_the_quota_feeds(
    fake: FakeMachine, monkeypatch: pytest.MonkeyPatch, quota: str, threads: int, why: str
) -> None:
    use(monkeypatch, 4)
    fake.mount("cgroup", 2, "/")
    fake.put_all("cgroup", cpu_max=f"{quota} 100000")
    assert choose_threads(fake.proc, cores(fake, "0", "1", "2", "3")) == (threads, why)


def test_the_real_machine_has_cores_and_memory() -> None:
    threads, why = choose_threads()
    assert 1 <= threads <= (os.cpu_count() or 1)
    assert why
    assert 0 < free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_affinity_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 1)
    assert choose_threads()[0] == 1
