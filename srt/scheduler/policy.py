"""The order in which waiting sequences go ahead.

`fcfs`: by arrival. `lpm`: longest cached prefix first, so that what shares a prefix runs while the prefix is
hot; ties by arrival. `lof`: longest output first, so that the long ones do not run alone at the end.
How far any request can be overtaken is bounded (see lines.py).
Sequences that have already run (retracted, or forked from a running request) always go first.
"""

from __future__ import annotations

from collections.abc import Iterable

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.scheduler.lines import Line, Rank, by_arrival
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.spots import Spot, Spots

AGE_BUDGETS = 16
"""Steps' worth of tokens by which any request may be overtaken, whatever was waiting when it came."""
AGE_REQUESTS = 256
"""As many requests whose prompts are cached count as much: they take rows, and there may be no end of them.
"""


def by_output(sequence: Sequence) -> Rank:
    """The longest output first."""
    return -sequence.request.max_tokens, *by_arrival(sequence)


class Queue:
    """The waiting sequences that could be admitted now, in the order of `policy`.

    `budget` is the tokens of a step.
    """

    def __init__(self, tree: RadixTree, policy: str, budget: int) -> None:
        self._spots = Spots(tree, self)
        self._resumed = Line(None)
        self._least = max(1, AGE_BUDGETS * budget // AGE_REQUESTS)
        base = AGE_BUDGETS * budget
        self._line = Line(base, by_output if policy == "lof" else by_arrival, by_match=policy == "lpm")

    def add(self, sequence: Sequence) -> None:
        """`sequence` may be admitted from now on."""
        line = self._resumed if sequence.resumed else self._line
        line.join(sequence)
        self._spots.wait(sequence)

    def discard(self, sequence: Sequence) -> None:
        """It neither waits nor computes for others any more. Does nothing if it did neither."""
        if sequence.line is not None:
            sequence.line.leave(sequence)
        self._spots.leave(sequence)

    def first(self) -> Sequence | None:
        """The sequence to go ahead next; None if there is none, but such as wait for another's prefix."""
        return self._resumed.first() or self._line.first()

    def seat(self, sequence: Sequence, node: Node, work: int) -> None:
        """The first goes ahead: of its tokens the path to `node` is cached, and `work` are to be computed
        soon. Those that share what it computes wait for it, until it has put it into the tree or is
        discarded."""
        line = sequence.line
        assert line is not None
        line.leave(sequence)
        self._spots.compute(sequence, node)
        line.admitted(sequence, max(work, self._least))

    def check(self, waiting: Iterable[Sequence]) -> None:
        """`waiting` are all that wait, each in its place: AssertionError if not."""
        waiting = list(waiting)
        self._spots.check(waiting)
        assert all(sequence.line is not None for sequence in waiting)
        assert len(waiting) == self._resumed.waiting + self._line.waiting

    def enter(self, spot: Spot, sequence: Sequence) -> None:
        """See spots.Listener."""
        assert sequence.line is not None
        sequence.line.enter(spot, sequence)

    def improved(self, spot: Spot) -> None:
        """See spots.Listener."""
        for line in spot.queue:
            line.offer(spot)
