"""Why a prefix lookup stopped where it did: the place in the tree, and the memory of what was evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.snapshot import Looking, first_ids


class Segment(NamedTuple):
    """An edge of the tree on the way of a prompt: `tokens` of it from token `start` on are the prompt's."""

    start: int
    tokens: int
    hits: int
    locks: int
    last_use: int


class Trace(NamedTuple):
    """Where a lookup ended: `node` is the last one on its path that is matched to its end, `child` the edge
    below it in which it ended (None: between edges). `matched` tokens are cached."""

    node: Node
    child: Node | None
    matched: int

    @property
    def goes_on(self) -> bool:
        """Whether anything is cached that begins with the matched tokens and has more."""
        return self.child is not None or bool(self.node.children)

    def segments(self, limit: int) -> list[Segment]:
        """The last `limit` edges of the path, in its order."""
        found: list[Segment] = []
        if self.child is not None and self.matched > self.node.depth:
            found.append(_segment(self.child, self.node.depth, self.matched - self.node.depth))
        node = self.node
        while node.parent is not None and len(found) < limit:
            if node.key:
                found.append(_segment(node, node.parent.depth, len(node.slots)))
            node = node.parent
        return found[::-1]

    def branches(self, limit: int, tokens: int) -> list[list[int]]:
        """What is cached after the matched tokens: of the `limit` most recently used ways on, the first
        `tokens` ids each, and where a way forks, the most recent, until too many nodes were looked at.
        """
        looking = Looking()
        if self.child is not None:
            return [_onward(self.child, self.matched - self.node.depth, tokens, looking)]
        ways = looking.most_recent(self.node.children.values(), limit)
        return [_onward(child, 0, tokens, looking) for child in ways]


def _segment(node: Node, start: int, tokens: int) -> Segment:
    return Segment(start, tokens, node.hits, node.lock_count, node.last_use)


def _onward(node: Node, start: int, tokens: int, looking: Looking) -> list[int]:
    ids = first_ids(node.key, start, tokens)
    while len(ids) < tokens and (newest := looking.most_recent(node.children.values(), 1)):
        (node,) = newest
        ids += first_ids(node.key, 0, tokens - len(ids))
    return ids


class Ghosts:
    """The edges that were evicted last, at most `size` of them: each is known by the namespace, the CRC of
    the path to it, and its first token. No ids are kept, and a CRC collision costs a wrong reason at most.
    An edge that is cached again may stay: no lookup stops where it would be asked for.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._edges: OrderedDict[tuple[str, int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._edges)

    def add(self, namespace: str, crc: int, token: int) -> None:
        """Remember that the edge which begins with `token` was evicted; the oldest gives way."""
        edge = (namespace, crc, token)
        if edge in self._edges:
            self._edges.move_to_end(edge)
        else:
            self._edges[edge] = None
        if len(self._edges) > self._size:
            self._edges.popitem(last=False)

    def has(self, namespace: str, crc: int, token: int) -> bool:
        """Whether the edge was evicted, as far as is known."""
        return (namespace, crc, token) in self._edges

    def clear(self, namespace: str | None) -> None:
        """Forget one namespace, or all (None)."""
        if namespace is None:
            self._edges.clear()
        else:
            self._edges = OrderedDict.fromkeys(e for e in self._edges if e[0] != namespace)
