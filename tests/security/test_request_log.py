"""Request ids and --log-requests: what was asked and how it went, but never a text or a key."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt import log
from sapwood.srt.config import make
from sapwood.srt.messages import Ended, Generate
from tests.api.scripted import Harness, answer, client, refuse, started
from tests.api.test_streams import raw_post

SECRET = "Xylophone-secret-text"
COMPLETION = {"prompt": SECRET, "max_tokens": 7, "temperature": 0.5, "stop": [SECRET], "n": 2}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(log._JsonLines("server"))
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"

    def values(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lines() -> Any:
    handler, logger = Lines(), logging.getLogger("sapwood.requests")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def two(harness: Harness, lines: Lines) -> list[dict[str, Any]]:
    """The lines, once the end of the request has been written."""
    harness.until(lambda: len(lines.values()) >= 2)
    return lines.values()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_two_lines(new_server: Callable[..., Harness], lines: Lines, stream: bool) -> None:
    harness = new_server(make(log_requests=True))
    harness.tokenizer.script = lambda g: answer(g, matched=24)
    with client(harness) as http:
        body = {**COMPLETION, "stream": stream, "rid": "mine"}
        response = http.post("/v1/completions", json=body, headers={"x-request-id": "trace-1"})
    assert response.status_code == 200
    begin, end = two(harness, lines)
    assert begin["message"] == "request started"
    wanted = {
        "request_id": "trace-1",
        "route": "POST /v1/completions",
        "rid": "mine",
        "prompts": 1,
        "n": 2,
        "max_tokens": 7,
        "temperature": 0.5,
        "stop_count": 1,
    }
    assert {name: begin[name] for name in wanted} == wanted
    assert "top_p" not in begin
    wanted = {
        "message": "request ended",
        "request_id": "trace-1",
        "rid": "mine",
        "status": 200,
        "prompt_tokens": 40,
        "cached_tokens": 24,
        "completion_tokens": 4,
        "finish": "stop",
        "queued_s": 0.25,
    }
    assert {name: end[name] for name in wanted} == wanted
    assert 0 < end["ttft_s"] <= end["total_s"] < 10
    assert SECRET not in lines.text
    assert "Paris" not in lines.text


def test_several_prompts_are_one_request(new_server: Callable[..., Harness], lines: Lines) -> None:
    harness = new_server(make(log_requests=True))
    with client(harness) as http:
        assert http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}).status_code == 200
    begin, end = two(harness, lines)
    assert begin["prompts"] == 3
    assert (end["prompt_tokens"], end["completion_tokens"]) == (120, 6)


def test_errors_have_a_line_with_their_status(new_server: Callable[..., Harness], lines: Lines) -> None:
    harness = new_server(make(log_requests=True, api_key="key-1"))
    harness.tokenizer.script = refuse
    with client(harness) as http:
        key = {"authorization": "Bearer key-1"}
        assert http.post("/v1/completions", json={"prompt": SECRET}).status_code == 401
        assert http.post("/v1/completions", json={"prompt": SECRET, "n": 0}, headers=key).status_code == 400
        assert http.post("/v1/completions", json={"prompt": SECRET}, headers=key).status_code == 400
        assert http.get("/health").status_code == 200
    harness.until(lambda: len(lines.values()) >= 4)
    values = lines.values()
    assert [(v["message"], v.get("status")) for v in values] == [
        ("request ended", 401),
        ("request ended", 400),
        ("request started", None),
        ("request ended", 400),
    ]
    assert values[-1]["finish"] == "context_length_exceeded"
    assert SECRET not in lines.text
    assert "key-1" not in lines.text


def test_a_client_that_leaves_has_a_line(new_server: Callable[..., Harness], lines: Lines) -> None:
    harness = new_server(make(log_requests=True))
    harness.tokenizer.script = lambda g: [started(g)]
    with raw_post(harness, "/v1/completions", {"prompt": "x"}):
        harness.tokenizer.wait_for(Generate)
    end = two(harness, lines)[1]
    assert end["finish"] == "client_disconnected"
    assert harness.call(lambda: harness.requests._tallies) == {}


def test_nothing_is_logged_unasked(server: Harness, http: httpx.Client, lines: Lines) -> None:
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert http.get("/nope").status_code == 404
    assert lines.text == ""


@pytest.mark.parametrize("path", ["/live", "/nope", "/generate"])
def test_every_answer_has_an_id(server: Harness, http: httpx.Client, path: str) -> None:
    ids = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert http.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get(path, headers={"x-request-id": "~" * 256}).headers["x-request-id"] == "~" * 256
    for bad in ("~" * 257, "a b", "é".encode(), b"a\tb", ""):
        assert len(http.get(path, headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_without_a_header_the_id_is_that_of_the_answer(server: Harness, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "x"})
    assert response.headers["x-request-id"] == response.json()["id"]
    response = http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine" != response.json()["id"]


def test_p42_live_requests_may_share_a_request_id(server: Harness) -> None:
    """The header is for tracing and names no request; `rid`, which does, must differ."""
    held: list[Generate] = []

    def hold(g: Generate) -> list[Any]:
        held.append(g)
        return [started(g)]

    server.tokenizer.script = hold
    statuses: list[tuple[int, str]] = []

    def post() -> None:
        with client(server) as http:
            response = http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "twin"})
            statuses.append((response.status_code, response.headers["x-request-id"]))

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    server.until(lambda: len(held) == 2)
    assert held[0].rid != held[1].rid
    for g in held:
        server.tokenizer.say(*answer(g)[1:-1], Ended(g.rid))
    for thread in threads:
        thread.join(20)
    assert statuses == [(200, "twin")] * 2
