"""Ranks of one model as threads of this process, which compute in turn and meet at every collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from sapwood.srt.models.parallel import Group

T = TypeVar("T")
SECONDS = 60.0


class _Meeting:
    """Where they meet: the kernels are not made for two threads at a time, so one has the turn."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.given: list[Any] = [None] * size


class ThreadRank:
    """A `Group`: what `Ranks` promises, between threads."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self.calls: list[str] = []
        self._meeting = meeting

    def sum(self, partial: Tensor) -> None:
        total, *others = self._swap("sum", partial)
        total = total.clone()
        for other in others:
            total += other
        self._swap("added", None)
        partial.copy_(total)

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None:
        parts = self._swap("gather", part)
        assert [theirs.shape[1] for theirs in parts] == list(widths)
        begin = 0
        for theirs in parts:
            out[:, begin : begin + theirs.shape[1]] = theirs
            begin += theirs.shape[1]

    def broadcast(self, values: Tensor) -> None:
        first = self._swap("broadcast", values)[0].clone()
        self._swap("read", None)
        values.copy_(first)

    def smallest(self, value: int) -> int:
        return min(self._swap("smallest", value))

    def _swap(self, call: str, value: Any) -> list[Any]:
        """Everybody's value; they must all be at the same call."""
        self.calls.append(call)
        meeting = self._meeting
        meeting.given[self.rank] = (call, value)
        meeting.turn.release()
        try:
            meeting.barrier.wait()
            given = list(meeting.given)
            meeting.barrier.wait()
        finally:
            meeting.turn.acquire()
        assert {theirs for theirs, _value in given} == {call}, "the ranks go different ways"
        return [value for _call, value in given]


def together(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` gives for each rank, in order. A rank that fails ends the others."""
    meeting = _Meeting(size)

    def one(rank: int) -> T:
        with meeting.turn:
            try:
                return work(ThreadRank(rank, size, meeting))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
