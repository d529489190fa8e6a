"""Retraction: when slots run out, the youngest rows go back to the queue and are resumed later, exactly."""

from __future__ import annotations

from sapwood.srt.scheduler.ends import release
from sapwood.srt.scheduler.state import State


def retract_youngest(state: State) -> bool:
    """Retract the youngest row, but never the oldest, so that there is always progress. False if alone."""
    rows = state.rows
    if rows.num_active < 2:
        return False
    retract(state, rows.youngest())
    return True


def retract(state: State, row: int) -> None:
    """Send the row's sequence back to the queue. What it has computed stays in the tree, unlocked.

    A token of it that is still in flight is taken in when its result comes; only then can it be resumed.
    """
    rows = state.rows
    sequence = rows.sequence[row]
    assert sequence is not None
    sequence.pending = int(rows.inflight[row]) + int(rows.busy[row])
    sequence.resumed = True
    release(state, row, int(rows.done[row]))
    rows.vacate(row)
    state.waiting[sequence.key] = sequence
    state.counters.retracted += 1
