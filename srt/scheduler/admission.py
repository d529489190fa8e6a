"""Which waiting sequences get a row in this step: prefix lookup, rows, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sapwood.srt.messages import Admitted, Verdict
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.state import State

RESERVE = 16
"""Output tokens per row for which there must be room at admission; beyond that rows may be retracted."""


@dataclass(slots=True)
class Admission:
    """A row that begins in this step, with the slots of its cached prefix and how many more it `needs`."""

    row: int
    prefix: npt.NDArray[np.int32]
    needs: int


def admit(state: State, budget: int) -> list[Admission]:
    """Seat waiting sequences, in the policy's order, until rows, slots or the step's budget are used up.

    A sequence that cannot be seated for want of rows or slots stops the search, so that it is not overtaken
    for ever by smaller ones. The queue names none whose prefix is being computed by a running sibling.
    """
    admitted: list[Admission] = []
    if not state.waiting or not state.rows.num_free:
        return admitted
    promised = _promised(state)
    while budget > 0:
        sequence = state.queue.first()
        if sequence is None or not _rows_suffice(state, sequence):
            break
        admission = _seat(state, sequence, promised)
        if admission is None:
            break
        admitted.append(admission)
        promised += admission.needs
        budget -= min(budget, len(sequence.ids) - len(admission.prefix))
    return admitted


def _rows_suffice(state: State, sequence: Sequence) -> bool:
    if sequence.resumed:
        return state.rows.num_free > 0
    wanted = sequence.request.rows_held(state.rows.capacity)
    return state.rows.num_free - state.reserved_rows >= wanted


def _seat(state: State, sequence: Sequence, promised: int) -> Admission | None:
    """Match, lock and give a row; None (and nothing changed) if there are too few slots beside `promised`."""
    rows, tree, request = state.rows, state.tree, sequence.request
    total = len(sequence.ids)
    found = tree.match(request.namespace, sequence.ids.tobytes(), sequence.matchable)
    tree.lock(found.node)
    left = len(request.prompt) + request.max_tokens - total
    need = total - found.length + min(left, RESERVE)
    if need > state.available - promised:
        tree.unlock(found.node)
        return None
    if not request.admitted:
        tree.note_hit(found.node)
        reads: Literal["logprobs", "pooling"] = "pooling" if request.params.pooling else "logprobs"
        limit = sequence.matchable
        _first_admission(
            state, request, verdict(state, request.namespace, sequence.ids.tobytes(), limit, reads)
        )
    row = rows.seat(sequence, found.slots, found.node)
    del state.waiting[sequence.key]
    state.queue.seat(sequence, found.node, total - found.length)
    return Admission(row, found.slots, need)


def verdict(
    state: State, namespace: str, ids: bytes, limit: int, reads: Literal["logprobs", "pooling"]
) -> Verdict:
    """What a request with the prompt `ids`, which may take `limit` tokens of it from the cache, finds now,
    and why no more: what it `reads` of the prompt, if the tree has more than that."""
    if state.config.disable_radix_cache:
        return Verdict(0, "disabled")
    matched, stopped = state.tree.peek(namespace, ids, len(ids) // 4 - 1)
    return Verdict(limit, reads) if matched > limit else Verdict(matched, stopped)


def _promised(state: State) -> int:
    """Slots that running rows still need: the rest of their prompts and a reserve of output each."""
    rows = state.rows
    active = rows.active
    rest = np.maximum(rows.length - rows.planned, 0)
    output = np.clip(rows.limit - rows.length, 0, RESERVE)
    return int((rest + output)[active].sum())


def _first_admission(state: State, request: Request, verdict: Verdict) -> None:
    request.admitted = True
    if not request.forked and request.params.n > 1:
        state.reserved_rows += request.rows_held(state.rows.capacity) - 1
    counters = state.counters
    counters.prompt_tokens_cached += verdict.matched
    saved = verdict.matched * counters.seconds_per_prompt_token
    counters.seconds_saved += saved
    state.tell(request.tokenizer, Admitted(request.key, verdict, state.clock() - request.arrived, saved))
