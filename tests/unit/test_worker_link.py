"""What the scheduler sends to a worker of several ranks: every rank gets every step, rank 0 the grammars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt import channel
from sapwood.srt.channel import Inbox
from sapwood.srt.messages import DropGrammars, LoadGrammar, Step
from sapwood.srt.orders import inbox_of
from sapwood.srt.scheduler.loop import WorkerLink

RANKS = 3


def step(number: int) -> Step:
    return Step(number, b"", [], b"", b"", b"", b"", b"", b"")


class Inboxes:
    """Those of one worker's ranks."""

    def __init__(self, folder: Path, index: int) -> None:
        self._inboxes = [Inbox(str(folder), inbox_of(rank), index) for rank in range(RANKS)]

    def received(self, timeout: float = 5.0) -> list[list[Any]]:
        return [inbox.receive(timeout) for inbox in self._inboxes]

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()


@pytest.fixture
def inboxes(tmp_path: Path) -> Iterator[Inboxes]:
    inboxes = Inboxes(tmp_path, 0)
    yield inboxes
    inboxes.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[WorkerLink]:
    link = WorkerLink(str(tmp_path), RANKS)
    yield link
    for outbox in link._outboxes:
        outbox.close()


def test_every_rank_gets_every_step_and_rank_0_alone_the_grammars(link: WorkerLink, inboxes: Inboxes) -> None:
    sent = [LoadGrammar(b"k", "g"), step(0), DropGrammars([b"k"]), step(1)]
    assert all(link.send(message) for message in sent)
    got: list[list[Any]] = [[] for _ in range(RANKS)]
    deadline = time.monotonic() + 20
    while sum(map(len, got)) < len(sent) + 2 * (RANKS - 1) and time.monotonic() < deadline:
        for all_of, some in zip(got, inboxes.received(0.2), strict=True):
            all_of += some
    assert got == [sent, [step(0), step(1)], [step(0), step(1)]]


def test_what_a_dead_worker_did_not_take_never_reaches_the_next(tmp_path: Path, link: WorkerLink) -> None:
    assert link.send(step(0))
    link.turn_to(1)
    again = Inboxes(tmp_path, 1)
    assert link.send(step(1))
    assert again.received() == [[step(1)]] * RANKS
    again.close()


def test_a_full_queue_of_any_rank_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is not there: what is for it waits in its queue."""
    monkeypatch.setattr(channel, "HIGH_WATER", 3)
    present = [Inbox(str(tmp_path), inbox_of(rank)) for rank in (0, 1)]
    link = WorkerLink(str(tmp_path), RANKS)
    for number in range(3):
        assert link.send(step(number))
        assert [inbox.receive(5) for inbox in present] == [[step(number)]] * 2
        time.sleep(0.05)  # in which the links hear that it was taken
    assert not link.send(step(3))
    for inbox in [*present, *link._outboxes]:
        inbox.close()
