"""One model in two and three processes, over gloo: exact in itself, near the whole, and dead as one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import sapwood
from bench import exactness
from sapwood.srt.errors import ConfigError
from sapwood.srt.lifeline import FATAL_EXIT
from sapwood.srt.worker import ranks as ranks_module
from sapwood.srt.worker.ranks import Ranks
from tests.models import tiny_llama
from tests.process.test_restart_worker import Streams, answer, ids, settled, wait_for
from tests.serving import Server, command, held, serve

ROOT = Path(sapwood.__file__).resolve().parent.parent
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2, "max_total_tokens": 100_000, "speculative_algorithm": "none",
}  # fmt: skip
THREE_HEADS = {
    "intermediate_size": 200, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144,
}  # fmt: skip
"""Shared unevenly by two: one KV head and two."""

TOGETHER = """
import os, socket, sys, time, threading
from pathlib import Path
import psutil, torch
from sapwood.srt.errors import RankLost
from sapwood.srt.worker.ranks import Ranks

def listed(*_given):
    raise AssertionError("NCCL gathers a list of tensors into memory of its own first")
torch.distributed.all_gather = listed
rank, size = int(sys.argv[1]), int(sys.argv[2])
mine = socket.create_server(("127.0.0.1", 0))
group = Ranks(rank, size, Path(sys.argv[3]), torch.device("cpu"), print)
for connection in psutil.Process().net_connections("inet"):
    if connection.status == "LISTEN":
        try:
            socket.create_connection(connection.laddr, timeout=0.3).close()
            print("answers", connection.laddr == mine.getsockname(), flush=True)
        except TimeoutError:
            print("silent", flush=True)
mine.close()
for m in (1, 300, 2):
    parts = [torch.randn(m, 70, generator=torch.Generator().manual_seed(100 * m + r)) for r in range(size)]
    wanted = parts[0].clone()
    for part in parts[1:]:
        wanted += part
    own = parts[rank].clone()
    group.sum(own)
    assert torch.equal(own, wanted), "in rank order"
    widths = [64, 17, 3][:size]
    whole, part = torch.full((m, sum(widths)), -1.0), torch.full((m, widths[rank]), float(rank))
    group.gather(part, widths, whole)
    assert whole.tolist() == [[float(r) for r, width in enumerate(widths) for _ in range(width)]] * m
ids = torch.arange(5, dtype=torch.int32) + 10 * (rank == 0)
group.broadcast(ids)
assert ids.tolist() == [10, 11, 12, 13, 14]
assert group.smallest(7 - rank) == 8 - size
assert group.smallest(2**40 + rank) == 2**40
for connection in psutil.Process().net_connections("inet"):
    print("socket", connection.laddr.ip, flush=True)
def heard(other):
    return Path(f"{sys.argv[3]}-{other}-beats")
waits = threading.Event()
def beat():
    waits.wait()
    for _ in range(50):
        time.sleep(0.01)
    heard(rank).touch()
threading.Thread(target=beat, daemon=True).start()
if rank == 1:
    while not all(heard(other).exists() for other in range(size) if other != 1):
        time.sleep(0.01)
    os._exit(0)
try:
    group.broadcast(torch.zeros(1, 70).to_sparse())
except RankLost:
    print("an error of our own is no lost rank", flush=True)
except RuntimeError:
    pass
waits.set()
try:
    group.sum(torch.zeros(1, 70))
except RankLost as e:
    print("lost:", e.message, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_tell_each_other(tmp_path: Path, size: int) -> None:
    """Sums in rank order to the bit, columns of uneven widths, rank 0's values; no socket that others reach,
    and no answer to strangers of this machine; other threads run on while one rank waits (or rank 1 would not
    end); a dead rank is told at once, and nothing else is taken for one."""
    argv = [sys.executable, "-W", "error", "-c", TOGETHER]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "nonsense"}
    began = time.monotonic()
    ran = [
        subprocess.Popen(
            [*argv, str(rank), str(size), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=60)[0] for process in ran]
    finally:
        for process in ran:
            process.kill()
    assert time.monotonic() - began < 30
    for rank, output in enumerate(outputs):
        sockets = [line.split()[1] for line in output.splitlines() if line.startswith("socket")]
        assert sockets, output
        assert all(ipaddress.ip_address(address).is_loopback for address in sockets), output
        doors = [line for line in output.splitlines() if line.startswith(("answers", "silent"))]
        assert sorted(doors) == ["answers True", "silent"], output
        others = [
            line for line in output.splitlines() if not line.startswith(("socket", "answers", "silent"))
        ]
        if rank == 1:
            assert others == []
        else:
            (line,) = others
            assert line.startswith(
                "lost: the ranks have lost each other: Connection closed by peer [127.0.0.1]:"
            )
            assert "/" not in line
            assert "GLHF" not in line


MEETING = """
import sys, time
from pathlib import Path
import torch
from sapwood.srt.orders import Boot
from sapwood.srt.worker import ranks
from sapwood.srt.config import make

boot = Boot(make(tensor_parallel_size=2), None, sys.argv[1], "worker", 0, 0)
began = time.monotonic()
try:
    with ranks.joined(boot, torch.device("cpu"), None):
        pass
except ranks.ConfigError as e:
    print(time.monotonic() - began < ranks.LOST_SECONDS, e.message)
"""


@pytest.mark.parametrize(
    ("transport", "said"),
    [("", "No space left on device"), ("PIGEONS", "unsupported gloo device")],
    ids=["disk", "transport"],
)
def test_ranks_that_cannot_meet_say_where_at_once(tmp_path: Path, transport: str, said: str) -> None:
    """A full disk, or a wish that gloo cannot fulfil, is no lost rank."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if transport:
        env["GLOO_DEVICE_TRANSPORT"] = transport
    else:
        (tmp_path / "ranks-0").symlink_to("/dev/full")
    argv = [sys.executable, "-W", "error", "-c", MEETING, str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert ran.stdout.startswith(f"True the ranks cannot meet in {tmp_path}: "), ran.stdout + ran.stderr
    assert said in ran.stdout
    assert "; set TMPDIR if" in ran.stdout


SILENT = """
import logging, sys, time
import torch
from sapwood.srt.orders import Boot
from sapwood.srt.worker import ranks
from sapwood.srt.config import make

class Lifeline:
    def fatal(self, *told, **more):
        print("fatal:", *told, more, flush=True)

logging.basicConfig(stream=sys.stdout, format="%(message)s")
ranks.TOLD_SECONDS, ranks.EXCHANGE_SECONDS = 0.2, 1.0
rank = int(sys.argv[2])
if rank:
    ranks.Ranks.smallest = lambda self, value: time.sleep(60)
boot = Boot(make(tensor_parallel_size=2), None, sys.argv[1], "worker", 0, rank)
with ranks.joined(boot, torch.device("cpu"), Lifeline()):
    pass
"""


def test_ranks_that_meet_and_then_hear_nothing_say_so_and_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-W", "error", "-c", SILENT, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = [
        subprocess.Popen([*argv, str(rank)], stdout=subprocess.PIPE, text=True, env=env) for rank in range(2)
    ]
    try:
        output = ran[0].communicate(timeout=40)[0]
        assert ran[0].returncode == FATAL_EXIT
    finally:
        for process in ran:
            process.kill()
            process.wait()
    told = [
        line for line in output.splitlines() if "the first exchange between ranks over gloo takes" in line
    ]
    assert len(told) >= 3, "and again"
    assert told[-1].startswith("fatal: ")
    assert "'expected': True" in told[-1]


def test_ranks_on_gpus_exchange_something_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say what may help while that takes long."""
    monkeypatch.setattr(ranks_module, "TOLD_SECONDS", 0.05)
    monkeypatch.setattr(ranks_module, "EXCHANGE_SECONDS", 0.1)
    monkeypatch.setattr(Ranks, "_meet", lambda self, meeting: None)
    told: list[str] = []

    def smallest(self: Ranks, value: int) -> int:
        wait_for(lambda: told)
        return value

    monkeypatch.setattr(Ranks, "smallest", smallest)
    for name in ranks_module.INTERFACES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    Ranks(0, 2, tmp_path / "meeting", torch.device("cuda", 0), told.append)
    (words,) = told
    assert words.startswith("the first exchange between ranks over NCCL takes ")
    assert "NCCL_DEBUG=INFO" in words
    assert "NCCL_P2P_DISABLE=1" in words


def test_a_machine_without_a_loopback_interface_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lowpan0"), (2, "eth0")])
    with pytest.raises(ConfigError, match=r"loopback interface, and there is none among .*eth0"):
        ranks_module._loopback()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("m"), max_position_embeddings=32768, **THREE_HEADS)


def test_two_ranks_are_exact_in_themselves(model: Path) -> None:
    """Cold, warm, side by side, in other chunks, drafted, retracted: `==`."""
    names = ["greedy", "all of it"]
    samplings = exactness.chosen_samplings(",".join(names))
    comparison = exactness.Comparison(samplings, exactness.prompts(5, 331), 4)
    common: dict[str, Any] = {"model_path": str(model), "context_length": 1024, "tensor_parallel_size": 2}
    with exactness.running(**common, speculative_algorithm="none") as runtime:
        comparison.baseline(runtime)
    with exactness.running(
        **common, max_total_tokens=comparison.tiny_pool, chunked_prefill_size=64
    ) as runtime:
        comparison.run_drafts("drafts", runtime)
        comparison.run_tiny(runtime)
    table = comparison.table
    assert table.total("differ") == 0
    assert table.total("retracted") > 0
    assert table.total("accepted") > 0


def test_ranks_say_what_one_worker_says(model: Path) -> None:
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    prompts = [ids(n, n) for n in (3, 40, 300)]
    answers = []
    for size in (1, 2, 3):
        with sapwood.Engine(str(model), tensor_parallel_size=size, max_total_tokens=4000) as engine:
            got = engine.generate(input_ids=prompts, sampling_params=params)
            answers.append([one["output_ids"] for one in got])
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def ranks(server: Server) -> dict[int, psutil.Process]:
    """The worker's processes by rank."""
    found = {}
    for child in psutil.Process(server.launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            argv = child.cmdline()
            if "sapwood.srt.worker.loop" in argv:
                found[int(argv[-1].removeprefix("rank=")) if argv[-1].startswith("rank=") else 0] = child
    return found


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = {"heartbeat_timeout": 8, "restart_worker": True}
    with serve(model, tmp_path_factory.mktemp("s"), **TWO_RANKS, **flags) as running:
        yield running


@pytest.mark.parametrize(
    ("rank", "how", "told"),
    [
        (1, signal.SIGKILL, "worker rank 1 died: killed by signal 9"),
        (0, signal.SIGKILL, "worker 1 died: killed by signal 9"),
        (1, signal.SIGSTOP, "worker 2 rank 1 was killed: no heartbeat for 8 s"),
    ],
)
def test_a_lost_rank_ends_what_runs_and_all_ranks_are_replaced(
    server: Server, rank: int, how: signal.Signals, told: str
) -> None:
    before = answer(server)
    family = ranks(server)
    assert sorted(family) == [0, 1]
    streams = Streams(server, 4)
    family[rank].send_signal(how)
    streams.join()
    for last, end in streams.ends:
        assert end == "[DONE]"
        assert last["error"]["code"] == "process_died"
        assert last["error"]["message"].startswith(told), last
    assert len(streams.ends) == 4
    _gone, alive = psutil.wait_procs(family.values(), timeout=10)
    assert not alive
    wait_for(lambda: sorted(ranks(server)) == [0, 1])
    wait_for(lambda: server.post("/generate", {"input_ids": [3]}).is_success)
    assert answer(server) == before
    settled(server)
    assert "Traceback" not in server.output.read_text()


def test_a_dead_rank_is_the_end_without_a_restart(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, **TWO_RANKS) as server:
        family = psutil.Process(server.launcher.pid).children(recursive=True)
        streams = Streams(server, 4)
        # However late the launcher looks, it tells of the rank that died, not of the one that it took along.
        server.launcher.send_signal(signal.SIGSTOP)
        ranks(server)[1].kill()
        time.sleep(1.5)
        began = time.monotonic()
        server.launcher.send_signal(signal.SIGCONT)
        streams.join()
        assert server.launcher.wait(20) == 1
        assert time.monotonic() - began < 6
        _gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        for last, end in streams.ends:
            assert end == "[DONE]"
            assert last["error"]["message"].startswith("worker rank 1 died: killed by signal 9"), last
        assert len(streams.ends) == 4
        output = server.output.read_text()
        assert "Traceback" not in output
        assert "Gloo" not in output
        assert output.count("died") == 1


def test_a_signal_drains_what_runs(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path, **TWO_RANKS) as server:
        family = psutil.Process(server.launcher.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool:
            with held(*ranks(server).values()):
                running = pool.submit(server.generate, ids(20, 1), max_new_tokens=300)
                wait_for(lambda: server.state()["running"])
                server.launcher.send_signal(signal.SIGTERM)
                wait_for(lambda: "finishing what runs" in server.output.read_text())
            assert len(running.result(60)["output_ids"]) == 300
        assert server.launcher.wait(20) == 0
        _gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        assert "Traceback" not in server.output.read_text()


@pytest.mark.parametrize("size", [4, 7])
def test_more_ranks_than_the_model_has_parts_are_refused_at_once(
    model: Path, tmp_path: Path, size: int
) -> None:
    argv = command(model, port=0, tensor_parallel_size=size)
    ran = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False)
    assert ran.returncode == 2
    assert f"--tensor-parallel-size {size} does not fit 9 query heads on 3 KV heads" in ran.stderr
    assert "worker" not in ran.stderr + ran.stdout
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        sapwood.Engine(str(model), tensor_parallel_size=size)
