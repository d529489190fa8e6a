"""Pins: paths that are kept for a time, as far as possible.

A pin protects the path to its node, within the node's namespace: all of it is evicted after everything that
is not pinned, pins whose time is over soonest first. It promises no more, so that nothing is ever refused
for its sake. It ends with its time, when all who hold it let go, or when the end of its path had to go after
all.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

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
        holders[holder] = until
        self._settle(node)
        return True

    def release(self, node: Node, holder: int) -> bool:
        """`holder` lets go of the pin of `node`, if it holds one; True if that was the last to hold it."""
        holders = self._holders.get(node, {})
        if holders.pop(holder, None) is None:
            return False
        if holders:
            self._settle(node)
            return False
        self.remove(node)
        return True

    def remove(self, node: Node) -> None:
        """End the pin of `node`, whoever holds it."""
        del self._until[node], self._holders[node]
        self._numbers.pop(node, None)
        self._count(node, -1)

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
        """The pin lasts as long as the longest of those who hold it want."""
        until = max(self._holders[node].values())
        if self._until.get(node) == until:
            return
        self._until[node] = until
        heapq.heappush(self._ends, (until, next(self._entries), node))
        if len(self._ends) > 2 * len(self._until) + 64:  # longer and longer, or broken and made again
            self._ends = [(time, next(self._entries), pinned) for pinned, time in self._until.items()]
            heapq.heapify(self._ends)
        if node in self._numbers:
            self.set_aside(node)

    def _missing(self, node: Node) -> int:
        """Tokens of the path that are on no pinned one."""
        more = 0
        above: Node | None = node
        while above is not None and above.key and not above.pins:
            more += len(above.slots)
            above = above.parent
        return more

    def _count(self, node: Node, change: int) -> None:
        above: Node | None = node
        while above is not None and above.key:
            above.pins += change
            if change < 0 and not above.pins:
                self.tokens -= len(above.slots)
            above = above.parent
