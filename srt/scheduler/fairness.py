"""Fairness between tenants: who has used least goes next (a virtual token counter, after Sheng et al. 2024).

A tenant's counter grows by each prompt token computed for it (what the cache had is free) and by
OUTPUT_WEIGHT for each token generated. One that comes back after a while starts where the others are: what
was not asked for is not saved up. So of two tenants that always have something waiting, neither is served
more than the other by over what one admission and the rows that run already bring. Each tenant's own requests
go by the longest cached prefix.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler.lines import Line, by_program
from sapwood.srt.scheduler.request import Sequence

OUTPUT_WEIGHT = 2


class Tenants:
    """A line for each tenant; a policy (see policy.py)."""

    def __init__(self, base: int, share: float) -> None:
        self._bounds = base, share
        self._lines: list[Line] = []
        self._numbers: dict[Line, int] = {}
        self._used = np.zeros(8, dtype=np.int64)
        self._now = 0
        """The counter of a tenant that comes back."""
        self.held: frozenset[int] = frozenset()
        """Tenants whose sequences do not go ahead now."""

    def line_of(self, sequence: Sequence) -> Line:
        number = sequence.request.tenant
        while len(self._lines) <= number:
            line = Line(*self._bounds, by_program, by_match=True)
            self._numbers[line] = len(self._lines)
            self._lines.append(line)
        if len(self._lines) > len(self._used):
            self._used = np.append(self._used, np.zeros_like(self._used, shape=len(self._lines)))
        line = self._lines[number]
        if not line.waiting:
            self._used[number] = max(self._used[number], self._now)
        return line

    def first(self) -> Sequence | None:
        active = self.tenants_waiting()
        if not active:
            return None
        active.sort(key=self._used.__getitem__)
        self._now = max(self._now, int(self._used[active[0]]))
        found = (self._lines[number].first() for number in active if number not in self.held)
        return next((sequence for sequence in found if sequence is not None), None)

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        self._used[sequence.request.tenant] += tokens

    def generated(self, tenants: npt.NDArray[np.int32]) -> None:
        counts = np.bincount(tenants, minlength=len(self._used))
        self._used[: len(counts)] += OUTPUT_WEIGHT * counts

    def tenants_waiting(self) -> list[int]:
        return [number for number, line in enumerate(self._lines) if line.waiting]

    def waiting(self) -> int:
        return sum(line.waiting for line in self._lines)
