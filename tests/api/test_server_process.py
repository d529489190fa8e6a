"""The server as a process of its own, under the real launcher, with a scripted tokenizer for the rest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from sapwood.srt.config import Config, make
from sapwood.srt.launch import Launcher
from sapwood.srt.lifeline import ROLES
from sapwood.srt.messages import Abort, Chunk, Ended, Finish, Generate, pack
from sapwood.srt.serve import listen
from tests.api.scripted import ScriptedTokenizer, answer_aborts, source, started
from tests.api.test_chat import ASK, events

CHAT = "/v1/chat/completions"


class Running:
    """A launched server; `tokenizer` is scripted to begin requests and say nothing more."""

    def __init__(self, config: Config) -> None:
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.launcher = Launcher(config, source(), {"server": ROLES["server"]}, listener)
        self.launcher.start()
        (child,) = self.launcher._children
        self.process = psutil.Process(child.process.pid)
        self.child = child
        self.tokenizer = ScriptedTokenizer(self.launcher.directory)
        self.tokenizer.script = lambda g: [started(g), Chunk(g.rid, 0, "Pa", pack([5]))]
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=30, verify=False
        )
        self.wait_for(lambda: self.http.get("/health").status_code == 200)

    def wait_for(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "the condition has not come true"
            time.sleep(0.01)

    def streams(self, count: int) -> list[Callable[[], list[Any]]]:
        """Streams that have begun; each function waits for the end and returns the events."""
        return [self._stream() for _ in range(count)]

    def _stream(self) -> Callable[[], list[Any]]:
        response = self.http.send(
            self.http.build_request("POST", CHAT, json={**ASK, "stream": True}), stream=True
        )
        pieces = response.iter_text()
        text = next(pieces)
        return lambda: events(text + "".join(pieces))

    def close(self) -> None:
        self.http.close()
        self.launcher.close()
        self.tokenizer.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make_running(**options: Any) -> Running:
        made.append(Running(make(**options)))
        return made[-1]

    yield make_running
    for running in made:
        running.close()


def test_it_serves_and_has_no_engine_in_it(launch: Callable[..., Running]) -> None:
    running = launch()
    maps = " ".join(m.path for m in running.process.memory_maps())
    assert "zmq" in maps
    assert "torch" not in maps
    # Without TCP_NODELAY each answer on a kept connection would take 40 ms; others may delay a few of them.
    took = []
    for _ in range(21):
        began = time.monotonic()
        assert running.http.get("/live").status_code == 200
        took.append(time.monotonic() - began)
    assert sorted(took)[10] < 0.03
    _signals_alone_do_not_end_it(running)


def _signals_alone_do_not_end_it(running: Running) -> None:
    """The launcher decides: a Ctrl-C or a SIGTERM to the whole group must not cut streams off."""
    (ended,) = running.streams(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(running.process.pid, number)
    time.sleep(0.1)
    assert running.http.get("/health").status_code == 200
    aborting = answer_aborts(running.tokenizer)
    assert running.http.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 1}
    aborting.join(20)
    assert ended()[-1]["choices"][0]["finish_reason"] == "abort"


def test_it_is_not_ready_before_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server listens while the others load: /live is 200, /health and requests are 503."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    seen: list[int] = []

    def look(launcher: Launcher) -> Any:
        with httpx.Client(base_url=url, trust_env=False, verify=False) as http:
            seen.extend(http.get(path).status_code for path in ("/live", "/health", "/health_generate"))
            response = http.post(CHAT, json=ASK)
            seen.append(response.status_code)
            assert response.json()["error"]["code"] == "loading"
        return summary(launcher)

    summary = Launcher._summary
    monkeypatch.setattr(Launcher, "_summary", look)
    with Launcher(make(), source(), {"server": ROLES["server"]}, listener) as launcher:
        launcher.start()
    assert seen == [200, 503, 503, 503]


def test_drain_lets_running_requests_finish(launch: Callable[..., Running]) -> None:
    """P45: requests that run are finished, new ones are 503, the exit code is 0."""
    running = launch()
    (ended,) = running.streams(1)
    rid = running.tokenizer.wait_for(Generate)[0].rid
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(running.launcher.drain(20)))
    drain.start()
    running.wait_for(lambda: running.http.get("/health").status_code == 503)
    refused = running.http.post(CHAT, json=ASK)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert running.http.get("/live").status_code == 200
    running.tokenizer.say(
        Chunk(rid, 0, "ris", pack([6])),
        Chunk(rid, 0, "", b"", None, Finish("stop", 2, 2)),
        Ended(rid),
    )
    values = ended()
    assert "".join(c["delta"].get("content", "") for v in values for c in v["choices"]) == "Paris"
    assert values[-1]["choices"][0]["finish_reason"] == "stop"
    drain.join(20)
    assert drained == [True]
    assert running.tokenizer.received == running.tokenizer.wait_for(Generate)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", running.port))


def test_drain_aborts_what_is_left_at_the_deadline(launch: Callable[..., Running]) -> None:
    """P45: with a final chunk."""
    running = launch()
    ended = running.streams(3)

    def end_all() -> None:
        for abort in running.tokenizer.wait_for(Abort, 3):
            finish = Finish("abort", None, 1)
            running.tokenizer.say(Chunk(abort.rid, 0, "", b"", None, finish), Ended(abort.rid))

    threading.Thread(target=end_all, daemon=True).start()
    began = time.monotonic()
    assert running.launcher.drain(0.3)
    assert 0.3 <= time.monotonic() - began < 3
    for values in (end() for end in ended):
        assert values[-1]["choices"][0]["finish_reason"] == "abort"


def test_drain_ends_requests_that_nobody_ends(launch: Callable[..., Running]) -> None:
    """Not even the tokenizer answers: an error event, and exit code 0 in time."""
    running = launch()
    (ended,) = running.streams(1)
    assert running.launcher.drain(0)
    assert "shutting down" in ended()[-1]["error"]["message"]


def test_drain_when_idle_is_quick(launch: Callable[..., Running]) -> None:
    running = launch()
    running.http.close()
    began = time.monotonic()
    assert running.launcher.drain(20)
    assert time.monotonic() - began < 2


def test_a_death_is_told_to_every_stream(launch: Callable[..., Running]) -> None:
    """P43"""
    running = launch()
    ended = running.streams(8)
    farewell = threading.Thread(target=running.launcher.farewell, args=("worker died: exit code -9",))
    farewell.start()
    for values in (end() for end in ended):
        assert values[-1]["error"]["message"] == "worker died: exit code -9"
        assert sum("error" in v for v in values) == 1
    with contextlib.suppress(httpx.ConnectError):
        assert running.http.get("/health").status_code == 503
    farewell.join(20)
    running.wait_for(running.child.ended)


@pytest.mark.parametrize("reading", [True, False], ids=["reading", "stuck"])
def test_without_its_launcher_it_ends_every_stream_and_itself(
    launch: Callable[..., Running], reading: bool
) -> None:
    running = launch()
    ended = running.streams(8) if reading else []
    stuck = [] if reading else [_stuck_reader(running)]
    began = time.monotonic()
    running.child._wire.hang_up()
    for values in (end() for end in ended):
        assert "launcher" in values[-1]["error"]["message"]
    running.wait_for(lambda: running.child.process.poll() is not None)
    assert time.monotonic() - began < (1.5 if reading else 3.5)
    assert not running.process.is_running()
    for sock in stuck:
        sock.close()


def _stuck_reader(running: Running) -> socket.socket:
    """A client that asks for a stream, of which more is said than its socket holds, and never reads."""
    sock = socket.create_connection(("127.0.0.1", running.port))
    body = json.dumps({**ASK, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    rid = running.tokenizer.wait_for(Generate)[0].rid
    for _ in range(100):
        running.tokenizer.say(Chunk(rid, 0, "x" * 200_000, pack([5])))
    time.sleep(0.2)
    return sock


def test_keys_are_asked_for_and_in_no_command_line(launch: Callable[..., Running]) -> None:
    running = launch(api_key="key-of-a-user", admin_api_key="key-of-the-admin")
    assert "key-of" not in " ".join(running.process.cmdline())
    assert running.http.get("/v1/models").status_code == 401
    assert running.http.get("/v1/models", headers={"x-api-key": "key-of-a-user"}).status_code == 200
    assert running.http.get("/metrics", headers={"x-api-key": "key-of-a-user"}).status_code == 403
    assert running.http.get("/metrics", headers={"x-api-key": "key-of-the-admin"}).status_code == 200


def test_logs_can_be_json(launch: Callable[..., Running], capfd: pytest.CaptureFixture[str]) -> None:
    """Requests are logged when asked for, whatever the level; uvicorn's warnings have the form too."""
    running = launch(log_format="json", log_requests=True, log_level="warning")
    assert running.http.get("/nope", headers={"x-request-id": "mine"}).status_code == 404
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(b"rubbish\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")
    said: list[dict[str, Any]] = []

    def both() -> bool:
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
        # The fixture asks until the server is ready; what it was answered before is logged too.
        said.extend(line for line in lines if line.get("status") != 503)
        return len(said) >= 2

    running.wait_for(both)
    assert (said[0]["message"], said[0]["request_id"], said[0]["status"]) == ("request ended", "mine", 404)
    assert (said[1]["level"], said[1]["role"]) == ("warning", "server")
