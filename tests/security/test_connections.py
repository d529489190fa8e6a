"""Bytes that are no request, and clients that take their time: JSON errors, and nobody is waited for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Ended
from sapwood.srt.server import connection, guard
from tests.api.clock import stopped
from tests.api.scripted import Harness, client

POST = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(server: Harness) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(20)
    return sock


def rest(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def parsed(data: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)


def error(data: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and the error of an answer, which must have the one shape."""
    status, headers, body = parsed(data)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(data.partition(b"\r\n\r\n")[2])
    assert set(body["error"]) == {"message", "type", "code", "param"}
    return status, headers, body["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health FTP/1.1\r\nhost: x\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n",
        POST.encode() + b"content-length: -1\r\n\r\n",
        POST.encode() + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        POST.encode() + b"content-length: 9" + b"9" * 40 + b"\r\n\r\n{}",
        POST.encode() + b"transfer-encoding: gzip\r\n\r\n{}",
        POST.encode() + b"transfer-encoding: chunked\r\n\r\nnothex\r\n",
    ],
)
def test_what_is_no_http_is_a_json_400(server: Harness, http: httpx.Client, data: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(data)
        status, _headers, said = error(rest(sock))
    assert status in (400, 501)
    assert said["code"] == "invalid_http"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "head", [b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000]
)
def test_a_head_has_a_limit(server: Harness, http: httpx.Client, head: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(head)
        status, _headers, said = error(rest(sock))
    assert (status, said["code"]) == (431, "headers_too_large")
    assert http.get("/health").status_code == 200


def test_rubbish_after_an_answer_only_closes(server: Harness, http: httpx.Client) -> None:
    with connect(server) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(b"\x00\x01\x02\r\n\r\n")
        status, _headers, said = error(rest(sock))
        assert (status, said["code"]) == (400, "invalid_http")
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        time.sleep(0.1)
        sock.sendall(b"rubbish\r\n")
        assert error(rest(sock))[0] == 400
    server.until(lambda: server.client.live == 0)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "DELETE", "PATCH", "TRACE", "FOO"])
def test_other_methods_and_paths_have_the_shape(server: Harness, http: httpx.Client, method: str) -> None:
    for path, status in (("/generate", 405), ("/nope", 404), ("/v1/completions/", 404), ("/generate/", 404)):
        response = http.request(method, path)
        assert response.status_code == status
        if method == "HEAD":
            assert response.content == b""
        else:
            assert set(response.json()["error"]) == {"message", "type", "code", "param"}
        if status == 405:
            assert response.headers["allow"] == "POST"
        assert not any(name.startswith("access-control-") for name in response.headers)


def test_no_page_of_another_origin_may_read(server: Harness, http: httpx.Client) -> None:
    """CORS is off: a preflight fails, and no answer says that it may be read."""
    origin = {"origin": "https://evil.example"}
    preflight = http.options("/generate", headers=origin | {"access-control-request-method": "POST"})
    assert preflight.status_code == 403
    for response in (preflight, http.get("/v1/models", headers=origin)):
        assert not any(name.startswith("access-control-") for name in response.headers)


def test_a_head_that_does_not_come(
    new_server: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    server = new_server()
    with stopped(server.loop) as clock:
        silent, slow, again = connect(server), connect(server), connect(server)
        again.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        part = b"GET /health HTTP/1.1\r\nhost:"
        for sock in (slow, again):
            sock.sendall(part)
        server.until(lambda: sorted(heard(server)) == [b"", part, part])
        clock.passes(0.29)
        assert len(server.call(lambda: heard(server))) == 3
        clock.passes(0.02)
        for sock in (silent, slow, again):
            with sock:
                status, _headers, said = error(rest(sock))
                assert (status, said["code"]) == (408, "request_timeout")
                assert "0.3 s" in said["message"]
        server.until(lambda: not server.listener.server_state.connections)


def heard(server: Harness) -> list[bytes]:
    """Of each connection that is not refused, what it has of a head; called on the server's loop."""
    connections: Any = server.listener.server_state.connections
    return [each.conn.trailing_data[0] for each in connections if not each._refused]


def test_drops_do_not_keep_a_head_open(
    new_server: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is for the whole head, however often a byte of it comes."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.4)
    server = new_server()
    head, drop = b"GET /health HTTP/1.1\r\n", b"x: y\r\n"
    with connect(server) as sock, stopped(server.loop) as clock:
        sock.sendall(head)
        for drops in range(1, 8):
            sock.sendall(drop)
            server.until(lambda n=drops: heard(server) == [head + n * drop])
            clock.passes(0.05)
        assert server.call(lambda: heard(server)) == [head + 7 * drop]
        clock.passes(0.1)
        assert rest(sock).startswith(b"HTTP/1.1 408")


def test_a_stream_outlives_the_time_for_a_head(
    new_server: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    server = new_server()
    script = server.tokenizer.script
    with stopped(server.loop) as clock, client(server) as http:

        def slow(g: Any) -> Any:
            clock.passes(0.6)
            return script(g)

        server.tokenizer.script = slow
        assert http.post("/generate", json={"text": "x"}).status_code == 200
        clock.passes(0.5)  # between two requests of one connection only keep-alive counts
        assert http.post("/generate", json={"text": "x"}).status_code == 200
        assert server.call(lambda: len(heard(server))) == 1


def test_a_body_that_does_not_come(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.3)
    with connect(server) as sock:
        sock.sendall(POST.encode() + b"content-length: 100\r\n\r\n{")
        status, headers, body = parsed(rest(sock))
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert headers["connection"] == "close"
    server.until(lambda: not server.listener.server_state.tasks)


def test_connections_have_a_limit(
    new_server: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapwood.srt.server.process.most_connections", lambda: 3)
    server = new_server()
    held = [connect(server) for _ in range(3)]
    server.until(lambda: len(server.listener.server_state.connections) == 3)
    with connect(server) as sock:
        status, headers, said = error(rest(sock))
    assert (status, headers["retry-after"]) == (503, "1")
    assert "3 connections" in said["message"]
    for sock in held:
        # The limit counts connections alone: whoever is in is served.
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert rest(sock).startswith(b"HTTP/1.1 200")
        sock.close()


def test_there_is_room_for_connections() -> None:
    assert 16 <= connection.most_connections() <= connection.MAX_CONNECTIONS


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [(429, "rate_limit_error", "queue_full"), (503, "server_error", "unavailable")],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/health_generate"])
def test_who_comes_too_early_is_told_when_to_come_again(
    server: Harness, http: httpx.Client, status: int, kind: str, code: str, path: str
) -> None:
    """Also when it is the scheduler that has no room."""
    server.tokenizer.script = lambda g: [Ended(g.rid, ErrorInfo(status, kind, code, "no room"))]
    body: dict[str, Any] = {"text": "x"} if path == "/generate" else {"prompt": "x"}
    response = http.get(path) if path == "/health_generate" else http.post(path, json=body)
    assert response.status_code == (503 if path == "/health_generate" else status)
    assert response.headers["retry-after"] == "1"
