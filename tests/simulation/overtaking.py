"""How far requests are overtaken, counted beside the scheduler: the bound of lines.py holds at every seat.

Counted against a request is the work of younger ones of its line that go ahead while it waits for nobody.
Its bound is that of lines.py, with the most work that any one found which waits now and is not younger: the
 scheduler's own bound is no wider, as the oldest that waits is one of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sapwood.srt.cache.node import Node
from sapwood.srt.scheduler.lines import MAX_LOOK, Line
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.state import State


@dataclass(slots=True)
class _Waiting:
    sequence: Sequence
    line: Line
    overtaken: int = 0

    @property
    def gone(self) -> bool:
        return self.sequence.line is not self.line or self.sequence.resumed

    @property
    def blocked(self) -> bool:
        spot = self.sequence.spot
        return spot is None or spot.blocked


class Overtaking:
    """Follows one state's queue. `worst` is how near its bound any request came: 1 is at it."""

    def __init__(self, state: State) -> None:
        self.worst = 0.0
        self._lines: dict[Line, list[_Waiting]] = {}
        for sequence in sorted(state.waiting.values(), key=lambda sequence: sequence.request.order):
            self._join(sequence)
        add, seat = state.queue.add, state.queue.seat

        def added(sequence: Sequence) -> None:
            add(sequence)
            self._join(sequence)

        def seated(sequence: Sequence, node: Node) -> None:
            self._count(sequence, state.queue._work(sequence, node.depth))
            seat(sequence, node)

        queue: Any = state.queue
        queue.add, queue.seat = added, seated

    def _join(self, sequence: Sequence) -> None:
        if not sequence.resumed and sequence.line is not None:
            self._lines.setdefault(sequence.line, []).append(_Waiting(sequence, sequence.line))

    def _count(self, ahead: Sequence, work: int) -> None:
        """`ahead` is about to get a row."""
        line = ahead.line
        if line is None or ahead.resumed:
            return
        waiting = self._lines[line] = [each for each in self._lines.get(line, []) if not each.gone]
        if all(each.blocked for each in waiting[:MAX_LOOK]):
            return
        found = 0
        for each in waiting:
            if each.sequence.request.order >= ahead.request.order:
                break
            found = max(found, each.sequence.ahead)
            if each.blocked:
                continue
            bound = line.base + line.share * found
            assert each.overtaken < bound, (
                f"{each.sequence.request.rid} was overtaken by {each.overtaken} tokens of work, its bound is "
                f"{bound}, and {ahead.request.rid} goes ahead too"
            )
            each.overtaken += work
            self.worst = max(self.worst, float(each.overtaken / (bound + work)))
