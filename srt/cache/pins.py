"""Pins: paths that are kept for a time, as far as possible.

A pin protects the path to its node, within the node's namespace: all of it is evicted after everything that
is not pinned, pins whose time is over soonest first. It promises no more, so that nothing is ever refused
for its sake. It ends with its time, when all who hold it let go, or when the end of its path had to go after
all.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from sapwood.srt.cache.node import Node

MAX_PINNED_SHARE = 0.25
"""Of all slots, how many may be on pinned paths."""
ANYBODY = 0
"""The holder of pins that only their time ends."""

Entry = tuple[float, int, Node]


class Pins:
    """The pins of one tree, on at most `limit` tokens. All steps are amortised O(log pins) but for the length
    of the path: a node counts the pins on it and below it, so that a token is counted once.

    A node has one pin, which several may hold, each for a time of its own: it lasts as long as the longest.

    The order of eviction hands on what it should have given out, but is pinned: such leaves are set aside
    here until nothing else is left.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        """Tokens on pinned paths."""
        self._until: dict[Node, float] = {}
        self._holders: dict[Node, dict[int, float]] = {}
        """By node, until when who holds its pin."""
        self._ends: list[Entry] = []
        """A heap of all times that were asked for. Only that which is in `_until` counts."""
        self._aside: list[Entry] = []
        """A heap of the leaves that were set aside. Only the entry whose number is in `_numbers` counts."""
        self._numbers: dict[Node, int] = {}
        self._entries = itertools.count()
        self.on_break: Callable[[Node, Iterable[int]], None] = lambda node, holders: None
        """Is told whose pin has ended though they have not let go of it."""

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Node]:
        """The pinned nodes."""
        return iter(self._until)

    def holds(self, node: Node) -> bool:
        """Whether the node is set aside."""
        return node in self._numbers

    def holders(self, node: Node) -> dict[int, float]:
        """Who holds the pin of `node`, and until when."""
        return self._holders.get(node, {})

    def add(self, node: Node, until: float, holder: int = ANYBODY) -> bool:
        """Pin the path to `node` until then, or let its pin last so long; False if that would be too many
        tokens. Of a `holder` the last word counts, of ANYBODY the latest time."""
        holders = self._holders.get(node)
        if holders is None:
            more = self._missing(node)
            if self.tokens + more > self.limit:
                return False
            self.tokens += more
            self._count(node, 1)
            holders = self._holders[node] = {}
        if holder == ANYBODY:
            until = max(until, holders.get(ANYBODY, until))
        before, holders[holder] = holders.get(holder), until
        last = self._until.get(node)
        if last is None or until > last:
            self._last_until(node, until)
        elif before == last:
            self._settle(node)
        return True

    def fits_without(self, node: Node, others: Iterable[tuple[Node, int]]) -> bool:
        """Whether the path to `node` could be pinned if some of these pins, each of a node and a holder, were
        let go of: they are asked for one by one until it could."""
        short = self.tokens + self._missing(node) - self.limit
        stays = set(_path(node))
        holders: dict[Node, int] = {}
        gone: dict[Node, int] = {}
        for pinned, _ in others:
            left = holders[pinned] = holders.get(pinned, len(self._holders[pinned])) - 1
            for above in _path(pinned) if not left else ():
                gone[above] = gone.get(above, 0) + 1
                if gone[above] == above.pins and above not in stays:
                    short -= len(above.slots)
            if short <= 0:
                return True
        return short <= 0

    def release(self, node: Node, holder: int) -> bool:
        """`holder` lets go of the pin of `node`, if it holds one; True if that was the last to hold it."""
        holders = self._holders.get(node, {})
        until = holders.pop(holder, None)
        if until is None:
            return False
        if holders:
            if until == self._until[node]:
                self._settle(node)
            return False
        self.remove(node)
        return True

    def remove(self, node: Node) -> None:
        """End the pin of `node`, whoever holds it."""
        del self._until[node]
        self._numbers.pop(node, None)
        self._count(node, -1)
        if holders := self._holders.pop(node):
            self.on_break(node, holders)

    def expire(self, now: float) -> list[Node]:
        """End the pins whose time is over; their nodes."""
        over = []
        while self._ends and self._ends[0][0] <= now:
            until, _, node = heapq.heappop(self._ends)
            if self._until.get(node) == until:
                self.remove(node)
                over.append(node)
        return over

    def clear(self, namespace: str | None) -> None:
        """End all pins of one namespace, or all (None)."""
        for node in [n for n in self._until if namespace is None or n.namespace == namespace]:
            self.remove(node)

    def set_aside(self, node: Node) -> None:
        """Keep a pinned leaf that goes when nothing else is left."""
        number = self._numbers[node] = next(self._entries)
        heapq.heappush(self._aside, (self._until[node], number, node))
        if len(self._aside) > 2 * len(self._numbers) + 64:
            self._aside = [entry for entry in self._aside if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._aside)

    def take(self) -> Node | None:
        """Of the leaves that were set aside, that which may be evicted and whose pin is over first. It is set
        aside no more."""
        while self._aside:
            _, number, node = heapq.heappop(self._aside)
            if self._numbers.get(node) != number:
                continue
            del self._numbers[node]
            if node.evictable:
                return node
        return None

    def _settle(self, node: Node) -> None:
        """One who wanted the pin for longest does so no more."""
        wanted = self._holders[node].values()
        if self._until[node] not in wanted:  # most that share a pin want it for as long
            self._last_until(node, max(wanted))

    def _last_until(self, node: Node, until: float) -> None:
        self._until[node] = until
        heapq.heappush(self._ends, (until, next(self._entries), node))
        if len(self._ends) > 2 * len(self._until) + 64:  # longer and longer, or broken and made again
            self._ends = [(time, next(self._entries), pinned) for pinned, time in self._until.items()]
            heapq.heapify(self._ends)
        if node in self._numbers:
            self.set_aside(node)

    def _missing(self, node: Node) -> int:
        """Tokens of the path that are on no pinned one."""
        return sum(
            len(above.slots) for above in itertools.takewhile(lambda above: not above.pins, _path(node))
        )

    def _count(self, node: Node, change: int) -> None:
        for above in _path(node):
            above.pins += change
            if change < 0 and not above.pins:
                self.tokens -= len(above.slots)


def _path(node: Node) -> Iterator[Node]:
    """The node and all above it in its namespace."""
    above: Node | None = node
    while above is not None and above.key:
        yield above
        above = above.parent
