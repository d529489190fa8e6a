"""Retraction: when slots run out, the youngest rows go back to the queue and are resumed later, exactly."""

from __future__ import annotations

from sapwood.srt.scheduler.ends import release
from sapwood.srt.scheduler.state import State


def retract_one(state: State) -> bool:
    """Retract the youngest row, but not the oldest, so that there is always progress; False if there is none.

    A row that is left alone fits in the pool, unless it holds tokens twice: those that others put into the
    tree while it computed them. It is retracted too, and takes the tree's when it is resumed.
    """
    rows = state.rows
    if not rows.num_active:
        return False
    row = rows.youngest()
    if rows.num_active == 1 and rows.private[row] + rows.node[row].depth == rows.planned[row]:
        return False
    retract(state, row)
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
    state.queue.discard(sequence)
    state.wait(sequence)
    state.counters.retracted += 1
