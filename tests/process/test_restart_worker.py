"""Nothing hangs: a stopped process, a dead worker and a long queue, in a real server with a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import sapwood
from tests.models import VOCAB, tiny_llama
from tests.serving import Server, events, lines_of, serve

STREAMS = 8
ENDLESS = 20_000
"""Tokens that no worker draws before a test has done what it does meanwhile. Without drafts, that is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_llama(folder / "model", max_position_embeddings=32768)


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[Server]:
    flags = {"max_total_tokens": 200_000, "max_running_requests": STREAMS, "heartbeat_timeout": 8}
    with serve(model, folder, restart_worker=True, speculative_algorithm="none", **flags) as running:
        yield running


def ids(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def answer(server: Server, seed: int = 1) -> Any:
    body = {
        "input_ids": ids(100, seed),
        "return_logprob": True,
        "sampling_params": {"temperature": 1, "seed": 3, "max_new_tokens": 30, "ignore_eos": True},
    }
    got = server.post("/generate", body)
    assert got.status_code == 200, got.text
    return got.json()["output_ids"], got.json()["meta_info"]["output_token_logprobs"]


def health(server: Server) -> tuple[int, str]:
    got = httpx.get(server.url + "/health", timeout=5)
    return got.status_code, got.text


def wait_for(condition: Callable[[], Any], seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.02)
    return value


class Streams:
    """Long streams that have begun; `ends` is how each has ended."""

    def __init__(self, server: Server, count: int, tokens: int = ENDLESS) -> None:
        self.ends: list[list[Any]] = []
        self._server = server
        self._tokens = tokens
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=30)

    def _read(self, i: int) -> None:
        body = {"prompt": ids(20, 500 + i), "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        url = self._server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            seen = events(lines_of(response))
            next(seen)
            self._begun.release()
            last: list[Any] = [None, None]
            for event in seen:
                last = [last[1], event]
            self.ends.append(last)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a stream hangs"


def settled(server: Server) -> None:
    state = wait_for(lambda: (s := server.state())["running"] == s["waiting"] == s["slots_used"] == 0 and s)
    assert state["slots_free"] + state["slots_cached"] == state["slots_total"]
    assert server.post("/generate", {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}).is_success


@pytest.mark.parametrize("again", [1, 2])
def test_a_dead_worker_costs_what_runs_and_nothing_else(server: Server, again: int) -> None:
    before = answer(server)
    family = server.children()
    streams = Streams(server, STREAMS)
    with ThreadPoolExecutor(2) as pool:
        queued = pool.submit(answer, server, 2)
        wait_for(lambda: server.state()["waiting"] >= 1)
        family["worker"].kill()
        code, text = wait_for(lambda: (got := health(server))[0] != 200 and got)
        assert (code, "another one is being started" in text) == (503, True)
        late = pool.submit(answer, server, 3)
        streams.join()
        for last, end in streams.ends:
            assert end == "[DONE]"
            assert last["error"]["code"] == "process_died", last
            assert "may be retried" in last["error"]["message"]
        assert len(streams.ends) == STREAMS
        wait_for(lambda: health(server)[0] == 200)
        waited = [queued.result(60), late.result(60)]
    assert answer(server) == before
    assert waited == [answer(server, 2), answer(server, 3)]
    now = server.children()
    assert {role: p.pid for role, p in now.items() if role != "worker"} == {
        role: p.pid for role, p in family.items() if role != "worker"
    }
    assert now["worker"].pid != family["worker"].pid
    metrics = httpx.get(server.url + "/metrics", timeout=10).text
    assert f"sapwood_worker_restarts_total {again}.0" in metrics
    settled(server)


def test_the_answers_of_a_new_worker_are_those_of_a_new_server(
    server: Server, model: Path, folder: Path
) -> None:
    with serve(model, folder, max_total_tokens=40000) as fresh:
        assert answer(server) == answer(fresh)


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer", "server"])
def test_a_stopped_process_is_noticed_and_goes_on_where_it_was(server: Server, role: str) -> None:
    want = server.generate(ids(30, 9), max_new_tokens=4000)["output_ids"]
    process = server.children()[role]
    said = f"{role} has not been heard for 3 s" if role != "worker" else "has not been heard for 3 s"
    heard = server.output.read_text().count("is heard again")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, ids(30, 9), max_new_tokens=4000)
        wait_for(lambda: server.state()["running"])
        process.send_signal(signal.SIGSTOP)
        try:
            if role == "server":
                wait_for(lambda: said in server.output.read_text(), 7)
            else:
                code, text = wait_for(lambda: (got := health(server))[0] != 200 and got, 7)
                assert code == 503
                assert said in text
        finally:
            process.send_signal(signal.SIGCONT)
        assert running.result(60)["output_ids"] == want
    wait_for(lambda: server.output.read_text().count("is heard again") > heard)
    wait_for(lambda: health(server)[0] == 200, 5)
    assert server.output.read_text().count("is heard again") == heard + 1
    settled(server)


def test_a_worker_that_stays_silent_is_replaced(server: Server) -> None:
    before = answer(server)
    family = server.children()
    (streams,) = [Streams(server, 1)]
    family["worker"].send_signal(signal.SIGSTOP)
    streams.join()
    assert streams.ends[0][0]["error"]["code"] == "process_died"
    assert "no heartbeat for 8 s" in streams.ends[0][0]["error"]["message"]
    wait_for(lambda: health(server)[0] == 200)
    assert answer(server) == before


def test_a_request_waits_no_longer_than_it_may(model: Path, folder: Path) -> None:
    flags = {"max_total_tokens": 20000, "max_running_requests": 1, "speculative_algorithm": "none"}
    with serve(model, folder, queue_timeout=1, **flags) as narrow:
        streams = Streams(narrow, 1, 8000)

        def ask(timeout: float) -> tuple[float, httpx.Response]:
            began = time.monotonic()
            got = narrow.post("/generate", {"input_ids": ids(9, 9)}, timeout)
            return time.monotonic() - began, got

        seconds, got = ask(20)
        assert (got.status_code, got.json()["error"]["code"]) == (504, "queue_timeout")
        assert "--queue-timeout" in got.json()["error"]["message"]
        assert 0.9 < seconds < 3
        # Not even a worker that gives no results keeps it from that.
        worker = narrow.children()["worker"]
        worker.send_signal(signal.SIGSTOP)
        try:
            seconds, got = ask(20)
        finally:
            worker.send_signal(signal.SIGCONT)
        assert (got.status_code, 0.9 < seconds < 3) == (504, True)
        streams.join()
        assert streams.ends[0][1] == "[DONE]"
        assert "error" not in streams.ends[0][0]
        assert narrow.post("/generate", {"input_ids": ids(9, 9)}).is_success


def test_an_engine_gets_another_worker_too(model: Path, tmp_path: Path) -> None:
    program = f"""
import psutil, sapwood
from sapwood.srt.errors import ProcessDied
options = {{"max_total_tokens": 30000, "num_threads": 1, "speculative_algorithm": "none"}}
with sapwood.Engine({str(model)!r}, restart_worker=True, **options) as engine:
    params = {{"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}}
    want = engine.generate("A river", params)["text"]
    (worker,) = [p for p in psutil.Process().children(recursive=True) if "worker" in p.cmdline()]
    stream = engine.generate("A lake", {{**params, "max_new_tokens": {ENDLESS}}}, stream=True)
    next(stream)
    worker.kill()
    try:
        list(stream)
    except ProcessDied as e:
        print("told:", e)
    print(engine.generate("A river", params)["text"] == want)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sapwood.__file__).resolve().parent.parent)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told, same = ran.stdout.splitlines()
    assert told.startswith("told: worker died: killed by signal 9")
    assert told.endswith("may be retried")
    assert same == "True"
