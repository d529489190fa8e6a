"""Frames between processes: whoever reads them gets to other work after a bounded part of them."""

from __future__ import annotations

import asyncio
import os
import tempfile

from sapwood.srt.channel import READ_BYTES, AsyncInbox, Inbox, Outbox
from sapwood.srt.messages import Cancel, Submit
from sapwood.srt.params import SamplingParams


def test_a_receive_ends_after_some_bytes_and_the_next_goes_on() -> None:
    with tempfile.TemporaryDirectory() as directory:
        inbox, outbox = Inbox(directory, "scheduler"), Outbox(directory, "scheduler")
        size = READ_BYTES * 2 // 3
        sent = [Submit(key, 0, "r", bytes(size), SamplingParams(), "", 0.0) for key in range(5)]
        for message in sent:
            assert outbox.send(message)
        received: list[Submit] = []
        while len(received) < len(sent):
            batch = inbox.receive(10)
            assert 0 < len(batch) <= 2
            received += batch
        assert received == sent
        assert inbox.receive(0) == []
        inbox.close()
        outbox.close()


def test_a_loop_gets_every_frame_and_never_more_than_it_takes_at_once() -> None:
    async def run(directory: str) -> list[list[int]]:
        inbox, outbox = AsyncInbox(directory, "server"), Outbox(directory, "server")
        batches: list[list[int]] = []

        async def read(count: int) -> None:
            while sum(map(len, batches)) < count:
                batch = await asyncio.wait_for(inbox.receive(3), 10)
                batches.append([message.key for message in batch])

        for key in range(10):
            assert outbox.send(Cancel(key))
        await read(10)
        # The descriptor has told of all that; what comes while nobody waits must be seen too.
        for key in range(10, 20):
            assert outbox.send(Cancel(key))
            await asyncio.sleep(0.001)
        await read(20)
        waiting = asyncio.create_task(read(21))
        await asyncio.sleep(0.01)
        assert outbox.send(Cancel(20))
        await waiting
        inbox.close()
        outbox.close()
        return batches

    with tempfile.TemporaryDirectory() as directory:
        batches = asyncio.run(run(directory))
    assert [key for batch in batches for key in batch] == list(range(21))
    assert max(map(len, batches)) <= 3


def test_an_inbox_tells_a_wake_up_from_time_that_has_passed() -> None:
    with tempfile.TemporaryDirectory() as directory:
        inbox, outbox = Inbox(directory, "worker"), Outbox(directory, "worker")
        news, tell = os.pipe()
        inbox.watch(news)
        assert inbox.receive(0.01) == []
        assert inbox.timed_out
        os.write(tell, b"\0")
        assert inbox.receive(10) == []
        assert not inbox.timed_out
        os.read(news, 1)
        assert outbox.send(Cancel(1))
        assert inbox.receive(10) == [Cancel(1)]
        assert not inbox.timed_out
        assert inbox.receive(0.01) == []
        assert inbox.timed_out
        for descriptor in (news, tell):
            os.close(descriptor)
        inbox.close()
        outbox.close()
