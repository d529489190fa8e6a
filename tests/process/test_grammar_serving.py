"""`sapwood serve` while bad constraints are posted: its streams go on as if there were none."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.models import tiny_llama
from tests.process.test_grammar_compiler import HEAVY, NASTY, regex
from tests.serving import Server, events, lines_of, serve

STREAMS = 8
TOKENS = 400
FIELDS = {"json_schema": "json_schema", "regex": "regex"}
BAD = {**HEAVY, **NASTY, "nothing": regex("[^\\s\\S]"), "half a pair": regex("\ud800")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("constrained")
    model = tiny_llama(folder / "model")
    with serve(model, folder, max_total_tokens=8192, max_running_requests=32) as running:
        yield running


def post(server: Server, fields: dict[str, Any]) -> httpx.Response:
    body = {"prompt": "a tree", "max_tokens": 16, **fields}
    raw = json.dumps(body)  # as ASCII: a lone surrogate is an escape
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + "/v1/completions", content=raw, headers=headers, timeout=60)


def stream(server: Server, number: int, pieces: list[str]) -> None:
    """The greedy text of one stream, piece by piece."""
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"prompt": f"a tree {number}", "stream": True, **sampling}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
        for event in events(lines_of(answer)):
            if event != "[DONE]":
                assert "error" not in event, event
                pieces.append(event["choices"][0]["text"])


def streams(server: Server, pool: ThreadPoolExecutor, pieces: list[list[str]]) -> list[Any]:
    return [pool.submit(stream, server, number, pieces[number]) for number in range(STREAMS)]


def test_streams_go_on_while_bad_constraints_are_refused(server: Server) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        quiet: list[list[str]] = [[] for _ in range(STREAMS)]
        for future in streams(server, pool, quiet):
            future.result(120)
        beside: list[list[str]] = [[] for _ in range(STREAMS)]
        futures = streams(server, pool, beside)
        answers = {}
        for what, constraint in BAD.items():
            began = time.monotonic()
            answer = post(server, {FIELDS[constraint.kind]: constraint.text})
            answers[what] = (answer.status_code, answer.text[:200])
            assert time.monotonic() - began < 5.0, what
        for future in futures:
            future.result(120)
    assert ["".join(pieces) for pieces in beside] == ["".join(pieces) for pieces in quiet]
    assert all(status == 400 for what, (status, _) in answers.items() if what not in HEAVY), answers
    assert {status for status, _ in answers.values()} <= {200, 400, 503}, answers


def test_ten_thousand_members_are_a_400(server: Server) -> None:
    answer = post(server, {"json_schema": {"enum": [f"m{i}" for i in range(10_000)]}})
    assert answer.status_code == 400
    assert "json_schema" in answer.json()["error"]["message"]


def test_what_is_allowed_is_what_comes(server: Server) -> None:
    def one(number: int) -> None:
        words = [f"w{number}", f"v{number}"]
        answer = post(server, {"choices": words, "seed": number})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] in words

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(100)))
    end = time.monotonic() + 5.0
    while counted(server, "sapwood_grammars_compiled_total") < 100:
        assert time.monotonic() < end


def counted(server: Server, name: str) -> float:
    page = httpx.get(server.url + "/metrics", timeout=20).text
    (value,) = [float(line.split()[1]) for line in page.splitlines() if line.startswith(name)]
    return value


def test_a_client_that_leaves_ends_the_compiling(server: Server) -> None:
    engine = server.children()["grammar"].children()[0]
    heavy = HEAVY["many patterns"].text.replace("p0", "left")
    body = json.dumps({"prompt": "a", "json_schema": heavy})
    client = HTTPConnection(httpx.URL(server.url).netloc.decode())
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    end = time.monotonic() + 20.0
    while not (forks := engine.children()):
        assert time.monotonic() < end
    forks[0].suspend()  # so it keeps its priority, and is not through before
    client.close()
    end = time.monotonic() + 2.0
    while engine.children():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engine.is_running()


def test_the_engine_may_be_killed_at_any_time(server: Server) -> None:
    stop = threading.Event()
    killed: list[psutil.Process] = []

    def kill() -> None:
        while not stop.wait(0.5):
            for engine in server.children()["grammar"].children():
                with contextlib.suppress(psutil.Error):
                    engine.kill()
                    killed.append(engine)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        answers = [post(server, {"regex": f"k{i}"}).status_code for i in range(20)]
    finally:
        stop.set()
        killer.join()
    assert set(answers) <= {200, 500, 503}
    assert not psutil.wait_procs(killed, timeout=20)[1]
    assert post(server, {"regex": "after all"}).json()["choices"][0]["text"] == "after all"


def test_a_server_of_ids_refuses_them_and_has_no_engine(tmp_path: Path) -> None:
    with serve(
        tiny_llama(tmp_path / "model"), tmp_path, max_total_tokens=512, skip_tokenizer_init=True
    ) as ids:
        answer = post(ids, {"prompt": [3, 4, 5], "regex": "a"})
        assert answer.status_code == 400
        assert "regex" in answer.json()["error"]["message"]
        assert "--skip-tokenizer-init" in answer.json()["error"]["message"]
        assert ids.children()["grammar"].children() == []
