"""Ranks of a worker under the launcher: they start, die and are replaced as one. Processes of small roles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.process.launching import Serving, eventually

RESTART = {"scheduler": "role_scheduler"}
TWO = {"tensor_parallel_size": 2}

Launch = Callable[..., Serving]


def launched(launch: Launch, restarting: bool = True, **more: Any) -> Serving:
    config = {**TWO, "restart_worker": restarting, **more.pop("config", {})}
    return launch(RESTART if restarting else {}, config=config, **more).ready()


def ranks(serving: Serving) -> list[int]:
    """The process ids of the worker's ranks, in order."""
    found = [p for p in serving.alive() if p.cmdline()[4:5] == ["worker"]]
    first = [p.pid for p in found if not p.cmdline()[7:]]
    second = [p.pid for p in found if p.cmdline()[7:] == ["rank=1"]]
    assert len(first) == len(second) == 1, found
    return first + second


def died(name: str) -> str:
    return f"{name} died: killed by signal 9 (SIGKILL; the system may be out of memory)"


def test_the_death_of_a_rank_is_the_end_of_all(launch: Launch) -> None:
    serving = launched(launch, restarting=False)
    client = serving.connect()
    client.line()
    os.kill(ranks(serving)[1], signal.SIGKILL)
    assert client.line() == {"told": "Died", "message": died("worker rank 1")}
    client.close()
    assert serving.exit_code() == 1
    assert serving.nothing_left()


def test_a_dead_rank_is_replaced_with_the_others(launch: Launch) -> None:
    serving = launched(launch, env={"ROLE_SCHEDULER_WAITS": "1"})
    client = serving.connect()
    assert client.line()["told"] == "Serve"
    (folder,) = serving.temporary.iterdir()
    family = {p.pid for p in serving.alive()}
    for index, rank, name in ((1, 1, "worker rank 1"), (2, 0, "worker 1")):
        before = ranks(serving)
        os.kill(before[rank], signal.SIGKILL)
        assert client.line() == {"told": "Restart", "index": index, "message": died(name)}
        assert client.line()["message"] == f"{died(name)}; another one is being started"
        assert (client.line()["told"], client.line()["message"]) == ("Serve", "")
        assert serving.prints(f"worker {index} is ready")
        assert not set(before) & set(ranks(serving))
        family = {p.pid for p in serving.alive()} & family
        assert folder.is_dir(), "a rank has taken the sockets along"
    assert len(family) == 4 + 1  # grammar, scheduler, tokenizer, server; the launcher
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    client.close()
    assert serving.exit_code() == 0
    assert serving.nothing_left()


def test_ranks_that_die_together_count_once(launch: Launch) -> None:
    """Three workers are replaced within a minute, however many ranks they had."""
    serving = launched(launch)
    for index in range(1, 4):
        with serving.stopped():
            for pid in ranks(serving):
                os.kill(pid, signal.SIGKILL)
        assert serving.prints(f"worker {index} is ready")
    os.kill(ranks(serving)[1], signal.SIGKILL)
    assert serving.exit_code() == 1
    assert serving.output.count("another one is being started") == 3
    assert "worker 3 rank 1 died: killed by signal 9" in serving.output
    assert serving.nothing_left()


def test_a_silent_rank_is_replaced_with_the_others(launch: Launch) -> None:
    serving = launched(launch, config={"heartbeat_timeout": 6.0})
    before = ranks(serving)
    os.kill(before[1], signal.SIGSTOP)
    assert serving.prints("worker rank 1 was killed: no heartbeat for 6 s")
    assert serving.prints("worker 1 is ready")
    assert not set(before) & set(ranks(serving))


def test_the_rank_that_died_is_named_not_the_one_that_lost_it(launch: Launch) -> None:
    """Even if the launcher sees both only when they have ended."""
    serving = launch({"worker": "role_lost"}, config={**TWO, "heartbeat_timeout": 30.0}).ready()
    client = serving.connect()
    client.line()
    dying = [psutil.Process(pid) for pid in ranks(serving)]
    with serving.stopped():
        serving.go()
        assert eventually(lambda: all(p.status() == psutil.STATUS_ZOMBIE for p in dying))
    assert client.line() == {"told": "Died", "message": died("worker rank 1")}
    client.close()
    assert serving.exit_code() == 1
    assert serving.nothing_left()


def test_a_rank_that_cannot_start_is_the_end(launch: Launch) -> None:
    began = time.monotonic()
    serving = launch({"worker": "role_ends"}, {"ROLE_ENDS": "refuse"}, config=TWO)
    assert serving.exit_code() == 2
    assert serving.output.count("tensor layers.7.wq is missing") == 1
    assert time.monotonic() - began < 10
    assert eventually(serving.nothing_left)
