"""Programs' calls over HTTP: connections, streams, errors, and what cancelling does."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from httpcore._async.connection_pool import PoolByteStream

from sapwood.lang.backends import http
from sapwood.lang.backends.endpoint import RuntimeEndpoint
from sapwood.lang.backends.http import Http
from sapwood.lang.errors import RequestFailed
from tests.lang.doors import Request, Web, web


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as server:
        yield server


async def echo(request: Request) -> None:
    await request.answer({"path": request.path, "body": request.body})


def failing(status: int, body: Any) -> Any:
    async def handler(request: Request) -> None:
        await request.answer(body, status)

    return handler


ERROR = {
    "error": {
        "message": "top_k must be at least -1, got -2",
        "type": "invalid_request_error",
        "code": "invalid_value",
        "param": "top_k",
    }
}


def failure_of(server: Web, path: str = "/generate") -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(RuntimeEndpoint(server.url).post(path, {}))
    return caught.value


async def listed(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


def test_a_body_goes_and_an_answer_comes(server: Web) -> None:
    server.handler = echo
    body = {"input": ["é\u2028\U0001f642"]}
    answer = asyncio.run(RuntimeEndpoint(server.url + "/", api_key="secret").post("/generate", body))
    assert answer == {"path": "/generate", "body": body}
    (request,) = server.asked
    assert request.method == "POST"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["content-type"] == "application/json"


def test_what_is_only_read_is_asked_for_by_get(server: Web) -> None:
    server.handler = echo
    asyncio.run(RuntimeEndpoint(server.url).post("/server_info", {}))
    assert [(request.method, request.path) for request in server.asked] == [("GET", "/server_info")]


def test_connections_are_kept_and_closed_with_their_loop(server: Web) -> None:
    server.handler = echo
    endpoint = RuntimeEndpoint(server.url)

    async def ask() -> None:
        for _ in range(5):
            await endpoint.post("/generate", {})

    asyncio.run(ask())
    assert server.connections == 1
    asyncio.run(ask())
    assert server.connections == 2
    assert endpoint._http._loops == {}


def test_closing_is_possible_at_any_time(server: Web) -> None:
    server.handler = echo
    endpoint = RuntimeEndpoint(server.url)

    async def ask() -> None:
        await endpoint.aclose()
        await endpoint.post("/generate", {})
        await endpoint.aclose()
        await endpoint.post("/generate", {})

    asyncio.run(ask())
    assert server.connections == 2


def test_connections_end_with_the_endpoint_on_a_loop_that_goes_on(server: Web) -> None:
    server.handler = echo

    async def lives(endpoint: RuntimeEndpoint) -> bool:
        await endpoint.post("/generate", {})
        (clients,) = endpoint._http._loops.values()
        client = weakref.ref(clients.long.shards[0].client)
        del endpoint, clients
        gc.collect()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if client() is None or client().is_closed:  # type: ignore[union-attr]
                return False
        return True

    async def main() -> bool:
        # The task's own frame must not keep the endpoint.
        return await asyncio.create_task(lives(RuntimeEndpoint(server.url)))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in said if one.category is ResourceWarning] == []


def test_cancelled_requests_take_no_connection_along(server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that are cancelled as theirs is given back, which httpcore then takes for used for ever."""
    server.handler = echo
    endpoint = RuntimeEndpoint(server.url)
    given_back = PoolByteStream.aclose

    async def cancelled(stream: PoolByteStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await given_back(stream)

    async def ask() -> None:
        monkeypatch.setattr(PoolByteStream, "aclose", cancelled)
        asking = [asyncio.create_task(endpoint.post("/generate", {})) for _ in range(http.SHARD)]
        for error in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(error, asyncio.CancelledError)
        monkeypatch.undo()
        answers = asyncio.gather(*(endpoint.post("/generate", {}) for _ in range(http.SHARD)))
        assert len(await asyncio.wait_for(answers, 20)) == http.SHARD

    asyncio.run(ask())


def test_a_thousand_requests_run_at_the_same_time() -> None:
    """Each is answered when all have come."""
    count, all_here = 1000, threading.Event()
    waiting: list[Request] = []
    begun: set[threading.Thread] = set()

    async def together(request: Request) -> None:
        waiting.append(request)
        if len(waiting) == count:
            begun.update(threading.enumerate())
            all_here.set()
        while not all_here.is_set():
            await asyncio.sleep(0.01)
        await request.answer(request.body)

    with web(together) as server:
        endpoint = RuntimeEndpoint(server.url)

        async def ask() -> list[Any]:
            return await asyncio.gather(*(endpoint.post("/generate", {"n": i}) for i in range(count)))

        before = set(threading.enumerate())  # of which those of earlier tests may end meanwhile
        assert asyncio.run(asyncio.wait_for(ask(), 60)) == [{"n": i} for i in range(count)]
        assert begun <= before
        assert server.connections == count


def test_an_error_has_the_server_s_words(server: Web) -> None:
    server.handler = failing(400, ERROR)
    error = failure_of(server)
    assert str(error) == "top_k must be at least -1, got -2"
    assert (error.status, error.code, error.param) == (400, "invalid_value", "top_k")


@pytest.mark.parametrize("body", [b"<h1>Bad gateway</h1>", b"", {"detail": "x"}], ids=str)
def test_another_error_answer_names_the_route_and_the_status(server: Web, body: Any) -> None:
    server.handler = failing(502, body)
    error = failure_of(server)
    assert f"POST {server.url}/generate was answered with 502" in str(error)
    assert error.status == 502


def test_an_answer_that_is_no_json_is_an_error(server: Web) -> None:
    server.handler = failing(200, b"<h1>Welcome</h1>")
    assert "answered with 200: <h1>Welcome</h1>" in str(failure_of(server))


def test_an_empty_answer_is_none(server: Web) -> None:
    server.handler = failing(200, b"")
    assert asyncio.run(RuntimeEndpoint(server.url).post("/flush_cache", {})) is None


def test_a_server_that_is_not_there_is_named() -> None:
    with web() as server:
        url = server.url
    with pytest.raises(RequestFailed, match=f"the server at {url} does not answer") as caught:
        asyncio.run(RuntimeEndpoint(url).post("/generate", {}))
    assert (caught.value.status, caught.value.code) == (0, "unreachable")
    with pytest.raises(RequestFailed, match="does not answer"):
        RuntimeEndpoint(url).get_model_name()


def test_a_connection_that_breaks_is_an_error(server: Web) -> None:
    async def hang_up(request: Request) -> None:
        request.writer.close()

    server.handler = hang_up
    assert failure_of(server).code == "unreachable"


def test_a_silent_server_is_an_error_after_the_timeout(server: Web) -> None:
    async def silent(request: Request) -> None:
        await asyncio.sleep(30)

    server.handler = silent
    with pytest.raises(RequestFailed, match="has fallen silent") as caught:
        asyncio.run(RuntimeEndpoint(server.url, timeout=0.1).post("/generate", {}))
    assert caught.value.code == "timeout"


def test_a_cancelled_call_closes_its_connection(server: Web) -> None:
    server.handler = server.wait_for_leave

    async def cancel() -> None:
        task = asyncio.ensure_future(RuntimeEndpoint(server.url).post("/generate", {}))
        while not server.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.gone.wait, 20)

    asyncio.run(cancel())


def test_a_stream_left_early_closes_its_connection(server: Web) -> None:
    async def one_event(request: Request) -> None:
        await request.begin_stream()
        await request.piece(b'data: {"text": "a"}\n\n')
        await server.wait_for_leave(request)

    server.handler = one_event

    async def leave() -> None:
        events = RuntimeEndpoint(server.url).events("/generate", {})
        assert await anext(events) == {"text": "a"}
        await events.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(server.gone.wait, 20)

    asyncio.run(leave())


def test_a_stream_s_events_come_one_by_one(server: Web) -> None:
    """Each is sent after the one before has been read."""
    read = threading.Semaphore(1)

    async def in_turn(request: Request) -> None:
        await request.begin_stream()
        for number in range(3):
            await asyncio.to_thread(read.acquire)
            await request.piece(json.dumps({"n": number}).encode().join((b"data: ", b"\n\n")))
        await request.piece(b"data: [DONE]\n\n")
        await request.end_stream()

    server.handler = in_turn

    async def take() -> list[int]:
        seen = []
        async for event in RuntimeEndpoint(server.url).events("/generate", {}):
            seen.append(event["n"])
            read.release()
        return seen

    assert asyncio.run(asyncio.wait_for(take(), 20)) == [0, 1, 2]


def test_text_with_line_separators_is_one_event(server: Web) -> None:
    events = [{"text": "a\u2028b\u2029c\x85d\x0be\x0cf"}, {"text": "\r\n"}]

    async def stream(request: Request) -> None:
        await request.events(*events)

    server.handler = stream
    assert asyncio.run(listed(RuntimeEndpoint(server.url).events("/generate", {}))) == events


def test_errors_of_streams(server: Web) -> None:
    broken = {"error": {"message": "a process died", "type": "server_error", "code": "process_died"}}

    async def stream(request: Request) -> None:
        await request.events({"text": "a"}, {"error": {**broken["error"]}})

    server.handler = stream
    with pytest.raises(RequestFailed, match="a process died") as caught:
        asyncio.run(listed(RuntimeEndpoint(server.url).events("/generate", {})))
    assert (caught.value.status, caught.value.code, caught.value.param) == (503, "process_died", None)

    server.handler = failing(400, ERROR)
    with pytest.raises(RequestFailed, match="top_k must be") as caught:
        asyncio.run(listed(RuntimeEndpoint(server.url).events("/generate", {})))
    assert caught.value.status == 400

    async def cut(request: Request) -> None:
        await request.events({"text": "a"}, done=False)

    server.handler = cut
    with pytest.raises(RequestFailed, match="broke off"):
        asyncio.run(listed(RuntimeEndpoint(server.url).events("/generate", {})))


@pytest.mark.parametrize("data", [b"{oops", b"7", b"[]", b'"error"', b'{"error": "busy"}', b"\xff"], ids=str)
def test_an_event_that_is_none_is_an_error_that_shows_it(server: Web, data: bytes) -> None:
    async def stream(request: Request) -> None:
        await request.begin_stream()
        await request.piece(b"data: " + data + b"\n\n")
        await request.end_stream()

    server.handler = stream
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(listed(RuntimeEndpoint(server.url).events("/generate", {})))
    assert f"the stream of {server.url}/generate has sent {data.decode(errors='replace')}" in str(
        caught.value
    )


def test_what_is_answered_at_once_waits_for_no_output(server: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are taken, and more outputs wait for one."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    ended = 0

    async def handler(request: Request) -> None:
        if request.path == "/generate":
            while ended < 20:
                await asyncio.sleep(0.01)
        await request.answer(request.body)

    server.handler = handler
    endpoint = RuntimeEndpoint(server.url)

    async def ask() -> list[Any]:
        nonlocal ended
        outputs = [asyncio.ensure_future(endpoint.post("/generate", {"n": i})) for i in range(6)]
        while len(server.asked) < 3:
            await asyncio.sleep(0.01)
        ends = [endpoint.post("/programs/end", {"program": str(i)}) for i in range(20)]
        assert await asyncio.gather(*ends) == [{"program": str(i)} for i in range(20)]
        assert not any(output.done() for output in outputs)
        ended = 20
        return await asyncio.gather(*outputs)

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == [{"n": i} for i in range(6)]
    assert server.connections == 3 + http.BRIEF_CONNECTIONS


def test_what_is_no_json_is_not_sent() -> None:
    endpoint = RuntimeEndpoint("http://127.0.0.1:1")
    for value, words in (
        ("\ud800", "lone surrogate"),
        (float("nan"), "no JSON value"),
        ({1, 2}, "no JSON value"),
    ):
        with pytest.raises(RequestFailed, match=words):
            asyncio.run(endpoint.post("/generate", {"text": value}))


def test_a_url_must_be_one() -> None:
    for url in ("", "127.0.0.1:30000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="the url of a server must be"):
            RuntimeEndpoint(url)
    with pytest.raises(ValueError, match="chat_template_name is not supported"):
        RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="llama-2-chat")
    assert Http("http://localhost:1/").url == "http://localhost:1"


def test_the_methods_that_sglang_s_endpoint_has(server: Web) -> None:
    async def answer(request: Request) -> None:
        await request.answer({"model_path": "/models/tiny", "path": request.path})

    server.handler = answer
    endpoint = RuntimeEndpoint(server.url)
    assert server.asked == []
    assert (endpoint.get_model_name(), endpoint.get_model_name()) == ("/models/tiny", "/models/tiny")
    assert endpoint.get_server_info()["path"] == "/server_info"
    endpoint.flush_cache()
    endpoint.cache_prefix("Once upon")
    asked = [(request.method, request.path, request.body) for request in server.asked]
    assert asked == [
        ("GET", "/model_info", None),
        ("GET", "/server_info", None),
        ("POST", "/flush_cache", {}),
        ("POST", "/generate", {"text": "Once upon", "sampling_params": {"max_new_tokens": 0}}),
    ]
