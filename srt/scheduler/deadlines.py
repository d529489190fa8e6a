"""Until when requests may wait for their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from sapwood.srt.scheduler.request import Request

SLACK = 64


class Deadline(NamedTuple):
    """At `when` the request has waited for `limit` seconds, which it has set itself (`own`) or the server."""

    when: float
    order: int
    request: Request
    limit: float
    own: bool


class Deadlines:
    """A heap of those that were set. A request that was admitted or has ended has none any more: it is
    dropped when it comes up, and before such requests are many more than those that wait."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._most = SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, limit: float, own: bool) -> None:
        """`request`, which waits, may do so for `limit` seconds since it arrived. O(log n)."""
        if len(self._heap) >= self._most:
            self._heap = [deadline for deadline in self._heap if _waits(deadline.request)]
            heapq.heapify(self._heap)
            self._most = max(SLACK, 2 * len(self._heap))
        heapq.heappush(self._heap, Deadline(request.arrived + limit, request.order, request, limit, own))

    def next(self) -> float | None:
        """When the next one is over, by the clock of the arrivals; None if nobody has one."""
        while self._heap and not _waits(self._heap[0].request):
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def over(self, now: float) -> Iterator[Deadline]:
        """Take out those that are over."""
        while (when := self.next()) is not None and when <= now:
            yield heapq.heappop(self._heap)


def _waits(request: Request) -> bool:
    return not request.admitted and request.live > 0
