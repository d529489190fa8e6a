"""A request that has not ended in its time is aborted, and ends once, with an error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sapwood.srt.client import Client
from sapwood.srt.config import make
from sapwood.srt.messages import Abort, Chunk, Ended, Generate, Started, pack
from sapwood.srt.params import SamplingParams
from tests.api.clock import stopped
from tests.api.scripted import Harness, answer, client, started
from tests.api.test_chat import events
from tests.api.test_client import HELLO, PARAMS, Bench
from tests.api.test_streams import in_thread


@pytest.fixture
def bench() -> Any:
    made: list[Bench] = []

    def make_bench(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make_bench
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("own", "server", "limit"), [(0.2, None, 0.2), (None, 0.2, 0.2), (0.2, 5.0, 0.2), (5.0, 0.2, 0.2)]
)
def test_the_smaller_limit_counts(
    bench: Callable[..., Bench], own: float | None, server: float | None, limit: float
) -> None:
    mine = bench(request_timeout=server)
    mine.tokenizer.script = lambda g: [started(g), Chunk(g.rid, 0, "Pa", pack([5]))]

    async def run(client: Client) -> None:
        with stopped(asyncio.get_running_loop()) as clock:
            stream = client.submit(HELLO, PARAMS, timeout=own)
            got = [await anext(stream) for _ in range(2)]
            clock.passes(limit - 0.01)
            for _ in range(3):
                await asyncio.sleep(0)
            assert client.live == 1
            clock.passes(0.02)
            got += [event async for event in stream]
        assert [type(event) for event in got] == [Started, Chunk, Ended]
        error = got[-1].error  # type: ignore[union-attr]
        assert error is not None
        status = 408 if own == limit else 504
        assert (error.status, error.type, error.code) == (status, "timeout_error", "deadline_exceeded")
        assert f"{limit:g} s" in error.message
        (abort,) = await mine.wait_for(Abort)
        assert abort.rid == stream.rid
        # What the tokenizer says of it afterwards is of no account.
        mine.tokenizer.say(Chunk(stream.rid, 0, "late", pack([6])), Ended(stream.rid))
        await asyncio.sleep(0.05)
        assert stream.ready() == []
        assert client.live == 0

    mine.run(run)
    assert mine.recorder.seen.count(("ended", "deadline_exceeded")) == 1


def test_each_prompt_of_a_request_has_it(bench: Callable[..., Bench]) -> None:
    mine = bench()
    quick: list[str] = []

    def script(g: Generate) -> Any:
        if quick:
            return [started(g)]
        quick.append(g.rid)
        return answer(g)

    mine.tokenizer.script = script

    async def run(client: Client) -> None:
        with stopped(asyncio.get_running_loop()) as clock:
            streams = client.submit_all([(HELLO, PARAMS)] * 3, timeout=0.2)
            ends = [[event async for event in streams[0]][-1]]
            clock.passes(0.2)
            ends += [[event async for event in stream][-1] for stream in streams[1:]]
        assert [end.error is None for end in ends] == [True, False, False]  # type: ignore[union-attr]

    mine.run(run)


def test_no_timer_outlives_its_request(bench: Callable[..., Bench]) -> None:
    """10,000 requests that end in time leave nothing behind, though their time is an hour."""
    mine = bench(request_timeout=3600.0)

    async def run(client: Client) -> None:
        handles = []
        for _ in range(100):
            streams = client.submit_all([(HELLO, SamplingParams())] * 100)
            handles += [stream.deadline for stream in streams]
            for stream in streams:
                stream.cancel()
            await asyncio.sleep(0)
        assert len(handles) == 10_000
        assert all(handle is not None and handle.cancelled() for handle in handles)
        assert client.live == 0
        # asyncio drops cancelled timers from its heap when they are the most of it.
        await asyncio.sleep(0.05)
        assert len(getattr(asyncio.get_running_loop(), "_scheduled", [])) < 1000

    mine.run(run)


def test_a_refused_request_sets_no_timer(bench: Callable[..., Bench]) -> None:
    mine = bench(request_timeout=1.0)
    mine.tokenizer.script = lambda g: [Ended(g.rid)]

    async def run(client: Client) -> None:
        with stopped(asyncio.get_running_loop()) as clock:
            stream = client.submit(HELLO, PARAMS)
            assert [type(event) async for event in stream] == [Ended]
            clock.passes(1.2)
            for _ in range(3):
                await asyncio.sleep(0)
        assert stream.ready() == []

    mine.run(run)
    assert [seen for seen in mine.recorder.seen if seen[0] == "ended"] == [("ended", None)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_over_http(new_server: Callable[..., Harness], stream: bool, begun: bool) -> None:
    """504 as long as nothing has been sent; later an error event, and then the end."""
    harness = new_server(make(request_timeout=0.3))
    harness.tokenizer.script = lambda g: [started(g), Chunk(g.rid, 0, "Pa", pack([5]))] if begun else []
    first = threading.Event()

    def ask() -> tuple[int, str]:
        body = {"prompt": "x", "stream": stream}
        with client(harness) as http, http.stream("POST", "/v1/completions", json=body) as response:
            text = ""
            for piece in response.iter_text():
                text += piece
                first.set()
            return response.status_code, text

    with stopped(harness.loop) as clock:
        asked = in_thread(ask)
        harness.until(lambda: harness.client.live == 1)
        assert not (stream and begun) or first.wait(20)
        clock.passes(0.3)
        status, text = asked()
    if stream and begun:
        assert status == 200
        values = events(text)
        assert values[0]["choices"][0]["text"] == "Pa"
        assert values[-1]["error"]["code"] == "deadline_exceeded"
        assert sum("error" in value for value in values) == 1
        assert text.endswith("data: [DONE]\n\n")
    else:
        assert status == 504
        assert json.loads(text)["error"]["type"] == "timeout_error"
    harness.tokenizer.wait_for(Abort)
    harness.until(lambda: harness.client.live == 0)
