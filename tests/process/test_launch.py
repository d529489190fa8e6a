"""The launcher's promises, with real processes that play small roles (tests/process/roles)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sapwood

ROLES_FOLDER = Path(__file__).parent / "roles"
ROOT = Path(sapwood.__file__).resolve().parent.parent
IDLE = {
    "server": "role_server", "tokenizer": "role_idle", "scheduler": "role_idle", "worker": "role_idle",
}  # fmt: skip
PATIENCE = 20.0


def eventually(holds: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Serving:
    """`serve` in a process of its own; every process that it starts carries its mark."""

    def __init__(
        self, where: Path, *, roles: dict[str, str], env: dict[str, str], more: dict[str, Any]
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = where / "t"
        self.temporary.mkdir(exist_ok=True)
        config = {"port": 0, "drain_timeout": 5.0, **more.pop("config", {})}
        given = json.dumps({"config": config, "roles": {**IDLE, **roles}, **more})
        path = os.pathsep.join([str(ROLES_FOLDER), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, str(ROLES_FOLDER / "launch_driver.py"), given],
            cwd=where,
            env={**os.environ, **env, "PYTHONPATH": path, "MARK": self.mark, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.output += line

    def prints(self, text: str) -> bool:
        return (
            eventually(lambda: text in self.output or self.process.poll() is not None) and text in self.output
        )

    def ready(self) -> Serving:
        assert self.prints("scheduling "), self.output
        return self

    @property
    def port(self) -> int:
        return int(self.output.partition("listening")[2].split()[0].rpartition(":")[2])

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def pid(self, role: str) -> int:
        (found,) = [p.pid for p in self.alive() if p.cmdline()[4:5] == [role]]
        return found

    def connect(self) -> Telling:
        return Telling(self.port)

    def exit_code(self, seconds: float = PATIENCE) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def nothing_left(self, seconds: float = 0.0) -> bool:
        return eventually(lambda: not self.alive(), seconds) and not list(self.temporary.iterdir())


class Telling:
    """A connection to role_server: the lines that it is told."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._lines = self._socket.makefile()

    def line(self) -> dict[str, Any]:
        text = self._lines.readline()
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(roles: dict[str, str] | None = None, env: dict[str, str] | None = None, **more: Any) -> Serving:
        started.append(Serving(tmp_path, roles=roles or {}, env=env or {}, more=more))
        return started[-1]

    yield start
    for serving in started:
        for process in serving.alive():
            process.kill()
        serving.exit_code()


def test_ready_is_told_with_what_every_process_chose(launch: Callable[..., Serving]) -> None:
    serving = launch(config={"tokenizer_workers": 2}).ready()
    roles = sorted(p.cmdline()[4] for p in serving.alive() if "sapwood.srt.lifeline" in p.cmdline())
    assert roles == ["scheduler", "server", "tokenizer", "tokenizer", "worker"]
    for fact in (
        "worker 0",
        "scheduler 0",
        "tokenizer 0",
        "tokenizer 1",
        "one line",
        "LlamaForCausalLM",
        "lpm, steps of at most 256 tokens",
    ):
        assert fact in serving.output
    client = serving.connect()
    told = client.line()
    client.close()
    assert (told["told"], told["max_request_tokens"]) == ("Serve", 48)
    assert told["facts"]["worker 0"] == "idle"


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer", "server"])
def test_a_killed_process_ends_the_whole(launch: Callable[..., Serving], role: str) -> None:
    serving = launch().ready()
    client = serving.connect()
    client.line()
    began = time.monotonic()
    os.kill(serving.pid(role), signal.SIGKILL)
    last = client.line()
    noticed = time.monotonic() - began
    client.close()
    assert serving.exit_code() == 1
    assert serving.nothing_left()
    assert f"{role} died: killed by signal 9 (SIGKILL" in serving.output
    if role != "server":
        assert last["told"] == "Died"
        assert f"{role} died" in last["message"]
        assert noticed < 1.0
    assert time.monotonic() - began < 3.0


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
    serving = launch(roles, config={"heartbeat_timeout": 4.0}).ready()
    if how == "stopped":
        os.kill(serving.pid("worker"), signal.SIGSTOP)
    began = time.monotonic()
    assert serving.exit_code() == 1
    assert time.monotonic() - began < 4.0 + 4.0
    assert "worker was killed: no heartbeat for 4 s (--heartbeat-timeout)" in serving.output
    assert serving.nothing_left()


def test_a_process_that_returns_unasked_counts_as_dead(launch: Callable[..., Serving]) -> None:
    serving = launch({"tokenizer": "role_ends"}, {"ROLE_ENDS": "return", "ROLE_ENDS_AFTER": "0.5"}).ready()
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
    serving = launch({"worker": "role_ends"}, {"ROLE_ENDS": manner, "ROLE_ENDS_AFTER": "1"}).ready()
    client = serving.connect()
    client.line()
    last = client.line()
    client.close()
    assert last["message"].startswith(told)
    assert "Traceback" not in last["message"]
    assert serving.exit_code() == 1
    assert f"error: {told}" in serving.output
    assert logged in serving.output


def test_what_a_silent_process_had_started_is_killed_with_it(launch: Callable[..., Serving]) -> None:
    env = {"ROLE_ENDS": "leave a child", "ROLE_ENDS_AFTER": "0"}
    serving = launch({"worker": "role_ends"}, env, config={"heartbeat_timeout": 4.0}).ready()
    assert eventually(lambda: any(p.name() == "sleep" for p in serving.alive()))
    os.kill(serving.pid("worker"), signal.SIGSTOP)
    assert serving.exit_code() == 1
    assert serving.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(launch: Callable[..., Serving], number: signal.Signals) -> None:
    serving = launch(config={"drain_timeout": 7.0}).ready()
    client = serving.connect()
    assert client.line()["told"] == "Serve"
    port = serving.port
    serving.process.send_signal(number)
    assert client.line() == {"told": "Drain", "seconds": 7.0}
    time.sleep(0.1)
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
    serving = launch(env={"ROLE_SERVER": "busy"}).ready()
    client = serving.connect()
    client.line()
    serving.process.send_signal(signal.SIGTERM)
    assert client.line()["told"] == "Drain"
    began = time.monotonic()
    serving.process.send_signal(second)
    assert serving.exit_code() == code
    assert time.monotonic() - began < 4.0
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
    serving = launch({"worker": "role_never_ready"}, resolve_seconds=60 if when == "resolving" else 0)
    assert serving.prints("worker loads" if when == "loading" else "resolving")
    began = time.monotonic()
    serving.process.send_signal(number)
    assert serving.exit_code() == 0
    assert time.monotonic() - began < 3.0
    assert "Traceback" not in serving.output
    assert serving.nothing_left()


@pytest.mark.parametrize("when", ["idle", "loading", "stopped", "deaf"])
def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Serving], when: str) -> None:
    serving = launch(
        {"loading": {"worker": "role_never_ready"}, "deaf": {"worker": "role_deaf"}}.get(when, {})
    )
    if when == "loading":
        assert serving.prints("worker loads")
        assert eventually(lambda: len(serving.alive()) == 5)
    else:
        serving.ready()
    client = serving.connect() if when == "idle" else None
    if when == "stopped":
        os.kill(serving.pid("tokenizer"), signal.SIGSTOP)
    time.sleep(0.4)
    serving.process.kill()
    serving.exit_code()
    assert serving.nothing_left(5.0), [p.cmdline() for p in serving.alive()]
    if client is not None:
        assert [client.line().get("told") for _ in range(3)] == ["Serve", "orphaned", None]
        client.close()


def test_a_busy_port_is_told_at_once_and_its_server_goes_on(launch: Callable[..., Serving]) -> None:
    first = launch().ready()
    port = first.port
    began = time.monotonic()
    second = launch(config={"port": port}, resolve_seconds=60)
    assert second.exit_code() == 2
    assert time.monotonic() - began < 5.0
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in second.output
    client = first.connect()
    assert client.line()["told"] == "Serve"
    client.close()
    first.process.kill()
    first.exit_code()
    assert first.nothing_left(5.0)
    third = launch(config={"port": port}).ready()
    assert third.port == port


def test_the_working_directory_shadows_nothing(launch: Callable[..., Serving], tmp_path: Path) -> None:
    for name in ("kernels", "lang", "numpy", "sapwood", "queue", "zmq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    serving = launch().ready()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.exit_code() == 0
