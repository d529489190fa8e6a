"""Under `fair`, who has more rows than an equal share does not slow the others' steps down by much.

A row in a step costs all others time, most of all on CPUs. So while a tenant within its share runs or waits,
all rows of those above theirs together take at most SLOWER of the time that the step would take without them:
they take turns, and nothing more of theirs is admitted while they do. When nobody else has anything to do,
nobody pauses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler.state import State

SLOWER = 0.25

Rows = npt.NDArray[np.intp]


class Restraint:
    """What the tenants in `over` (by number) may have of one step: `tokens`, of prompts and outputs."""

    def __init__(self, over: npt.NDArray[np.bool_], tokens: int) -> None:
        self._over = over
        # Never nothing: somebody may wait for what one of them has or computes.
        self._tokens = max(tokens, 1)

    def decoding(self, state: State, rows: Rows) -> Rows:
        """Those of `rows` that take part in the step; of the tenants' the ones that have paused longest."""
        columns = state.rows
        over = self._over[columns.tenant[rows]]
        theirs = rows[over]
        theirs = theirs[np.argsort(columns.turn[theirs], kind="stable")[: self._tokens]]
        columns.turn[theirs] = state.counters.steps
        self._tokens -= len(theirs)
        return np.sort(np.concatenate([rows[~over], theirs]))

    def prompt(self, tenant: int, budget: int) -> int:
        """How many of `budget` prompt tokens the tenant may have; what it has of them is to be `spent`."""
        return min(budget, max(self._tokens, 1)) if self._over[tenant] else budget

    def spent(self, tenant: int, tokens: int) -> None:
        """So many tokens of the tenant are in the step."""
        if self._over[tenant]:
            self._tokens -= tokens


def restrain(state: State) -> Restraint | None:
    """The restraint on the next step, if there is one; tenants that pause are held back in the queue too."""
    if state.config.schedule_policy != "fair":
        return None
    rows, waiting = state.rows, state.queue.tenants_waiting()
    counts = np.bincount(rows.tenant[rows.active], minlength=len(state.tenants))
    present = counts > 0
    present[waiting] = True
    over = counts > max(1.0, counts.sum() / max(present.sum(), 1))
    within = int(counts[~over].sum()) + int((present & ~over & (counts == 0)).sum())
    if not within or not over.any():
        state.queue.hold(())
        return None
    tokens = int(SLOWER * (1.0 / state.row_cost.ratio + within))
    state.queue.hold(np.flatnonzero(over).tolist() if counts[over].sum() >= tokens else ())
    return Restraint(over, tokens)
