"""The client of the tokenizers: one terminal event a stream, whatever happens; no call blocks."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from sapwood.srt.client import Client, Event, Stream, merge
from sapwood.srt.config import make
from sapwood.srt.errors import Conflict, ErrorInfo, Overloaded, SapwoodError, Unavailable
from sapwood.srt.messages import (
    Abort,
    Answer,
    Ask,
    Chunk,
    Ended,
    Finish,
    Generate,
    Started,
    Stats,
    TextPrompt,
    pack,
)
from sapwood.srt.params import SamplingParams
from tests.api.scripted import ScriptedTokenizer, answer, started
from tests.api.test_control import STATS

PARAMS = SamplingParams()
HELLO = TextPrompt("hello")
DIED = ErrorInfo(500, "server_error", "process_died", "worker died")


class Recorder:
    """An observer that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_started(self, event: Started, namespace: str) -> None:
        self.seen.append(("started", event.rid))

    def on_chunk(self, event: Chunk, arrived: float, now: float) -> None:
        self.seen.append(("chunk", event.text))

    def on_ended(self, event: Ended, arrived: float) -> None:
        self.seen.append(("ended", event.error and event.error.code))


class Bench:
    """Scripted tokenizers, and a way to run a test's coroutine with a started client."""

    def __init__(self, **options: Any) -> None:
        self.config = make(**options)
        self.directory = tempfile.mkdtemp(prefix="sw-")
        self.tokenizers = [ScriptedTokenizer(self.directory, i) for i in range(self.config.tokenizer_workers)]
        self.tokenizer = self.tokenizers[0]
        self.recorder = Recorder()

    def run(self, test: Callable[[Client], Awaitable[None]]) -> None:
        async def run() -> None:
            client = Client(self.config, self.directory, self.recorder)
            await client.start()
            loop, work = asyncio.get_running_loop(), asyncio.ensure_future(test(client))
            # Not by the loop's own time, which a test may stop.
            limit = threading.Timer(20, loop.call_soon_threadsafe, (work.cancel, "it hangs"))
            limit.start()
            try:
                await work
            finally:
                limit.cancel()
                await client.close()

        asyncio.run(run())

    async def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        return await asyncio.to_thread(self.tokenizer.wait_for, kind, count)

    def close(self) -> None:
        for tokenizer in self.tokenizers:
            tokenizer.close()
        shutil.rmtree(self.directory)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make_bench(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make_bench
    for each in made:
        each.close()


async def read(stream: Stream) -> list[Event]:
    return [event async for event in stream]


def test_a_stream_has_its_events_in_order(bench: Callable[..., Bench]) -> None:
    here = bench()

    async def test(client: Client) -> None:
        stream = client.submit(HELLO, PARAMS, "ns")
        assert client.live == 1
        events = await read(stream)
        assert [type(e) for e in events] == [Started, Chunk, Chunk, Chunk, Ended]
        assert client.live == 0
        assert await read(stream) == []
        (generate,) = here.tokenizer.wait_for(Generate)
        assert (generate.rid, generate.namespace) == (stream.rid, "ns")
        assert (generate.prompt, generate.params, generate.arrived) == (HELLO, PARAMS, stream.arrived)

    here.run(test)
    assert here.recorder.seen[1:] == [("chunk", "Pa"), ("chunk", "ris"), ("chunk", ""), ("ended", None)]


def test_nothing_comes_after_the_end(bench: Callable[..., Bench]) -> None:
    here = bench()

    def script(g: Generate) -> list[Any]:
        late = Chunk(g.rid, 0, "late", pack([1]))
        return [*answer(g), late, Ended(g.rid, DIED), started(g), Ended("unknown"), Abort(g.rid)]

    here.tokenizer.script = script

    async def test(client: Client) -> None:
        first = await read(client.submit(HELLO, PARAMS))
        second = await read(client.submit(HELLO, PARAMS))
        for events in (first, second):
            assert [type(e) for e in events] == [Started, Chunk, Chunk, Chunk, Ended]

    here.run(test)


def test_requests_of_many_tokenizers_keep_to_one(bench: Callable[..., Bench]) -> None:
    here = bench(tokenizer_workers=3)
    for tokenizer in here.tokenizers:
        tokenizer.script = lambda g: []

    async def test(client: Client) -> None:
        streams = [client.submit(HELLO, PARAMS) for _ in range(6)]
        assert client.abort_all() == 6
        for tokenizer in here.tokenizers:
            await asyncio.to_thread(tokenizer.wait_for, Abort, 2)
            rids = [m.rid for m in tokenizer.received]
            assert set(rids) <= {s.rid for s in streams}
            generates = [m.rid for m in tokenizer.received if isinstance(m, Generate)]
            aborts = [m.rid for m in tokenizer.received if isinstance(m, Abort)]
            assert len(generates) == 2
            assert sorted(aborts) == sorted(generates)

    here.run(test)


def test_cancel_is_the_end(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]

    async def test(client: Client) -> None:
        stream = client.submit(HELLO, PARAMS)
        assert isinstance(await anext(stream), Started)
        stream.cancel()
        stream.cancel()
        events = await read(stream)
        assert [e.error.code for e in events if isinstance(e, Ended) and e.error] == ["client_disconnected"]
        assert client.live == 0
        await here.wait_for(Abort)
        here.tokenizer.say(Chunk(stream.rid, 0, "x", pack([1])), Ended(stream.rid))

    here.run(test)
    assert [m for m in here.tokenizer.received if isinstance(m, Abort)] == here.tokenizer.received[1:]
    assert here.recorder.seen[-1] == ("ended", "client_disconnected")


def test_a_full_stream_is_aborted(bench: Callable[..., Bench]) -> None:
    here = bench(stream_buffer=16)
    here.tokenizer.script = lambda g: answer(g, ["x"] * 100)

    async def test(client: Client) -> None:
        stream = client.submit(HELLO, PARAMS)
        await here.wait_for(Abort)
        assert client.live == 0
        events = await read(stream)
        assert len(events) == 17
        assert [type(e) for e in events[:-1]] == [Started] + [Chunk] * 15
        last = events[-1]
        assert isinstance(last, Ended)
        assert last.error is not None
        assert last.error.message.startswith("the client reads too slowly")

    here.run(test)


def test_fail_all_ends_streams_and_questions(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]
    here.tokenizer.answers["state"] = None

    async def test(client: Client) -> None:
        streams = [client.submit(HELLO, PARAMS) for _ in range(3)]
        question = asyncio.create_task(client.ask("state"))
        await here.wait_for(Ask)
        client.fail_all(DIED)
        client.fail_all(ErrorInfo(500, "server_error", "later", "another"))
        for stream in streams:
            ends = [e for e in await read(stream) if isinstance(e, Ended)]
            assert ends == [Ended(stream.rid, DIED)]
        with pytest.raises(SapwoodError, match="worker died"):
            await question
        with pytest.raises(Unavailable, match="worker died"):
            client.submit(HELLO, PARAMS)
        with pytest.raises(Unavailable, match="worker died"):
            await client.ask("flush")
        assert await client.idle(0.1)

    here.run(test)


def test_questions(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.answers = {"state": {"nodes": 3}, "check": DIED, "flush": None}

    async def test(client: Client) -> None:
        assert await client.ask("state") == {"nodes": 3}
        with pytest.raises(SapwoodError, match="worker died"):
            await client.ask("check")
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            await client.ask("flush", 0.05)
        late = here.tokenizer.wait_for(Ask)[-1]
        here.tokenizer.say(Answer(late.call, None, {}), Answer(9999, None, {}))
        assert await client.ask("state") == {"nodes": 3}

    here.run(test)


def test_a_question_that_nobody_waits_for_is_cancelled(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.answers = {"tokenize": None, "flush": DIED}

    async def test(client: Client) -> None:
        assert await client.ask("state") == {}
        with pytest.raises(SapwoodError, match="worker died"):
            await client.ask("flush")
        left = asyncio.create_task(client.ask("tokenize", prompt=HELLO))
        await here.wait_for(Ask, 3)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(Unavailable):
            await client.ask("tokenize", 0.05, prompt=HELLO)
        asked = await here.wait_for(Ask, 6)
        assert [a.what for a in asked] == ["state", "flush", "tokenize", "cancel", "tokenize", "cancel"]
        assert [a.call for a in asked[2:]] == [3, 3, 4, 4]

    here.run(test)


def test_a_full_queue_is_overloaded_and_starts_nothing(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bench()
    here.tokenizer.script = lambda g: []

    async def test(client: Client) -> None:
        outbox = client._outboxes[0]
        send, sent = outbox.send, []

        def send_two(*batch: Any) -> bool:
            sent.append(batch)
            return len(sent) != 3 and send(*batch)

        monkeypatch.setattr(outbox, "send", send_two)
        with pytest.raises(Overloaded):
            client.submit_all([(HELLO, PARAMS)] * 5, rid="many")
        assert client.live == 0
        assert len(await here.wait_for(Abort, 2)) == 2
        assert len(here.tokenizer.wait_for(Generate)) == 2
        client.submit(HELLO, PARAMS, rid="many")

    here.run(test)


def test_an_abort_that_finds_the_queue_full_is_sent_later(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]

    async def test(client: Client) -> None:
        streams = [client.submit(HELLO, PARAMS) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        outbox = client._outboxes[0]
        with monkeypatch.context() as patch:
            patch.setattr(outbox, "send", lambda *_batch: False)
            streams[0].cancel()
            with pytest.raises(Overloaded):
                await client.ask("state")
        streams[1].cancel()
        assert [type(m) for m in here.tokenizer.received] == [Generate, Generate]
        here.tokenizer.say(STATS)
        aborts = await here.wait_for(Abort, 2)
        assert [a.rid for a in aborts] == [s.rid for s in streams]

    here.run(test)


def test_names(bench: Callable[..., Bench]) -> None:
    """P42: a live name is refused, for a whole batch too; a name is free after the end."""
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]

    async def test(client: Client) -> None:
        both = client.submit_all([(HELLO, PARAMS)] * 2, rid="a")
        for rid in ("a", ["b", "a"]):
            with pytest.raises(Conflict, match="'a'"):
                client.submit_all([(HELLO, PARAMS)] * len(rid), rid=rid)
        assert client.live == 2
        assert [s.name for s in both] == ["a", "a"]
        assert both[0].rid != both[1].rid
        assert client.abort("a") == 2
        assert client.abort("nobody") == 0
        assert client.abort(client.submit(HELLO, PARAMS).name) == 1
        both[0].cancel()
        with pytest.raises(Conflict):
            client.submit(HELLO, PARAMS, rid="a")
        both[1].cancel()
        client.submit(HELLO, PARAMS, rid="a")

    here.run(test)


def test_merge_ends_with_the_last_stream(bench: Callable[..., Bench]) -> None:
    here = bench()

    async def test(client: Client) -> None:
        streams = client.submit_all([(HELLO, PARAMS)] * 5)
        counts = [0] * 5
        ends = 0
        async for batch in merge(streams):
            assert batch
            for i, event in batch:
                counts[i] += 1
                ends += isinstance(event, Ended)
        assert counts == [5] * 5
        assert ends == 5

    here.run(test)


def test_prompts_that_came_together_are_one_group(bench: Callable[..., Bench]) -> None:
    here = bench()

    async def test(client: Client) -> None:
        client.submit_all([(HELLO, PARAMS)] * 3)
        client.submit(HELLO, PARAMS)
        first, *same, other = [message.group for message in await here.wait_for(Generate, 4)]
        assert same == [first] * 2
        assert len({first, other, ""}) == 3

    here.run(test)


def test_idle_waits_for_the_last_stream(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]

    async def test(client: Client) -> None:
        assert await client.idle(0)
        stream = client.submit(HELLO, PARAMS)
        assert not await client.idle(0.05)
        finish = Chunk(stream.rid, 0, "", b"", None, Finish("stop", None, 0))
        here.tokenizer.say(finish, Ended(stream.rid))
        assert await client.idle(5)

    here.run(test)


def test_stats_are_kept(bench: Callable[..., Bench]) -> None:
    here = bench()

    async def test(client: Client) -> None:
        assert client.latest_stats is None
        here.tokenizer.say(STATS)
        while client.latest_stats is None:
            await asyncio.sleep(0.01)
        assert isinstance(client.latest_stats, Stats)
        assert client.latest_stats.running == 3

    here.run(test)


def test_a_frame_that_cannot_be_read_fails_everything(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]

    async def test(client: Client) -> None:
        stream = client.submit(HELLO, PARAMS)
        await anext(stream)
        here.tokenizer._outbox._socket.send(b"nonsense")
        (ended,) = await read(stream)
        assert isinstance(ended, Ended)
        assert ended.error is not None
        assert ended.error.status == 500

    here.run(test)


def test_close_ends_what_is_open(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: [started(g)]
    kept: list[Stream] = []

    async def test(client: Client) -> None:
        kept.append(client.submit(HELLO, PARAMS))

    here.run(test)
    assert kept[0].ended
    assert here.recorder.seen[-1] == ("ended", "closed")


def test_what_cannot_be_sent_leaves_no_stream_open(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.tokenizer.script = lambda g: []

    async def test(client: Client) -> None:
        with pytest.raises(UnicodeEncodeError):
            client.submit_all([(HELLO, PARAMS), (TextPrompt("\ud83d"), PARAMS), (HELLO, PARAMS)], rid="a")
        assert client.live == 0
        (generate,) = here.tokenizer.wait_for(Generate)
        assert generate.rid in [abort.rid for abort in await here.wait_for(Abort)]
        client.submit(HELLO, PARAMS, rid="a")

    here.run(test)
