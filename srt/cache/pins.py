"""Pins: paths that are kept for a time, as far as possible.

A pin protects the path to its node, within the node's namespace: all of it is evicted after everything that
is not pinned, pins whose time is over soonest first. It promises no more, so that nothing is ever refused
for its sake. It ends with its time, or when the end of its path had to go after all.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from sapwood.srt.cache.node import Node

MAX_PINNED_SHARE = 0.25
"""Of all slots, how many may be on pinned paths."""

Entry = tuple[float, int, Node]


class Pins:
    """The pins of one tree, on at most `limit` tokens. All steps are amortised O(log pins) but for the length
    of the path: a node counts the pins on it and below it, so that a token is counted once.

    The order of eviction hands on what it should have given out, but is pinned: such leaves are set aside
    here until nothing else is left.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = 0
        """Tokens on pinned paths."""
        self._until: dict[Node, float] = {}
        self._ends: list[Entry] = []
        """A heap of all times that were asked for. Only that which is in `_until` counts."""
        self._aside: list[Entry] = []
        """A heap of the leaves that were set aside, each once: no entry is later than its pin."""
        self._is_aside: set[Node] = set()
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Node]:
        """The pinned nodes."""
        return iter(self._until)

    def holds(self, node: Node) -> bool:
        """Whether the node is set aside."""
        return node in self._is_aside

    def add(self, node: Node, until: float) -> bool:
        """Pin the path to `node`, or let its pin last until then if that is later; False if that would be too
        many tokens."""
        known = self._until.get(node)
        if known is None:
            more = 0
            above: Node | None = node
            while above is not None and above.key and not above.pins:
                more += len(above.slots)
                above = above.parent
            if self.tokens + more > self.limit:
                return False
            self.tokens += more
            self._count(node, 1)
        elif until <= known:
            return True
        self._until[node] = until
        heapq.heappush(self._ends, (until, next(self._entries), node))
        if len(self._ends) > 2 * len(self._until) + 64:  # longer and longer, or broken and made again
            self._ends = [(time, next(self._entries), pinned) for pinned, time in self._until.items()]
            heapq.heapify(self._ends)
        return True

    def remove(self, node: Node) -> None:
        """End the pin of `node`."""
        del self._until[node]
        self._count(node, -1)

    def expire(self, now: float) -> list[Node]:
        """End the pins whose time is over; their nodes."""
        over = []
        while self._ends and self._ends[0][0] <= now:
            until, _, node = heapq.heappop(self._ends)
            if self._until.get(node) == until:
                self.remove(node)
                over.append(node)
        while self._aside and self._aside[0][0] <= now:
            node = self._next_aside()[1]
            if node in self._until:
                self.set_aside(node)
        return over

    def clear(self, namespace: str | None) -> None:
        """End all pins of one namespace, or all (None)."""
        for node in [n for n in self._until if namespace is None or n.namespace == namespace]:
            self.remove(node)
        self._aside = [entry for entry in self._aside if entry[2] in self._until]
        heapq.heapify(self._aside)
        self._is_aside = {node for _, _, node in self._aside}

    def set_aside(self, node: Node) -> None:
        """Keep a pinned leaf that goes when nothing else is left."""
        if node not in self._is_aside:
            self._is_aside.add(node)
            heapq.heappush(self._aside, (self._until[node], next(self._entries), node))

    def take(self) -> Node | None:
        """Of the leaves that were set aside, that which may be evicted and whose pin is over first. It is set
        aside no more."""
        while self._aside:
            until, node = self._next_aside()
            if not node.evictable:
                continue
            if self._until[node] == until:
                return node
            self.set_aside(node)
        return None

    def _next_aside(self) -> tuple[float, Node]:
        until, _, node = heapq.heappop(self._aside)
        self._is_aside.discard(node)
        return until, node

    def _count(self, node: Node, change: int) -> None:
        above: Node | None = node
        while above is not None and above.key:
            above.pins += change
            if change < 0 and not above.pins:
                self.tokens -= len(above.slots)
            above = above.parent
