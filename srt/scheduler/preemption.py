"""Retraction: rows go back to the queue and are resumed later, exactly.

Slots run out: the row goes that is cheapest to bring back, of those seated last. Under `priority` a waiting
request with a higher one takes the row of a lower one; under `fair` a tenant that has far fewer rows than
another takes one of those.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler import admission
from sapwood.srt.scheduler.ends import release, unreserve
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.state import State

MAX_COMPARED = 32
"""Rows whose costs are compared: the ones seated last."""

Rows = npt.NDArray[np.intp]


def retract_one(state: State) -> bool:
    """Retract a row, but not the oldest, so that there is always progress; False if there is none.

    A row that is left alone fits in the pool, unless it holds tokens twice: those that others put into the
    tree while it computed them. It is retracted too, and takes the tree's when it is resumed.
    """
    rows = state.rows
    if not rows.num_active:
        return False
    oldest = rows.oldest()
    active = np.flatnonzero(rows.active)
    state.outputs.retracted(
        rows.length[active] - rows.prompt[active], rows.limit[active] - rows.prompt[active]
    )
    if len(active) > 1:
        others = active[active != oldest]
        row = _cheapest(state, others[rows.urgency[others] == rows.urgency[others].max()])
    else:
        row = oldest
        if rows.private[row] + rows.node[row].depth == rows.planned[row]:
            return False
    retract(state, row)
    return True


def make_way(state: State) -> None:
    """Retract rows for the sequence that goes next, as long as it does not fit and the policy allows it."""
    if state.config.schedule_policy not in ("priority", "fair"):
        return
    drafts = int(state.rows.proposed.sum())
    while (sequence := state.queue.first()) is not None and not admission.fits(state, sequence, drafts):
        every = _victims(state, sequence)
        slots = sum(_alone(state, row) for row in every.tolist())
        # Nobody gives way for what would not fit even then.
        if admission.rows_missing(state, sequence) > len(every) or admission.missing(state, sequence) > slots:
            return
        retract(state, _cheapest(state, _first_to_go(state, every)))


def _victims(state: State, sequence: Sequence) -> Rows:
    """All the rows that `sequence` may take. Under `fair` each tenant keeps its oldest ones, one more than
    the sequence's has: for a difference of one, the two would take turns for ever."""
    rows = state.rows
    active: Rows = np.flatnonzero(rows.active)
    if state.config.schedule_policy == "priority":
        lower: Rows = active[rows.urgency[active] > sequence.request.urgency]
        return lower
    active = active[np.argsort(rows.order[active])]
    tenants = rows.tenant[active]
    kept = int((tenants == sequence.request.tenant).sum()) + 1
    taken = [active[tenants == tenant][kept:] for tenant in np.unique(tenants)]
    return np.concatenate(taken) if taken else active


def _first_to_go(state: State, victims: Rows) -> Rows:
    """Those of the lowest priority, or of the tenant that may lose most."""
    rows = state.rows
    if state.config.schedule_policy == "priority":
        lowest: Rows = victims[rows.urgency[victims] == rows.urgency[victims].max()]
        return lowest
    tenants = rows.tenant[victims]
    theirs: Rows = victims[tenants == np.bincount(tenants).argmax()]
    return theirs


def _cheapest(state: State, rows: Rows) -> int:
    """Of the rows seated last, the one that has the fewest tokens which nobody else has: those may have to be
    computed again. The youngest of equal ones."""
    order = state.rows.order[rows]
    youngest = rows[np.argsort(-order)][:MAX_COMPARED].tolist()
    return int(min(youngest, key=lambda row: _alone(state, row)))


def _alone(state: State, row: int) -> int:
    tokens, node = int(state.rows.private[row]), state.rows.node[row]
    while node.parent is not None and node.lock_count == 1:
        tokens += len(node.slots)
        node = node.parent
    return tokens


def retract(state: State, row: int) -> None:
    """Send the row's sequence back to the queue. What it has computed stays in the tree, unlocked.

    A token of it that is still in flight is taken in when its result comes; only then can it be resumed.
    """
    rows = state.rows
    sequence = rows.sequence[row]
    assert sequence is not None
    sequence.pending = int(rows.inflight[row]) + int(rows.busy[row])
    sequence.resumed = True
    # Drafts in flight are not known to be its tokens.
    sequence.known = max(sequence.known, int(rows.planned[row] - rows.proposed[row]))
    release(state, row, int(rows.done[row]))
    rows.vacate(row)
    # Held on while it waits, they might be what the one that goes next needs.
    unreserve(state, sequence.request)
    state.queue.discard(sequence)
    state.wait(sequence)
    state.counters.retracted += 1
    if sequence.request.program is not None:
        sequence.request.program.counts.retracted += 1
