"""Where in the tree every waiting sequence's lookup ends, kept as the tree grows, splits and shrinks.

    cached     ──[5 9 2 7]──┬──[1 1]
    A waits     5 9 2 7     └─ 8 8 ...        at spot (4, 8)
    B waits     5 9 2 7        8 3 ...        at spot (4, 8)
    C runs      5 9 2 7        8 8 4 ...      computes at spot (4, 8): A and B wait for it
    D waits     5 9 6 ...                     at spot (2, 6), inside the edge

Those at one spot have the same tokens cached and the same token next. So when one of them is computed, the
others need not be compared with it: they wait. When it has put something into the tree, and only then, those
of this one spot are looked up again, from there on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from sapwood.srt.cache.node import Node, token_at
from sapwood.srt.cache.radix import RadixTree

if TYPE_CHECKING:
    from sapwood.srt.scheduler.lines import Line
    from sapwood.srt.scheduler.request import Sequence

END = -1
"""In the place of the next token: all that may come from the cache is cached."""

Key = tuple[int, int]


class Spot:
    """`matched` tokens of all who are here are cached, down to or inside the edge of `node`; `token` is next.
    They wait for those that compute it, if they may take it from the cache."""

    __slots__ = ("computing", "entered", "matched", "node", "queue", "size", "token")

    def __init__(self, node: Node, key: Key) -> None:
        self.node = node
        self.matched, self.token = key
        self.computing: set[Sequence] = set()
        self.queue: dict[Line, list[tuple[tuple[int, ...], Sequence]]] = {}
        """By line a heap of the waiting sequences; those that have left are still in it."""
        self.entered: dict[Line, tuple[int, ...]] = {}
        """By line, the rank with which the spot stands in the line."""
        self.size = 0
        """How many wait here."""

    @property
    def key(self) -> Key:
        return self.matched, self.token

    @property
    def blocked(self) -> bool:
        """Whether what comes next is being computed."""
        return bool(self.computing) and self.token != END


class Listener(Protocol):
    """Hears of spots whose place in the order may have changed for the better."""

    def enter(self, spot: Spot, sequence: Sequence) -> None:
        """`sequence` has come to the spot."""

    def improved(self, spot: Spot) -> None:
        """The spot has moved, or is no longer blocked."""


class Spots:
    """The spots of one tree, and the tree's follower (see cache/radix.py)."""

    def __init__(self, tree: RadixTree, listener: Listener) -> None:
        self._tree = tree
        self._listener = listener
        tree.follower = self

    def wait(self, sequence: Sequence) -> None:
        """`sequence` waits: find its spot."""
        sequence.raw = sequence.ids.tobytes()
        self._place(sequence, None)

    def compute(self, sequence: Sequence, node: Node) -> None:
        """`sequence`, which waited, begins to compute its tokens from `node`, its path in the tree, on."""
        raw = sequence.raw
        self.leave(sequence)
        sequence.computes, sequence.raw = True, raw
        self._place(sequence, node)

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits and computes no more. Does nothing if it does neither."""
        spot = sequence.spot
        if spot is not None:
            self._remove(sequence, spot)
            if spot.size == 0 and not spot.computing:
                self._drop(spot)
        sequence.computes, sequence.raw = False, b""

    # ---- what the tree says

    def grew(self, parent: Node, child: Node) -> None:
        """`child` was added below `parent`."""
        spot = self._take(parent, (parent.depth, token_at(child.key, 0)))
        for sequence in self._all(spot) if spot is not None else ():
            sequence.spot = None
            self._place(sequence, parent)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was put in the midst of the edge to `lower`."""
        assert lower.spots is not None
        for spot in [s for s in lower.spots.values() if s.matched <= upper.depth]:
            del lower.spots[spot.key]
            self._put(upper, spot)

    def shrank(self, node: Node, token: int, into: Node) -> None:
        """What `node` had from the end of `into` on, which began with `token`, is no longer cached; `into` is
        `node` itself, or what was above it."""
        assert node.spots is not None
        depth = into.depth
        for spot in [s for s in node.spots.values() if s.matched > depth]:
            del node.spots[spot.key]
            there = into.spots.get((depth, token)) if into.spots is not None else None
            if there is None:
                spot.matched, spot.token = depth, token
                self._put(into, spot)
                self._listener.improved(spot)
                continue
            for sequence in self._all(spot):
                sequence.spot = None
                self._add(sequence, there)

    def listed(self) -> None:
        """A prefix was listed: those that wait are all looked up anew. Where one computes does not change."""
        spots = [spot for node in self._tree.nodes() for spot in (node.spots or {}).values()]
        for sequence in [s for spot in spots for s in self._all(spot) if not s.computes]:
            self.leave(sequence)
            self.wait(sequence)

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Every one of `waiting` is where its lookup ends: AssertionError if not."""
        for sequence in waiting:
            spot, ids = sequence.spot, sequence.ids
            assert spot is not None, f"{sequence.key} waits nowhere"
            trace = self._tree.trace(sequence.request.namespace, ids.tobytes(), sequence.matchable)
            node = trace.child or trace.node
            assert (spot.node, spot.matched) == (node, trace.matched), f"{sequence.key} waits elsewhere"
            token = END if trace.matched >= sequence.matchable else int(ids[trace.matched])
            assert spot.token == token, f"{sequence.key} waits for another token"
            assert (node.spots or {}).get(spot.key) is spot, "a spot that is not in the tree"

    # ---- placing

    def _place(self, sequence: Sequence, known: Node | None) -> None:
        """Look the sequence up, from `known` on, and put it where that ends."""
        limit = len(sequence.ids) if sequence.computes else sequence.matchable
        namespace = sequence.request.namespace
        trace = self._tree.trace(namespace, sequence.raw, limit, known)
        token = END if trace.matched >= limit else int(sequence.ids[trace.matched])
        if sequence.computes and token == END:
            return  # nobody needs to wait for it
        node = trace.child or self._tree.keep(trace.node)
        key = (trace.matched, token)
        if node.spots is None:
            node.spots = {}
        spot = node.spots.get(key)
        if spot is None:
            spot = node.spots[key] = Spot(node, key)
        self._add(sequence, spot)

    def _add(self, sequence: Sequence, spot: Spot) -> None:
        sequence.spot = spot
        if sequence.computes:
            spot.computing.add(sequence)
        else:
            spot.size += 1
            self._listener.enter(spot, sequence)

    def _remove(self, sequence: Sequence, spot: Spot) -> None:
        sequence.spot = None
        if not sequence.computes:
            spot.size -= 1
            return
        spot.computing.discard(sequence)
        if not spot.computing and spot.size:
            self._listener.improved(spot)

    def _all(self, spot: Spot) -> list[Sequence]:
        """All who are at the spot; those who wait in each line's order."""
        waiting = [
            sequence
            for heap in spot.queue.values()
            for _, sequence in sorted(heap, key=lambda entry: entry[0])
            if sequence.spot is spot and not sequence.computes
        ]
        return [*spot.computing, *dict.fromkeys(waiting)]

    def _put(self, node: Node, spot: Spot) -> None:
        spot.node = node
        if node.spots is None:
            node.spots = {}
        node.spots[spot.key] = spot

    def _take(self, node: Node, key: Key) -> Spot | None:
        return node.spots.pop(key, None) if node.spots is not None else None

    def _drop(self, spot: Spot) -> None:
        """Nobody is here any more."""
        node = spot.node
        assert node.spots is not None
        if node.spots.get(spot.key) is spot:
            del node.spots[spot.key]
        if not node.spots:
            node.spots = None
            self._tree.prune(node)
