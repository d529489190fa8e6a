"""How streams end: disconnects, slow readers, aborts, errors, equal names. Each once, none hangs."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt.config import make
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Abort, Chunk, Ended, Finish, Generate, pack
from tests.api.clock import stopped
from tests.api.scripted import Harness, answer, answer_aborts, client, started
from tests.api.test_chat import ASK, events
from tests.serving import lines_of

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK,
    "/v1/completions": {"prompt": "x"},
    "/generate": {"text": "x"},
}
DIED = ErrorInfo(500, "server_error", "process_died", "scheduler died: killed by signal 9 (SIGKILL)")


@pytest.fixture
def fragile(new_server: Callable[..., Harness]) -> Harness:
    """A server of the test's own, whose requests begin and then say nothing."""
    harness = new_server()
    harness.tokenizer.script = lambda g: [started(g)]
    return harness


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run `work` in a thread; the returned function waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert results, "it hangs, or it raised"
        return results[0]

    return result


def raw_post(harness: Harness, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock = socket.create_connection(("127.0.0.1", harness.port))
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def live(harness: Harness) -> int:
    return harness.call(lambda: harness.client.live)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, ASK, "messages"),
        ("/v1/completions", {"prompt": "x"}, "prompt"),
        ("/v1/embeddings", {"input": "x"}, "input"),
        ("/generate", {"text": "x"}, "text"),
        ("/generate", {"input_ids": [5]}, "input_ids"),
    ],
)
def test_an_error_of_the_prompt_names_the_requests_field(
    server: Harness, http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    empty = ErrorInfo(400, "invalid_request_error", "invalid_value", "prompt is empty", "prompt")
    server.tokenizer.script = lambda g: [Ended(g.rid, empty)]
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field} is empty")


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
def test_a_request_may_bring_its_own_deadline(server: Harness, http: httpx.Client, path: str) -> None:
    server.tokenizer.script = lambda g: []
    body = BODIES.get(path, {"input": "x"})
    response = http.post(path, json={**body, "timeout": 0.05})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    generate = server.tokenizer.wait_for(Generate)[0]
    assert server.tokenizer.wait_for(Abort) == [Abort(generate.rid)]


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "queued"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", BODIES)
def test_a_disconnect_aborts_at_once(server: Harness, path: str, stream: bool, begun: bool) -> None:
    server.tokenizer.script = lambda g: [started(g)] if begun else []
    # No timer goes off: that it has gone is heard, and nothing looks for it from time to time.
    with stopped(server.loop):
        with raw_post(server, path, {**BODIES[path], "stream": stream}):
            generate = server.tokenizer.wait_for(Generate)[0]
            server.until(lambda: server.client.live == 1)
            assert server.tokenizer.received == [generate]
        assert server.tokenizer.wait_for(Abort) == [Abort(generate.rid)]
        server.until(lambda: server.client.live == 0)


def test_a_disconnect_aborts_every_prompt(server: Harness) -> None:
    server.tokenizer.script = lambda g: [started(g)]
    with raw_post(server, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}):
        rids = {g.rid for g in server.tokenizer.wait_for(Generate, 3)}
    assert {a.rid for a in server.tokenizer.wait_for(Abort, 3)} == rids


def test_a_disconnect_while_the_body_is_sent(server: Harness, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        time.sleep(0.05)
    assert http.get("/health").status_code == 200
    assert server.tokenizer.received == []


def test_what_arrives_after_a_disconnect_is_ignored(server: Harness, http: httpx.Client) -> None:
    server.tokenizer.script = lambda g: [started(g)]
    with raw_post(server, CHAT, {**ASK, "stream": True}):
        generate = server.tokenizer.wait_for(Generate)[0]
    server.tokenizer.wait_for(Abort)
    server.tokenizer.say(*answer(generate))
    server.tokenizer.script = answer
    assert http.post(CHAT, json=ASK).status_code == 200


def test_a_slow_reader_is_ended_and_memory_stays_bounded(new_server: Callable[..., Harness]) -> None:
    harness = new_server(make(stream_buffer=50))
    harness.tokenizer.script = lambda g: [started(g)]
    with raw_post(harness, CHAT, {**ASK, "stream": True}) as sock:
        generate = harness.tokenizer.wait_for(Generate)[0]
        stream = harness.call(lambda: harness.client._streams[generate.rid])
        chunk = Chunk(generate.rid, 0, "x" * 10_000, pack([5]))
        for _ in range(5000):
            harness.tokenizer.say(chunk)
            if any(isinstance(m, Abort) for m in harness.tokenizer.received):
                break
            time.sleep(0.0005)
        assert harness.tokenizer.wait_for(Abort) == [Abort(generate.rid)]
        assert harness.call(lambda: len(stream._events)) <= 51
        assert live(harness) == 0
        text = b""
        sock.settimeout(20)
        while not text.endswith(b"0\r\n\r\n"):
            text += sock.recv(1_000_000)
    assert text.count(b"reads too slowly") == 1
    assert text.index(b"reads too slowly") < text.index(b"[DONE]")
    assert text.count(b"[DONE]") == 1
    assert b'"finish_reason":"' not in text


def test_a_reader_that_lags_less_loses_nothing(server: Harness) -> None:
    """P12, as far as the server goes."""
    words = [f"w{i} " for i in range(300)]
    server.tokenizer.script = lambda g: answer(g, words)

    def read() -> str:
        text = ""
        with client(server) as http, http.stream("POST", CHAT, json={**ASK, "stream": True}) as response:
            for line in lines_of(response):
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content", "")
                    time.sleep(0.0005)
        return text

    readers = [in_thread(read) for _ in range(8)]
    assert [reader() for reader in readers] == ["".join(words)] * 8


@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_the_middle_is_an_event_before_done(server: Harness, path: str) -> None:
    server.tokenizer.script = lambda g: [started(g), Chunk(g.rid, 0, "Pa", pack([5]))]
    body = {**BODIES[path], "stream": True}
    with client(server) as http, http.stream("POST", path, json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        server.tokenizer.say(Ended(server.tokenizer.wait_for(Generate)[0].rid, DIED))
        values = events(text + "".join(pieces))
    error = {"message": DIED.message, "type": DIED.type, "code": DIED.code, "param": None}
    assert values[-1] == {"error": error}
    assert "Pa" in json.dumps(values[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_anything_is_plain_json(server: Harness, path: str, stream: bool) -> None:
    server.tokenizer.script = lambda g: [Ended(g.rid, DIED)]
    with client(server) as http:
        response = http.post(path, json={**BODIES[path], "stream": stream})
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "process_died"


@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_the_middle_of_a_whole_answer(server: Harness, path: str) -> None:
    server.tokenizer.script = lambda g: [started(g), Chunk(g.rid, 0, "Pa", pack([5])), Ended(g.rid, DIED)]
    with client(server) as http:
        response = http.post(path, json=BODIES[path])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == DIED.message


@pytest.mark.parametrize("path", BODIES)
def test_a_death_ends_every_stream_and_refuses_what_comes_later(fragile: Harness, path: str) -> None:
    """P43: running requests get their error; later ones and /health are 503."""

    begun = threading.Semaphore(0)

    def stream() -> list[Any]:
        body = {**BODIES[path], "stream": True}
        with client(fragile) as http, http.stream("POST", path, json=body) as response:
            pieces = response.iter_text()
            text = next(pieces)
            begun.release()
            return events(text + "".join(pieces))

    def whole() -> httpx.Response:
        with client(fragile) as http:
            return http.post(path, json=BODIES[path])

    streams = [in_thread(stream) for _ in range(4)]
    wholes = [in_thread(whole) for _ in range(4)]
    for generate in fragile.tokenizer.wait_for(Generate, 8):
        fragile.tokenizer.say(Chunk(generate.rid, 0, "Pa", pack([5])))
    for _ in streams:
        assert begun.acquire(timeout=20)
    fragile.call(lambda: fragile.client.fail_all(DIED))
    for ended in streams:
        values = ended()
        assert values[-1]["error"]["message"] == DIED.message
        assert sum("error" in v for v in values) == 1
    for answered in wholes:
        response = answered()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "process_died"
    with client(fragile) as http:
        for response in (http.get("/health"), http.post(path, json=BODIES[path])):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == DIED.message
        assert http.get("/live").status_code == 200


def test_abort_by_the_clients_name(fragile: Harness) -> None:
    answer_aborts(fragile.tokenizer)
    with client(fragile) as http, client(fragile) as other:
        answered = in_thread(lambda: http.post(CHAT, json={**ASK, "rid": "mine"}))
        fragile.tokenizer.wait_for(Generate)
        assert other.post("/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        assert other.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        body = answered().json()
        assert body["choices"][0]["finish_reason"] == "abort"
        assert body["usage"]["completion_tokens"] == 1


def test_abort_by_the_id_of_the_answer(fragile: Harness) -> None:
    answer_aborts(fragile.tokenizer)
    with (
        client(fragile) as http,
        client(fragile) as other,
        http.stream("POST", CHAT, json={**ASK, "stream": True}) as r,
    ):
        lines = lines_of(r)
        name = json.loads(next(lines)[6:])["id"]
        assert r.headers["x-request-id"] == name
        assert other.post("/abort_request", json={"rid": name}).json() == {"aborted": 1}
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2]
    assert rest[-1] == "data: [DONE]"


def test_abort_all(fragile: Harness) -> None:
    with client(fragile) as other:
        sockets = [raw_post(fragile, CHAT, ASK) for _ in range(3)]
        rids = {g.rid for g in fragile.tokenizer.wait_for(Generate, 3)}
        assert other.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 3}
        assert {a.rid for a in fragile.tokenizer.wait_for(Abort, 3)} == rids
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("body", [{}, {"rid": "x", "abort_all": True}, {"abort_all": False}, {"rid": 5}])
def test_bad_aborts(http: httpx.Client, body: Any) -> None:
    assert http.post("/abort_request", json=body).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_two_live_requests_of_one_name(server: Harness, path: str) -> None:
    """P42: the second gets 409, the first goes on, and after its end the name is free."""
    held: list[Generate] = []

    def hold(g: Generate) -> list[Any]:
        held.append(g)
        return [started(g)]

    server.tokenizer.script = hold
    body = {**BODIES[path], "rid": "twin"}
    with client(server) as http, client(server) as other:
        first = in_thread(lambda: http.post(path, json=body))
        server.until(lambda: len(held) == 1)
        second = other.post(path, json=body)
        assert second.status_code == 409
        error = second.json()["error"]
        assert (error["code"], error["param"]) == ("duplicate_request_id", "rid")
        assert "'twin'" in error["message"]
        server.tokenizer.say(*answer(held[0])[1:])
        assert first().status_code == 200
        server.tokenizer.script = answer
        assert other.post(path, json=body).status_code == 200
    rids = [g.rid for g in server.tokenizer.wait_for(Generate)]
    assert len(set(rids)) == len(rids) == 2


def test_a_name_is_free_after_a_disconnect(server: Harness, http: httpx.Client) -> None:
    """P42: even before the tokenizer has answered the abort."""
    server.tokenizer.script = lambda g: []
    with raw_post(server, CHAT, {**ASK, "rid": "gone"}):
        server.tokenizer.wait_for(Generate)
    server.tokenizer.wait_for(Abort)
    server.tokenizer.script = answer
    assert http.post(CHAT, json={**ASK, "rid": "gone"}).status_code == 200


def test_the_events_of_a_stream_on_the_wire(server: Harness, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(block.startswith("data: ") for block in response.text.strip().split("\n\n"))


def test_text_of_a_stream_comes_as_it_is_made(server: Harness) -> None:
    """No event waits for a later one."""
    server.tokenizer.script = lambda g: [started(g)]
    with (
        client(server) as http,
        http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r,
    ):
        generate = server.tokenizer.wait_for(Generate)[0]
        lines = (line for line in lines_of(r) if line)
        for text in ("one", "two", "three"):
            server.tokenizer.say(Chunk(generate.rid, 0, text, pack([5])))
            assert json.loads(next(lines)[6:])["choices"][0]["text"] == text
        finish = Finish("length", None, 3)
        server.tokenizer.say(Chunk(generate.rid, 0, "", b"", None, finish), Ended(generate.rid))
        assert json.loads(next(lines)[6:])["choices"][0]["finish_reason"] == "length"
        assert next(lines) == "data: [DONE]"
