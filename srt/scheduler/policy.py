"""The order in which waiting sequences go ahead.

    lpm          longest cached prefix first, so that what shares a prefix runs while the prefix is hot
    dfs-weight   branch by branch of the tree, the one first in which most wait
    fcfs         by arrival
    lof          longest output first, so that the long ones do not run alone at the end
    priority     by the requests' own priority; those of one, longest cached prefix first
    fair         by what each tenant has used; those of one, longest cached prefix first

Ties go by arrival, but under `lpm`, `lof`, `priority` and `fair` the requests of a program go together, where
its first one would be. How far a request can be overtaken is bounded (see lines.py), but by those of a higher
priority, or of a tenant that has used less. Under `dfs-weight`, which is for batches, the bound is wide.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.config import Config
from sapwood.srt.scheduler.estimate import OutputEstimate
from sapwood.srt.scheduler.fairness import Tenants
from sapwood.srt.scheduler.lines import DepthFirst, Line, Rank, by_arrival, by_program
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.spots import Spot, Spots

SHARE = 0.25
"""How much of the work that a request found waiting may overtake it, beside one step's tokens."""
BATCH_SHARE = 2.0
"""The same for `dfs-weight`."""
LEAST = 16
"""A request is at least so many tokens of work: one that is wholly cached takes a row as well, and there may
be no end of such."""


def by_output(sequence: Sequence) -> Rank:
    """The longest output first."""
    return -sequence.request.max_tokens, *by_program(sequence)


class Policy(Protocol):
    """Which line a sequence waits in, and which line goes next."""

    def line_of(self, sequence: Sequence) -> Line:
        """The line of a sequence that begins to wait."""

    def first(self) -> Sequence | None:
        """The sequence to go next; None if there is none, but such as wait for others."""

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        """It goes ahead with so many tokens to compute."""

    def generated(self, tenants: npt.NDArray[np.int32]) -> None:
        """One token each has come of these tenants' rows."""

    def waiting(self) -> int:
        """How many wait in all lines."""


class OneLine:
    """All wait in one line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def line_of(self, sequence: Sequence) -> Line:
        return self._line

    def first(self) -> Sequence | None:
        return self._line.first()

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        pass

    def generated(self, tenants: npt.NDArray[np.int32]) -> None:
        pass

    def waiting(self) -> int:
        return self._line.waiting


class Priorities:
    """A line for each priority, the most urgent first."""

    def __init__(self, base: int, share: float) -> None:
        self._bounds = base, share
        self._lines: dict[int, Line] = {}
        self._ranks: list[int] = []

    def line_of(self, sequence: Sequence) -> Line:
        rank = sequence.request.urgency
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = Line(*self._bounds, by_program, by_match=True)
            insort(self._ranks, rank)
        return line

    def first(self) -> Sequence | None:
        place = 0
        while place < len(self._ranks):
            line = self._lines[self._ranks[place]]
            if not line.waiting:  # priorities are the clients' to choose: none is kept for ever
                del self._lines[self._ranks.pop(place)]
            elif (sequence := line.first()) is not None:
                return sequence
            else:
                place += 1
        return None

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        pass

    def generated(self, tenants: npt.NDArray[np.int32]) -> None:
        pass

    def waiting(self) -> int:
        return sum(line.waiting for line in self._lines.values())


def choose(config: Config, base: int, share: float) -> Policy:
    """The policy of `--schedule-policy`, with the bounds of its lines."""
    match config.schedule_policy:
        case "priority":
            return Priorities(base, share)
        case "fair":
            return Tenants(base, share)
        case "dfs-weight":
            return OneLine(DepthFirst(base, max(share, BATCH_SHARE)))
        case "lof":
            return OneLine(Line(base, share, by_output))
        case "lpm":
            return OneLine(Line(base, share, by_program, by_match=True))
        case _:
            return OneLine(Line(base, share, by_arrival))


class Queue:
    """The waiting sequences that could be admitted now, in the policy's order. A step has `budget` tokens;
    `outputs` says what output to expect; `share` bounds how far a request may be overtaken."""

    def __init__(
        self,
        tree: RadixTree,
        config: Config,
        budget: int,
        outputs: OutputEstimate,
        share: float = SHARE,
    ) -> None:
        self._spots = Spots(tree, self)
        self._outputs = outputs
        self._policy = choose(config, budget, share)

    def add(self, sequence: Sequence) -> None:
        """`sequence` may be admitted from now on."""
        line = self._policy.line_of(sequence)
        line.join(sequence)
        self._spots.wait(sequence)
        assert sequence.spot is not None
        line.weigh(sequence, self._work(sequence, sequence.spot.matched))

    def discard(self, sequence: Sequence) -> None:
        """It neither waits nor computes for others any more. Does nothing if it did neither."""
        if sequence.line is not None:
            sequence.line.leave(sequence)
        self._spots.leave(sequence)

    def first(self) -> Sequence | None:
        """The sequence to go ahead next; None if there is none, but such as wait for another's prefix."""
        return self._policy.first()

    def seat(self, sequence: Sequence, node: Node) -> None:
        """The first goes ahead: of its tokens the path to `node` is cached. Those that share what it computes
        wait for it, until it has put it into the tree or is discarded."""
        line = sequence.line
        assert line is not None
        line.leave(sequence)
        self._spots.compute(sequence, node)
        line.admitted(sequence, self._work(sequence, node.depth))
        self._policy.admitted(sequence, len(sequence.ids) - node.depth)

    def _work(self, sequence: Sequence, cached: int) -> int:
        request, known = sequence.request, len(sequence.ids)
        output = self._outputs.of(len(request.prompt) + request.max_tokens - known)
        return max(known - cached + output, LEAST)

    def tenants_waiting(self) -> list[int]:
        """Under `fair`, the tenants of those that wait."""
        return self._policy.tenants_waiting() if isinstance(self._policy, Tenants) else []

    def hold(self, tenants: Iterable[int]) -> None:
        """Under `fair`, name none of these tenants' sequences until they are let go."""
        if isinstance(self._policy, Tenants):
            self._policy.held = frozenset(tenants)

    def generated(self, tenants: npt.NDArray[np.int32]) -> None:
        """One token each has come of these tenants' rows."""
        self._policy.generated(tenants)

    def check(self, waiting: Iterable[Sequence]) -> None:
        """`waiting` are all that wait, each in its place: AssertionError if not."""
        waiting = list(waiting)
        self._spots.check(waiting)
        assert all(sequence.line is not None for sequence in waiting)
        assert len(waiting) == self._policy.waiting()

    def enter(self, spot: Spot, sequence: Sequence) -> None:
        """See spots.Listener."""
        assert sequence.line is not None
        sequence.line.enter(spot, sequence)

    def improved(self, spot: Spot) -> None:
        """See spots.Listener."""
        for line in list(spot.queue):
            line.offer(spot)
