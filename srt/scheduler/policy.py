"""The order in which waiting sequences are considered.

`fcfs`: by arrival. `lpm`: longest cached prefix first, so that what shares a prefix runs while the prefix is
hot; ties by arrival. Ageing bounds how far a request can be overtaken: once `AGE_BUDGETS` step budgets of
prompt tokens to compute, or `AGE_REQUESTS` requests, have been admitted since it came, it goes ahead of all
younger requests, whatever they match.
Sequences that have already run (retracted, or forked from a running request) always go first.
"""

from __future__ import annotations

from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.state import State

AGE_BUDGETS = 16
AGE_REQUESTS = 256


def order(state: State) -> list[Sequence]:
    """The waiting sequences that could be admitted now, the first to go first."""
    ready = [s for s in state.waiting.values() if not s.pending]
    if state.config.schedule_policy == "fcfs":
        return sorted(ready, key=lambda s: (not s.resumed, s.request.order, s.choice))
    oldest_work = state.work_admitted - AGE_BUDGETS * state.budget

    def rank(s: Sequence) -> tuple[bool, bool, int, int, int]:
        aged = s.request.work_at_arrival <= oldest_work
        matched = 0 if s.resumed or aged else peek(state, s)
        return (not s.resumed, not aged, -matched, s.request.order, s.choice)

    return sorted(ready, key=rank)


def note_admission(state: State, tokens: int) -> None:
    """Let all that wait grow older by an admission with `tokens` prompt tokens to compute.

    One whose prompt is cached is not free either: it takes a row, and there may be no end of such.
    """
    state.work_admitted += max(tokens, AGE_BUDGETS * state.budget // AGE_REQUESTS, 1)


def peek(state: State, sequence: Sequence) -> int:
    """How many leading tokens of the sequence it could take from the tree.

    Kept until the tree or the sequence changes: a long queue that waits for slots is ordered at every step.
    """
    tree, ids = state.tree, sequence.ids
    now = (tree.version, sequence.matchable)
    if sequence.peeked_at != now:
        namespace, known = sequence.request.namespace, sequence.peeked_to
        trace = tree.trace(namespace, ids.tobytes(), sequence.matchable, known)
        sequence.peeked_at, sequence.peeked, sequence.peeked_to = now, trace.matched, trace.node
    return sequence.peeked
