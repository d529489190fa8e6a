"""One line of waiting sequences: who of it goes next.

Those that have run before (retracted, or forked from a running request) go first. Then the policy's order
holds until the oldest in the line has been overtaken by as much work as it may be; then it goes next. Work
is counted in tokens: those of the prompt that were not cached when it came, and the output to be expected.
So, of the requests of one line:

    A request is overtaken by younger ones' work of at most `base` + `share` x the most work that any request
    not younger than it found waiting when it came, and one admission.

(But for the time in which all of the MAX_LOOK oldest wait for what others compute.)

Nothing is sorted: spots (see spots.py) stand in a heap by the rank that they had when they last changed for
the better. One that has changed for the worse is put right when it comes up.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from sapwood.srt.cache.node import Node
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.spots import Spot

MAX_LOOK = 64
"""How many of the oldest are looked at for one that does not wait for another."""

REPLAN = 512
"""The order of DepthFirst is made anew after as many admissions as there are times so many that wait."""

Rank = tuple[int, ...]


def by_arrival(sequence: Sequence) -> Rank:
    """First come, first served."""
    return sequence.request.order, sequence.choice


def by_program(sequence: Sequence) -> Rank:
    """The requests of a program next to each other, where its first one would be; of one, by arrival."""
    request = sequence.request
    first = request.order if request.program is None else request.program.order
    return first, *by_arrival(sequence)


class Line:
    """Sequences that are ordered among each other: `rank` orders those at one spot; with `by_match` the
    spots with most cached tokens go first, else the one whose first sequence has the lowest rank. `base` is
    the work by which any request may be overtaken, `share` that part of the work that it found waiting."""

    def __init__(
        self,
        base: int,
        share: float,
        rank: Callable[[Sequence], Rank] = by_arrival,
        by_match: bool = False,
    ) -> None:
        self.waiting = 0
        self.work = 0
        """That of those that wait."""
        self.base = base
        self.share = share
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
        """`sequence` begins to wait in this line. Its spot is told by `enter`, its work by `weigh`."""
        sequence.line = self
        sequence.ahead, sequence.work = self.work, 0
        self.waiting += 1
        if not sequence.resumed:
            self._fifo.append(sequence)

    def weigh(self, sequence: Sequence, work: int) -> None:
        """It is so much work, as far as is known."""
        sequence.work = work
        self.work += work

    def leave(self, sequence: Sequence) -> None:
        """It waits no more."""
        assert sequence.line is self
        sequence.line = None
        self.waiting -= 1
        self.work -= sequence.work
        # What has left is dropped where it comes up; here, too, lest there be ever more of it behind one that
        # waits for long.
        if len(self._fifo) > 2 * self.waiting + MAX_LOOK:
            self._fifo = deque(s for s in self._fifo if s.line is self)
        if len(self._heap) > 2 * self.waiting + MAX_LOOK:
            self._heap = [entry for entry in self._heap if self._stands(entry)]
            heapq.heapify(self._heap)
        spot = sequence.spot
        heap = spot.queue.get(self) if spot is not None else None
        if spot is not None and heap is not None and len(heap) > 2 * spot.size + MAX_LOOK:
            heap[:] = [(rank, s) for rank, s in heap if s.spot is spot and s.line is self]
            heapq.heapify(heap)

    def admitted(self, sequence: Sequence, work: int) -> None:
        """`sequence`, which has left, goes ahead; it is `work`."""
        if sequence.resumed:
            return
        oldest, order = self._oldest(), sequence.request.order
        if oldest is not None and order > oldest.request.order:
            heapq.heappush(self._passed, (order, work))
            self._younger += work

    def enter(self, spot: Spot, sequence: Sequence) -> None:
        """`sequence` of this line has come to the spot."""
        heap = spot.queue.setdefault(self, [])
        heapq.heappush(heap, ((not sequence.resumed, *self._rank(sequence)), sequence))
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
        best, oldest = self._best(), self._oldest()
        if best is None or best.resumed or oldest is None:
            return best
        if self._younger >= self.base + self.share * oldest.ahead:
            for sequence in itertools.islice((s for s in self._fifo if s.line is self), MAX_LOOK):
                if sequence.spot is not None and not sequence.spot.blocked:
                    return sequence
        return best

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
                spot.entered.pop(self, None)
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
        if heap is not None:
            del spot.queue[self]
        return None

    def _stands(self, entry: tuple[Rank, int, Spot]) -> bool:
        """Whether the entry of the heap is still good for something; its spot forgets it if not."""
        rank, _, spot = entry
        if spot.entered.get(self) != rank:
            return False
        if self._member(spot) is None or spot.blocked:
            del spot.entered[self]
            return False
        return True

    def _rank_of(self, spot: Spot, first: Sequence) -> Rank:
        rank = self._rank(first)
        return (not first.resumed, -spot.matched if self._by_match else 0, *rank)

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


class DepthFirst(Line):
    """Branch by branch of the tree, at each fork the branch first in which most wait; ties by arrival. A
    branch that was begun is gone through to its end.

    The order is made anew after some admissions, and when it is used up, not at each.
    """

    def __init__(self, base: int, share: float) -> None:
        super().__init__(base, share, by_match=True)
        self._planned: deque[Spot] = deque()
        self._left = 0
        self._at: Node | None = None
        """Where the last one was found."""

    def _best(self) -> Sequence | None:
        fallback = super()._best()
        if fallback is None or fallback.resumed:
            return fallback
        for fresh in (False, True):
            if fresh or self._left <= 0:
                self._planned = deque(self._depth_first())
                self._left = max(1, self.waiting // REPLAN)
            while self._planned:
                first = self._member(self._planned[0])
                if first is not None and not self._planned[0].blocked:
                    self._at = self._planned[0].node
                    return first
                self._planned.popleft()
        return fallback

    def admitted(self, sequence: Sequence, work: int) -> None:
        super().admitted(sequence, work)
        self._left -= 1

    def _depth_first(self) -> list[Spot]:
        spots = [spot for rank, _, spot in self._heap if spot.entered.get(self) == rank and not spot.blocked]
        begun = set(_path(self._at))
        weights: dict[Node, int] = {}
        lowest: dict[Node, int] = {}
        keys = []
        for spot in spots:
            first = self._member(spot)
            order = first.request.order if first is not None else 0
            keys.append(order)
            for node in _path(spot.node):
                weights[node] = weights.get(node, 0) + spot.size
                lowest[node] = min(lowest.get(node, order), order)

        def way(spot: Spot, order: int) -> list[Rank]:
            steps = [(0, node not in begun, -weights[node], lowest[node]) for node in _path(spot.node)]
            return [*reversed(steps), (1, -spot.matched, order)]

        ordered = sorted(zip(spots, keys, strict=True), key=lambda each: way(*each))
        return [spot for spot, _ in ordered]


def _path(node: Node | None) -> Iterator[Node]:
    """The node and all above it."""
    while node is not None:
        yield node
        node = node.parent
