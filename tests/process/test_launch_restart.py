"""What the launcher does about silence, and how it replaces a worker: processes that play small roles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.process.launching import Serving, eventually

TIMEOUT = {"heartbeat_timeout": 6.0}
"""Silence is reported after 3 s then, and ends a process after 6."""
RESTART = {"scheduler": "role_scheduler"}

Launch = Callable[..., Serving]


def restarting(launch: Launch, roles: dict[str, str] | None = None, **more: Any) -> Serving:
    config = {"restart_worker": True, **more.pop("config", {})}
    return launch({**RESTART, **(roles or {})}, config=config, **more).ready()


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_silence_is_reported_once_and_so_is_its_end(launch: Launch, role: str) -> None:
    serving = launch(config=TIMEOUT).ready()
    client = serving.connect()
    assert client.line()["told"] == "Serve"
    pid = serving.pid(role)
    os.kill(pid, signal.SIGSTOP)
    message = f"{role} has not been heard for 3 s"
    assert client.line() == {"told": "Trouble", "message": message}
    os.kill(pid, signal.SIGCONT)
    assert client.line() == {"told": "Trouble", "message": ""}
    assert serving.prints(f"{role} is heard again after ")
    assert serving.output.count(f"{message}; it is killed after 6 s (--heartbeat-timeout)") == 1
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    client.close()
    assert serving.exit_code() == 0
    assert serving.nothing_left()


def test_two_that_are_silent_are_both_named(launch: Launch) -> None:
    serving = launch(config=TIMEOUT).ready()
    client = serving.connect()
    client.line()
    pids = [serving.pid("worker"), serving.pid("tokenizer")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    last = client.line()["message"]
    if ";" not in last:
        last = client.line()["message"]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert sorted(last.split("; ")) == [
        "tokenizer has not been heard for 3 s",
        "worker has not been heard for 3 s",
    ]
    client.close()


def test_a_silent_server_is_reported_in_the_log(launch: Launch) -> None:
    serving = launch(config=TIMEOUT).ready()
    pid = serving.pid("server")
    os.kill(pid, signal.SIGSTOP)
    assert serving.prints("server has not been heard for 3 s; it is killed after 6 s")
    os.kill(pid, signal.SIGCONT)
    assert serving.prints("server is heard again after ")


def test_a_silent_server_is_killed(launch: Launch) -> None:
    serving = launch(config=TIMEOUT).ready()
    os.kill(serving.pid("server"), signal.SIGSTOP)
    assert serving.exit_code() == 1
    assert "server was killed: no heartbeat for 6 s" in serving.output
    assert serving.nothing_left()


def test_a_launcher_that_was_stopped_accuses_nobody(launch: Launch) -> None:
    serving = launch(config=TIMEOUT).ready()
    family = sorted(p.pid for p in serving.alive())
    for seconds in (3.5, 8.0):
        with serving.stopped():
            time.sleep(seconds)
        time.sleep(1.0)
    assert "heard" not in serving.output
    assert sorted(p.pid for p in serving.alive()) == family
    serving.process.send_signal(signal.SIGTERM)
    assert serving.exit_code() == 0


def test_a_dead_worker_is_replaced_and_everybody_hears_of_it(launch: Launch) -> None:
    serving = restarting(launch, env={"ROLE_SCHEDULER_WAITS": "1"})
    client = serving.connect()
    assert client.line()["max_request_tokens"] == 48
    others = {role: serving.pid(role) for role in ("server", "tokenizer", "scheduler")}
    died = "killed by signal 9 (SIGKILL; the system may be out of memory)"
    name = "worker"
    for index in (1, 2):
        os.kill(serving.pid("worker"), signal.SIGKILL)
        restart, trouble = client.line(), client.line()
        assert restart == {"told": "Restart", "index": index, "message": f"{name} died: {died}"}
        assert trouble["message"] == f"{name} died: {died}; another one is being started"
        serve, well = client.line(), client.line()
        name = f"worker {index}"
        assert (serve["told"], serve["max_request_tokens"]) == ("Serve", 48 + index)
        assert well == {"told": "Trouble", "message": ""}
        assert serving.prints(f"{name} is ready")
    assert {role: serving.pid(role) for role in others} == others
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    client.close()
    assert serving.exit_code() == 0
    assert serving.nothing_left()


def test_a_new_worker_has_the_device_of_the_first(launch: Launch) -> None:
    """All was sized for it: a GPU that has gone must not become a CPU that is asked for as much."""
    serving = restarting(launch, env={"ROLE_SCHEDULER_WAITS": "1"})
    client = serving.connect()
    first = client.line()
    assert (first["facts"]["device"], first["device"]) == ("auto", "cuda")
    os.kill(serving.pid("worker"), signal.SIGKILL)
    lines = [client.line() for _ in range(4)]
    (serve,) = (line for line in lines if line["told"] == "Serve")
    assert (serve["facts"]["device"], serve["device"]) == ("cuda", "cuda")
    client.close()


def test_a_silent_worker_is_replaced(launch: Launch) -> None:
    serving = restarting(launch, config=TIMEOUT)
    first = serving.pid("worker")
    os.kill(first, signal.SIGSTOP)
    assert serving.prints("worker was killed: no heartbeat for 6 s")
    assert serving.prints("worker 1 is ready")
    assert serving.pid("worker") != first


def test_the_fourth_death_within_a_minute_is_the_end(launch: Launch) -> None:
    serving = restarting(launch)
    for index in range(1, 4):
        os.kill(serving.pid("worker"), signal.SIGKILL)
        assert serving.prints(f"worker {index} is ready")
    client = serving.connect()
    client.line()
    os.kill(serving.pid("worker"), signal.SIGKILL)
    assert serving.exit_code() == 1
    last = client.line()
    while (line := client.line()) != {}:
        last = line
    client.close()
    assert last["told"] == "Died"
    assert "worker 3 died: killed by signal 9" in serving.output
    assert "3 others had been replaced within 60 s" in serving.output
    assert serving.nothing_left()


def test_a_worker_that_fails_again_and_again_is_the_end(launch: Launch) -> None:
    env = {"ROLE_ENDS": "raise", "ROLE_ENDS_READY": ""}
    serving = restarting(launch, {"worker": "role_ends"}, env=env)
    serving.go()
    assert serving.exit_code() == 1
    assert serving.output.count("another one is being started") == 3
    assert serving.output.count("ZeroDivisionError: seven by nothing") == 4
    assert serving.nothing_left()


def test_a_new_worker_that_cannot_start_is_the_end(launch: Launch) -> None:
    serving = restarting(launch, {"worker": "role_first"})
    os.kill(serving.pid("worker"), signal.SIGKILL)
    assert serving.exit_code() in (1, 2)
    assert "tensor layers.7.wq is missing" in serving.output
    assert serving.output.count("another one is being started") == 1
    assert serving.nothing_left()


@pytest.mark.parametrize("role", ["scheduler", "tokenizer", "server"])
def test_no_other_process_is_replaced(launch: Launch, role: str) -> None:
    serving = restarting(launch)
    os.kill(serving.pid(role), signal.SIGKILL)
    assert serving.exit_code() == 1
    assert f"{role} died" in serving.output
    assert serving.nothing_left()


def test_no_worker_is_replaced_while_draining(launch: Launch) -> None:
    serving = restarting(launch, env={"ROLE_SERVER": "busy"})
    client = serving.connect()
    client.line()
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    os.kill(serving.pid("worker"), signal.SIGKILL)
    assert serving.exit_code() == 1
    client.close()
    assert serving.nothing_left()


def test_a_signal_while_the_worker_is_replaced_ends_it(launch: Launch) -> None:
    serving = restarting(launch, env={"ROLE_SCHEDULER_WAITS": "60"})
    os.kill(serving.pid("worker"), signal.SIGKILL)
    assert serving.prints("another one is being started")
    assert eventually(lambda: any(p.cmdline()[4:5] == ["worker"] for p in serving.alive()))
    serving.process.send_signal(signal.SIGTERM)
    assert serving.exit_code() == 0
    assert serving.nothing_left()
