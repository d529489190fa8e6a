"""One line of waiting sequences: who of it goes next.

The policy's order holds until the oldest in the line has been overtaken by as much work as it may be; then
it goes next. Work is counted in tokens to compute. So, of the sequences of one line:

    A request is overtaken by younger ones' work of at most `base` + SHARE x the most tokens that any request
    not younger than it found waiting when it came, and one admission.

Nothing is sorted: spots (see spots.py) stand in a heap by the rank that they had when they last changed for
the better. One that has changed for the worse is put right when it comes up.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.spots import Spot

SHARE = 0.5
"""How much of the work that a request found waiting may overtake it."""
MAX_LOOK = 64
"""How many of the oldest are looked at for one that does not wait for another."""

Rank = tuple[int, ...]


def by_arrival(sequence: Sequence) -> Rank:
    """First come, first served."""
    return sequence.request.order, sequence.choice


class Line:
    """Sequences that are ordered among each other: `rank` orders those at one spot; with `by_match` the
    spots with most cached tokens go first, else the one whose first sequence has the lowest rank. Without
    `base` there is no bound on overtaking."""

    def __init__(
        self, base: int | None, rank: Callable[[Sequence], Rank] = by_arrival, by_match: bool = False
    ) -> None:
        self.waiting = 0
        self.tokens = 0
        """Tokens of those that wait."""
        self._base = base
        self._rank = rank
        self._by_match = by_match
        self._heap: list[tuple[Rank, int, Spot]] = []
        self._entries = itertools.count()
        self._fifo: deque[Sequence] = deque()
        self._passed: list[tuple[int, int]] = []
        """Order and work of those that were admitted and are younger than the oldest that waits."""
        self._younger = 0
        """Their work in all."""

    def join(self, sequence: Sequence) -> None:
        """`sequence` begins to wait in this line. Its spot is told by `enter`."""
        sequence.line = self
        sequence.ahead = self.tokens
        self.waiting += 1
        self.tokens += len(sequence.ids)
        if self._base is not None:
            self._fifo.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It waits no more."""
        assert sequence.line is self
        sequence.line = None
        self.waiting -= 1
        self.tokens -= len(sequence.ids)
        if len(self._fifo) > 2 * self.waiting + MAX_LOOK:
            self._fifo = deque(s for s in self._fifo if s.line is self)

    def admitted(self, sequence: Sequence, work: int) -> None:
        """`sequence`, which has left, goes ahead with `work` tokens to compute."""
        oldest, order = self._oldest(), sequence.request.order
        if oldest is not None and order > oldest.request.order:
            heapq.heappush(self._passed, (order, work))
            self._younger += work

    def enter(self, spot: Spot, sequence: Sequence) -> None:
        """`sequence` of this line has come to the spot."""
        heap = spot.queue.setdefault(self, [])
        heapq.heappush(heap, (self._rank(sequence), sequence))
        if heap[0][1] is sequence:
            self.offer(spot)

    def offer(self, spot: Spot) -> None:
        """The spot may stand further ahead than it does."""
        first = self._member(spot)
        if first is None or spot.blocked:
            return
        rank, known = self._rank_of(spot, first), spot.entered.get(self)
        if known is None or rank < known:
            spot.entered[self] = rank
            heapq.heappush(self._heap, (rank, next(self._entries), spot))

    def first(self) -> Sequence | None:
        """Who goes next; None if all who wait do so for others."""
        oldest = self._oldest()
        if oldest is not None and self._base is not None and self._younger >= self._allowed(oldest):
            for sequence in itertools.islice((s for s in self._fifo if s.line is self), MAX_LOOK):
                if sequence.spot is not None and not sequence.spot.blocked:
                    return sequence
        return self._best()

    def _allowed(self, oldest: Sequence) -> float:
        """The work that may overtake it."""
        assert self._base is not None
        return self._base + SHARE * oldest.ahead

    def _best(self) -> Sequence | None:
        heap = self._heap
        while heap:
            rank, _, spot = heap[0]
            if spot.entered.get(self) != rank:
                heapq.heappop(heap)
                continue
            first = self._member(spot)
            if first is None or spot.blocked:
                heapq.heappop(heap)
                del spot.entered[self]
                continue
            now = self._rank_of(spot, first)
            if now == rank:
                return first
            spot.entered[self] = now
            heapq.heapreplace(heap, (now, next(self._entries), spot))
        return None

    def _member(self, spot: Spot) -> Sequence | None:
        """The first of this line's sequences at the spot."""
        heap = spot.queue.get(self)
        while heap:
            sequence: Sequence = heap[0][1]
            if sequence.spot is spot and sequence.line is self:
                return sequence
            heapq.heappop(heap)
        return None

    def _rank_of(self, spot: Spot, first: Sequence) -> Rank:
        rank = self._rank(first)
        return (-spot.matched, *rank) if self._by_match else rank

    def _oldest(self) -> Sequence | None:
        """The first to have come of those that wait."""
        fifo = self._fifo
        while fifo and fifo[0].line is not self:
            fifo.popleft()
        if not fifo:
            self._passed.clear()
            self._younger = 0
            return None
        order = fifo[0].request.order
        while self._passed and self._passed[0][0] < order:
            self._younger -= heapq.heappop(self._passed)[1]
        return fifo[0]
