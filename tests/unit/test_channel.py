"""Frames between processes: whoever reads them gets to other work after a bounded part of them."""

from __future__ import annotations

import tempfile

from sapwood.srt.channel import READ_BYTES, Inbox, Outbox
from sapwood.srt.messages import Submit
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
