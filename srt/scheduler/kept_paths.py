"""Which paths of the tree are pinned for programs, and which of them make room for others.

    [ few-shot prompt ]──┬──[ question 1 ]──[ answer 1 ]      found again by questions 2 and 3: kept
           shared        ├──[ question 2 ]──[ answer 2 ]      ends of requests: a next turn may begin there,
                         └──[ question 3 ]──[ answer 3 ]      so the last ones are kept as long as they fit

Where a request's cached prefix ended, its program has used a path again, and is likely to once more. Ends are
only hoped for: most branches of a fork are read and left. So ends give way, the oldest of all programs first,
to newer ones and to what was used again; what was used again gives way to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree

if TYPE_CHECKING:
    from sapwood.srt.scheduler.programs import Program

MAX_PATHS = 64
"""Pins of one program."""


class KeptPaths:
    """The pins of all programs in one tree, of which `limit` tokens may be pinned."""

    def __init__(self, tree: RadixTree, limit: int) -> None:
        self._tree = tree
        self._limit = limit
        self._ends: dict[tuple[int, Node], Program] = {}
        """Ends that nothing has used again, the one that came first in front."""

    def keep(self, program: Program, node: Node, until: float, again: bool) -> None:
        """Pin the path to `node`, if there is room for it; `again`: a request has begun with it."""
        if not node.key or _own_tokens(node) > self._limit:
            return
        paths, entry = program.paths, (program.number, node)
        again |= paths.pop(node, False)
        self._ends.pop(entry, None)
        self._forget_above(program, node, again)
        while not self._tree.pin(node, until, program.number):
            if not self._ends:
                return
            (_, oldest), its = next(iter(self._ends.items()))
            self._let_go(its, oldest)
        paths[node] = again
        if not again:
            self._ends[entry] = program
        if len(paths) > MAX_PATHS:
            self._let_go(program, next((n for n, used in paths.items() if not used), next(iter(paths))))

    def move(self, program: Program, until: float) -> None:
        """Let the program's pins last until then; those that are broken are forgotten."""
        for node in list(program.paths):
            if self._tree.pinned_by(node, program.number):
                self._tree.pin(node, until, program.number)
            else:
                self._let_go(program, node)

    def release(self, program: Program, now: float) -> int:
        """End all of the program's pins; how many tokens are pinned by nobody then."""
        self._tree.expire(now)
        before = self._tree.pinned_tokens
        for node in list(program.paths):
            self._let_go(program, node)
        self._tree.expire(now)  # others may hold some whose time has been over for long
        return before - self._tree.pinned_tokens

    def _forget_above(self, program: Program, node: Node, again: bool) -> None:
        """What is pinned through `node` needs no pin of its own, unless that is more likely to stay, or the
        program goes other ways from there too."""
        above = node.parent
        while above is not None and above.key:
            if len(above.children) < 2 and above in program.paths and (again or not program.paths[above]):
                self._let_go(program, above)
            above = above.parent

    def _let_go(self, program: Program, node: Node) -> None:
        del program.paths[node]
        self._ends.pop((program.number, node), None)
        self._tree.unpin(node, program.number)


def _own_tokens(node: Node) -> int:
    """Tokens of the path to `node` that belong to its namespace."""
    start = node
    while start.key and start.parent is not None:
        start = start.parent
    return node.depth - start.depth
