"""The launcher's promises, with real processes that play small roles (tests/process/roles)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.launching import FAR, PATIENCE, Serving, Telling, eventually


def test_ready_is_told_with_what_every_process_chose(launch: Callable[..., Serving]) -> None:
    serving = launch(config={"tokenizer_workers": 2}).ready()
    roles = sorted(p.cmdline()[4] for p in serving.alive() if "sapwood.srt.lifeline" in p.cmdline())
    assert roles == ["grammar", "scheduler", "server", "tokenizer", "tokenizer", "worker"]
    for fact in (
        "worker 0",
        "scheduler 0",
        "tokenizer 0",
        "tokenizer 1",
        "one line",
        "LlamaForCausalLM",
        "lpm, steps of at most 2048 tokens and 256 rows",  # on a GPU, as the worker says
    ):
        assert fact in serving.output
    client = serving.connect()
    told = client.line()
    client.close()
    assert (told["told"], told["max_request_tokens"]) == ("Serve", 48)
    assert told["facts"]["worker 0"] == "idle"


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer", "grammar", "server"])
def test_a_killed_process_ends_the_whole(launch: Callable[..., Serving], role: str) -> None:
    serving = launch(eventful=True).ready()
    client = serving.connect()
    client.line()
    os.kill(serving.pid(role), signal.SIGKILL)
    last = client.line()
    client.close()
    assert serving.exit_code() == 1
    assert serving.nothing_left()
    assert f"{role} died: killed by signal 9 (SIGKILL" in serving.output
    if role != "server":
        assert last["told"] == "Died"
        assert f"{role} died" in last["message"]


def test_a_server_that_does_not_end_after_a_death_is_ended(launch: Callable[..., Serving]) -> None:
    serving = launch(env={"ROLE_SERVER": "stubborn"}).ready()
    began = time.monotonic()
    os.kill(serving.pid("scheduler"), signal.SIGKILL)
    assert serving.exit_code() == 1
    assert 3.0 < time.monotonic() - began < 7.0
    assert serving.nothing_left()


@pytest.mark.parametrize("how", ["stopped", "deaf"])
def test_a_silent_process_is_killed(launch: Callable[..., Serving], how: str) -> None:
    roles = {"worker": "role_deaf"} if how == "deaf" else {}
    serving = launch(roles, config={"heartbeat_timeout": 6.0}).ready()
    if how == "stopped":
        os.kill(serving.pid("worker"), signal.SIGSTOP)
    assert serving.exit_code() == 1
    assert "worker was killed: no heartbeat for 6 s (--heartbeat-timeout)" in serving.output
    assert serving.nothing_left()


def test_a_process_that_returns_unasked_counts_as_dead(launch: Callable[..., Serving]) -> None:
    env = {"ROLE_ENDS": "return", "ROLE_ENDS_READY": ""}
    serving = launch({"tokenizer": "role_ends"}, env).ready()
    serving.go()
    assert serving.exit_code() == 1
    assert "tokenizer died: exit code 0" in serving.output
    assert serving.nothing_left()


@pytest.mark.parametrize(
    ("manner", "code", "text"),
    [
        ("refuse", 2, "error: tensor layers.7.wq is missing from model.safetensors"),
        ("raise", 1, "ZeroDivisionError: seven by nothing"),
        ("exit", 1, "scheduler died: exit code 7"),
    ],
)
def test_a_start_that_fails_says_why(
    launch: Callable[..., Serving], manner: str, code: int, text: str
) -> None:
    serving = launch({"scheduler": "role_ends", "worker": "role_never_ready"}, {"ROLE_ENDS": manner})
    assert serving.exit_code() == code
    assert text in serving.output
    assert ("Traceback" in serving.output) == (manner == "raise")
    assert serving.nothing_left()


@pytest.mark.parametrize(
    ("manner", "told", "logged"),
    [
        ("refuse", "worker died: tensor layers.7.wq is missing", ""),
        ("raise", "worker died: exit code 3", "ZeroDivisionError: seven by nothing"),
    ],
)
def test_clients_hear_of_a_failure_but_see_no_traceback(
    launch: Callable[..., Serving], manner: str, told: str, logged: str
) -> None:
    serving = launch({"worker": "role_ends"}, {"ROLE_ENDS": manner, "ROLE_ENDS_READY": ""}).ready()
    client = serving.connect()
    client.line()
    serving.go()
    last = client.line()
    client.close()
    assert last["message"].startswith(told)
    assert "Traceback" not in last["message"]
    assert serving.exit_code() == 1
    assert f"error: {told}" in serving.output
    assert logged in serving.output


def test_what_a_silent_process_had_started_is_killed_with_it(launch: Callable[..., Serving]) -> None:
    env = {"ROLE_ENDS": "leave a child", "ROLE_ENDS_READY": ""}
    serving = launch({"worker": "role_ends"}, env, config={"heartbeat_timeout": 6.0}).ready()
    serving.go()
    assert eventually(lambda: any(p.name() == "sleep" for p in serving.alive()))
    os.kill(serving.pid("worker"), signal.SIGSTOP)
    assert serving.exit_code() == 1
    assert serving.nothing_left(PATIENCE)  # nobody waits for what is no child of the launcher's


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(launch: Callable[..., Serving], number: signal.Signals) -> None:
    serving = launch(config={"drain_timeout": 7.0}).ready()
    client = serving.connect()
    assert client.line()["told"] == "Serve"
    port = serving.port
    serving.process.send_signal(number)
    assert client.line() == {"told": "Drain", "seconds": 7.0}
    with pytest.raises(ConnectionRefusedError):
        Telling(port)
    client.close()
    assert serving.exit_code() == 0
    assert serving.nothing_left()


def test_a_signal_to_all_processes_drains_too(launch: Callable[..., Serving]) -> None:
    serving = launch().ready()
    client = serving.connect()
    client.line()
    for process in serving.alive():
        process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    client.close()
    assert serving.exit_code() == 0
    assert serving.nothing_left()


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_stops_at_once(
    launch: Callable[..., Serving], second: signal.Signals, code: int
) -> None:
    serving = launch(env={"ROLE_SERVER": "busy"}, eventful=True).ready()
    client = serving.connect()
    client.line()
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    serving.process.send_signal(second)
    assert serving.exit_code() == code
    client.close()
    assert serving.nothing_left()


def test_a_server_that_overstays_its_drain_is_ended(launch: Callable[..., Serving]) -> None:
    serving = launch(env={"ROLE_SERVER": "busy"}, config={"drain_timeout": 0.5}, grace=0.5).ready()
    began = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.exit_code() == 1
    assert 1.0 < time.monotonic() - began < 5.0
    assert serving.nothing_left()


def test_a_death_while_draining_is_still_told(launch: Callable[..., Serving]) -> None:
    serving = launch(env={"ROLE_SERVER": "busy"}).ready()
    client = serving.connect()
    client.line()
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    os.kill(serving.pid("worker"), signal.SIGKILL)
    assert serving.exit_code() == 1
    client.close()
    assert "worker died" in serving.output
    assert serving.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["resolving", "loading", "spawning"])
def test_a_signal_during_start_up_ends_it_at_once(
    launch: Callable[..., Serving], when: str, number: signal.Signals
) -> None:
    seconds = FAR if when == "resolving" else 0
    serving = launch({"worker": "role_never_ready"}, resolve_seconds=seconds, eventful=True)
    assert serving.prints("worker loads" if when == "loading" else "resolving")
    serving.process.send_signal(number)
    assert serving.exit_code() == 0
    assert "Traceback" not in serving.output
    assert serving.nothing_left()


@pytest.mark.parametrize("when", ["idle", "loading", "stopped", "deaf"])
def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Serving], when: str) -> None:
    serving = launch(
        {"loading": {"worker": "role_never_ready"}, "deaf": {"worker": "role_deaf"}}.get(when, {})
    )
    if when == "loading":
        assert serving.prints("worker loads")
        assert eventually(lambda: len(serving.alive()) == 6)
    else:
        serving.ready()
    client = serving.connect() if when == "idle" else None
    if when == "stopped":
        os.kill(serving.pid("tokenizer"), signal.SIGSTOP)
    time.sleep(0.4)
    serving.process.kill()
    serving.exit_code()
    assert serving.nothing_left(PATIENCE), [p.cmdline() for p in serving.alive()]
    if client is not None:
        assert [client.line().get("told") for _ in range(3)] == ["Serve", "orphaned", None]
        client.close()


def test_a_busy_port_is_told_at_once_and_its_server_goes_on(launch: Callable[..., Serving]) -> None:
    first = launch().ready()
    port = first.port
    second = launch(config={"port": port}, resolve_seconds=FAR)
    assert second.exit_code() == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in second.output
    client = first.connect()
    assert client.line()["told"] == "Serve"
    client.close()
    first.process.kill()
    first.exit_code()
    assert first.nothing_left(PATIENCE)
    third = launch(config={"port": port}).ready()
    assert third.port == port


def test_the_working_directory_shadows_nothing(launch: Callable[..., Serving], tmp_path: Path) -> None:
    for name in ("kernels", "lang", "numpy", "sapwood", "queue", "zmq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    serving = launch().ready()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.exit_code() == 0
