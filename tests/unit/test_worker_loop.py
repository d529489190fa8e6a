"""The worker's loop: what it does first, and what it puts off until nothing has come for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.srt import log
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import make
from sapwood.srt.messages import GrammarLoaded, LoadGrammar, Step, StepResult
from sapwood.srt.models.parallel import Group
from sapwood.srt.orders import Boot
from sapwood.srt.worker import loop
from sapwood.srt.worker.choice import Choice


class Spare:
    """`Runs` that always has something to put off; `done`: what it did of that, and what it told."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def fileno(self) -> int | None:
        return None

    def start(self, step: Step) -> list[StepResult]:
        raise AssertionError("no step is sent")

    def finished(self) -> list[StepResult]:
        self.done.append("finished")
        return []

    def has_spare_work(self) -> bool:
        return True

    def idle(self) -> bool:
        self.done.append("idle")
        return True


@pytest.fixture
def inboxes(tmp_path: Path) -> Iterator[tuple[Inbox, Inbox]]:
    both = Inbox(str(tmp_path), "worker"), Inbox(str(tmp_path), "scheduler")
    yield both
    for inbox in both:
        inbox.close()


def test_what_can_be_put_off_waits_until_nothing_comes(tmp_path: Path, inboxes: tuple[Inbox, Inbox]) -> None:
    """A grammar that is there is told of at once, and a wake-up is no idleness, whatever comes of it."""
    inbox, scheduler = inboxes
    to_scheduler, to_worker = Outbox(str(tmp_path), "scheduler"), Outbox(str(tmp_path), "worker")
    news, tell = os.pipe()
    inbox.watch(news)
    done: list[str] = []
    loaded = [GrammarLoaded(b"key")]

    def finished() -> list[GrammarLoaded]:
        os.read(news, 1)
        return [loaded.pop()] if loaded else []

    grammars: Any = SimpleNamespace(finished=finished, load=lambda message: done.append("load"))
    try:
        for _ in range(2):
            os.write(tell, b"\0")
            loop.turn(inbox, to_scheduler, Spare(done), grammars)
            assert done == ["finished"]
            done.clear()
        assert scheduler.receive(10) == [GrammarLoaded(b"key")]
        grammars.finished = list
        to_worker.send(LoadGrammar(b"key", ""))
        while done[:1] != ["load"]:  # who connects takes a moment
            done.clear()
            loop.turn(inbox, to_scheduler, Spare(done), grammars)
        assert done == ["load", "finished"]
        done.clear()
        loop.turn(inbox, to_scheduler, Spare(done), grammars)
        assert done == ["finished", "idle"], "what there is to be told goes first"
    finally:
        for outbox in (to_scheduler, to_worker):
            outbox.close()
        for descriptor in (news, tell):
            os.close(descriptor)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_chooses_its_gpu_before_it_meets_the_others(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its part of NCCL would take room on the first GPU."""
    done: list[Any] = []

    class Met(Exception):
        pass

    def meet(boot: Boot, device: torch.device, *given: Any) -> Group:
        done.append("meets")
        raise Met

    monkeypatch.setattr(loop, "choose", lambda config: Choice("cuda", "flashinfer"))
    monkeypatch.setattr(log, "set_up", lambda *given: None)
    monkeypatch.setattr(loop, "_group", meet)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    inboxes: list[Inbox] = []
    monkeypatch.setattr(loop, "Inbox", lambda *given: inboxes.append(Inbox(*given)))
    boot: Any = SimpleNamespace(
        config=make(tensor_parallel_size=2), rank=rank, index=0, directory=str(tmp_path), name="worker"
    )
    with pytest.raises(Met):
        loop.main(boot, SimpleNamespace())  # type: ignore[arg-type]
    assert done == [torch.device("cuda", rank), "meets"]
    for inbox in inboxes:
        inbox.close()
