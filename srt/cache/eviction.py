"""The order in which unlocked leaves are evicted.

lru        used the longest time ago
lfu        found by the fewest requests, then lru
slru       found again by none since it was made, then lru: a scan of new prompts passes through, and
           leaves what has proved its worth
priority   used by requests of the lowest priority only, then lru
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

from sapwood.srt.cache.node import Node

MAX_FRESH = 256

Policy = Literal["lru", "lfu", "slru", "priority"]


def _proved(node: Node) -> tuple[bool, int]:
    return node.hits > 0, node.last_use


RANKS: dict[Policy, Callable[[Node], Any]] = {
    "lru": attrgetter("last_use"),
    "lfu": attrgetter("hits", "last_use"),
    "slru": _proved,
    "priority": attrgetter("priority", "last_use"),
}
"""What of a node the order goes by, lowest first. As long as the node lives, none of it ever becomes less."""


class Order:
    """Lowest rank first, kept as things change: `push` and `pop` are amortised O(log leaves).

    The tree pushes a node when it may have become evictable, and says nothing when it is used or locked
    again. That is enough, because ranks only grow: an entry is never above its node, so the one on top is
    either right, or is dropped, or goes back in with the node's present rank. A node has at most one entry
    (`queued`), which bounds the heap by the tree.

    Most nodes are locked, or get a child, right after they were pushed. So they first wait in `_fresh`,
    and only those that are still evictable a little later are worth an entry in the heap.
    """

    def __init__(self, policy: Policy) -> None:
        self._rank = RANKS[policy]
        self._heap: list[tuple[Any, int, Node]] = []
        self._fresh: list[Node] = []
        self._entries = 0

    def __iter__(self) -> Iterator[Node]:
        """Every node that is queued, in no order."""
        yield from self._fresh
        yield from (node for _, _, node in self._heap)

    def push(self, node: Node) -> None:
        """Queue a node that may have become evictable."""
        if not node.queued:
            node.queued = True
            self._fresh.append(node)
            if len(self._fresh) > MAX_FRESH:
                self._settle()

    def pop(self) -> Node | None:
        """Take out the evictable node of the lowest rank; None if there is no evictable node."""
        if self._fresh:
            self._settle()
        while self._heap:
            rank, _, node = self._heap[0]
            if not node.evictable:
                heapq.heappop(self._heap)
                node.queued = False
            elif self._rank(node) != rank:
                heapq.heapreplace(self._heap, self._entry(node))
            else:
                heapq.heappop(self._heap)
                node.queued = False
                return node
        return None

    def prune(self) -> None:
        """Drop the entries of nodes that are not evictable, O(entries): for after removing many at once."""
        self._fresh += (node for _, _, node in self._heap)
        self._heap.clear()
        self._settle()

    def _settle(self) -> None:
        for node in self._fresh:
            if node.evictable:
                heapq.heappush(self._heap, self._entry(node))
            else:
                node.queued = False
        self._fresh.clear()

    def _entry(self, node: Node) -> tuple[Any, int, Node]:
        self._entries += 1  # nodes do not compare; equal ranks go by who came first
        return self._rank(node), self._entries, node
