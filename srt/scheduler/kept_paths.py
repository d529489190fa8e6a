"""Which paths of the tree are pinned for programs, and which of them make room for others.

    [ few-shot prompt ]──┬──[ question 1 ]──[ answer 1 ]      found again by questions 2 and 3: kept
           shared        ├──[ question 2 ]──[ answer 2 ]      ends of requests: a next turn may begin there,
                         └──[ question 3 ]──[ answer 3 ]      so the last ones are kept as long as they fit

Where a request's cached prefix ended, its program has used a path again, and is likely to once more. Ends are
only hoped for: most branches of a fork are read and left. So there is one order in which paths give way: of
the tenant that keeps most, its ends first, then what it used again, each by its last use. Ends make room for
all, what was used again only for such as well; and nobody makes room for a tenant that would keep more.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree

if TYPE_CHECKING:
    from sapwood.srt.scheduler.programs import Program

MAX_PATHS = 64
"""Pins of one program."""
MAX_IN_ALL = 2048
"""Pins of all programs together: so many are looked at for one that finds no room."""


@dataclass(slots=True, eq=False)
class KeptPath:
    """A path that is pinned for a program; `again`: a request has begun with it. `tokens` are those of all of
    it that belong to its namespace."""

    program: Program
    node: Node
    tokens: int
    again: bool = False


@dataclass(slots=True)
class _Share:
    """What is kept for a tenant, each kind in the order of its last use; `tokens` counts each path whole."""

    tokens: int = 0
    ends: OrderedDict[KeptPath, None] = field(default_factory=OrderedDict)
    again: OrderedDict[KeptPath, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.ends) + len(self.again)


class KeptPaths:
    """The pins of all programs in one tree. Ends last for `timeout` seconds, what was used again as long as
    its program."""

    def __init__(self, tree: RadixTree, timeout: float) -> None:
        self._tree = tree
        self._timeout = timeout
        self._shares: dict[str, _Share] = {}
        """By tenant, of those for whom something is kept."""
        self._held: dict[tuple[int, Node], KeptPath] = {}
        tree.pins.on_break = self._broken

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, program: Program, node: Node, again: bool, now: float) -> None:
        """Pin the path to `node` if there is room for it, or can be made; `again`: a request has begun with
        it. Nothing is changed if not."""
        if not node.key:
            return
        path = program.paths.get(node) or KeptPath(program, node, _own_tokens(node))
        again |= path.again
        if path.tokens > self._tree.pins.limit or not self._pin(path, again, now):
            return
        self._forget(path)
        path.again = again
        self._remember(path)
        self._let_go_above(path)
        if len(program.paths) > MAX_PATHS:
            paths = program.paths.values()
            self._let_go(next((p for p in paths if not p.again and p is not path), next(iter(paths))))
        if len(self._held) > MAX_IN_ALL:
            most = max(self._shares.values(), key=len)
            self._let_go(next((p for p in chain(most.ends, most.again) if p is not path), path))

    def release(self, program: Program, now: float) -> int:
        """End all of the program's pins; how many tokens are pinned by nobody then."""
        self._tree.expire(now)
        before = self._tree.pinned_tokens
        for path in list(program.paths.values()):
            self._let_go(path)
        self._tree.expire(now)  # others may hold some whose time has been over for long
        return before - self._tree.pinned_tokens

    def _pin(self, path: KeptPath, again: bool, now: float) -> bool:
        """Pin it after all those have let go that have to, or do nothing."""
        until, number = inf if again else now + self._timeout, path.program.number
        if self._tree.pin(path.node, until, number):
            return True
        going: list[KeptPath] = []

        def one_by_one() -> Iterator[tuple[Node, int]]:
            for each in self._in_order(path, again):
                going.append(each)
                yield each.node, each.program.number

        if not self._tree.pins.fits_without(path.node, one_by_one()):
            return False
        for each in going:
            self._let_go(each)
        return self._tree.pin(path.node, until, number)

    def _in_order(self, newcomer: KeptPath, again: bool) -> Iterator[KeptPath]:
        """What gives way for the newcomer, first to last."""
        mine = self._shares.get(newcomer.program.key.tenant)
        heap = []
        for i, share in enumerate(self._shares.values()):
            tokens = share.tokens + (newcomer.tokens if share is mine else 0)
            heap.append((-tokens, i, share is mine, chain(share.ends, share.again if again else ())))
        if mine is None:
            heap.append((-newcomer.tokens, len(heap), True, chain()))
        heapq.heapify(heap)
        while heap:
            tokens, i, own, paths = heap[0]
            path = next(paths, None)
            if path is not None:
                heapq.heapreplace(heap, (tokens + path.tokens, i, own, paths))
                yield path
            elif own:
                return
            else:
                heapq.heappop(heap)

    def _let_go_above(self, path: KeptPath) -> None:
        """What is pinned through `path` needs no pin of its own, unless that is more likely to stay, or the
        program goes other ways from there too."""
        above = path.node.parent
        while above is not None and above.key:
            known = path.program.paths.get(above)
            if known is not None and len(above.children) < 2 and (path.again or not known.again):
                self._let_go(known)
            above = above.parent

    def _let_go(self, path: KeptPath) -> None:
        self._forget(path)
        self._tree.unpin(path.node, path.program.number)

    def _broken(self, node: Node, holders: Iterable[int]) -> None:
        """The pin of `node` is over, or had to go."""
        for number in holders:
            path = self._held.get((number, node))
            if path is not None:
                self._forget(path)

    def _remember(self, path: KeptPath) -> None:
        """It is the one that was used last."""
        program = path.program
        share = self._shares.setdefault(program.key.tenant, _Share())
        share.tokens += path.tokens
        (share.again if path.again else share.ends)[path] = None
        program.paths[path.node] = self._held[program.number, path.node] = path

    def _forget(self, path: KeptPath) -> None:
        """Do nothing if it is not known."""
        program = path.program
        if self._held.pop((program.number, path.node), None) is None:
            return
        del program.paths[path.node]
        share = self._shares[program.key.tenant]
        share.tokens -= path.tokens
        del (share.again if path.again else share.ends)[path]
        if not share:
            del self._shares[program.key.tenant]


def _own_tokens(node: Node) -> int:
    """Tokens of the path to `node` that belong to its namespace."""
    start = node
    while start.key and start.parent is not None:
        start = start.parent
    return node.depth - start.depth
