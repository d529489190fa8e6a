"""Under `fair`, who has many more rows than others does not slow their steps down by much.

A row in a step costs all others time, most of all on CPUs. So while a tenant within its share runs or waits,
the rows of those above theirs together take at most SLOWER of the time that the step would take without them,
but of each tenant as many go on as the largest within its share has: they take turns. They get no drafts, and
nothing more of theirs is admitted while they do. When nobody else has anything to do, nobody pauses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler.state import State

SLOWER = 0.25
PROMPT_SHARE = 16
"""One in so many of a step's tokens may always go to prompts of those who pause: others may wait for them."""

Rows = npt.NDArray[np.intp]


class Restraint:
    """What the tenants in `over` (by number) may have of one step: `tokens`, of prompts and outputs, and at
    least `prompts` of prompts."""

    def __init__(self, over: npt.NDArray[np.bool_], tokens: int, prompts: int) -> None:
        self._over = over
        self._tokens = tokens
        self._prompts = prompts

    def decoding(self, state: State, rows: Rows) -> Rows:
        """Those of `rows` that may take part in the step: of the tenants' those that have paused longest."""
        over = self._over[state.rows.tenant[rows]]
        theirs = rows[over]
        turns = np.argsort(state.rows.turn[theirs], kind="stable")[: self._tokens]
        return np.sort(np.concatenate([rows[~over], theirs[turns]]))

    def free(self, state: State, rows: Rows) -> Rows:
        """Those of `rows` that are not the tenants'."""
        others: Rows = rows[~self._over[state.rows.tenant[rows]]]
        return others

    def decoded(self, state: State, rows: Rows) -> None:
        """These rows decode in the step."""
        theirs = rows[self._over[state.rows.tenant[rows]]]
        state.rows.turn[theirs] = state.counters.steps
        self._tokens -= len(theirs)

    def prompt(self, tenant: int, budget: int) -> int:
        """How many of `budget` prompt tokens the tenant may have."""
        return min(budget, max(self._tokens, self._prompts, 0)) if self._over[tenant] else budget

    def prompted(self, tenant: int, tokens: int) -> None:
        """So many prompt tokens of the tenant are in the step."""
        if self._over[tenant]:
            self._tokens -= tokens
            self._prompts -= tokens


def restrain(state: State) -> Restraint | None:
    """The restraint on the next step, if there is one; tenants that pause are held back in the queue too."""
    if state.config.schedule_policy != "fair":
        return None
    rows, waiting = state.rows, state.queue.tenants_waiting()
    counts = np.bincount(rows.tenant[rows.active], minlength=len(state.tenants))
    present = counts > 0
    present[waiting] = True
    over = counts > 1.0 + counts.sum() / max(present.sum(), 1)
    within = present & ~over
    if not over.any() or not within.any():
        state.queue.hold(())
        return None
    others = int(np.maximum(counts[within], 1).sum())
    fair = int(over.sum() * max(1, counts[within].max()))
    tokens = max(int(SLOWER * (1.0 / state.row_cost.ratio + others)), fair)
    state.queue.hold(np.flatnonzero(over).tolist() if counts[over].sum() >= tokens else ())
    return Restraint(over, tokens, max(1, state.budget // PROMPT_SHARE))
