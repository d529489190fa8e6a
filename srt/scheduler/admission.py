"""Which waiting sequences get a row in this step: prefix lookup, rows, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.node import Node
from sapwood.srt.messages import Admitted, Verdict
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.state import State


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
    state.short = False
    if not state.waiting or not state.rows.num_free:
        return admitted
    promised = _promised(state)
    while budget > 0:
        sequence = state.queue.first()
        if sequence is None or rows_missing(state, sequence) > 0:
            break
        admission = _seat(state, sequence, promised)
        if admission is None:
            state.short = True
            break
        admitted.append(admission)
        promised += admission.needs
        budget -= min(budget, len(sequence.ids) - len(admission.prefix))
    return admitted


def fits(state: State, sequence: Sequence, drafts: int = 0) -> bool:
    """Whether there are a row and slots for the sequence, as far as is known without looking it up, or will
    be when so many slots of drafts in flight are free."""
    return rows_missing(state, sequence) <= 0 and missing(state, sequence) <= drafts


def missing(state: State, sequence: Sequence) -> int:
    """Slots that the sequence needs beyond those that there are for it, as far as is known without looking it
    up. Those of its own cached prefix are not there for it: they would be locked."""
    spot = sequence.spot
    matched = spot.matched if spot is not None else 0
    unlocked, node = 0, spot.node if spot is not None else None
    while node is not None and node.parent is not None and node.lock_count == 0:
        unlocked += len(node.slots)
        node = node.parent
    room = state.available - min(unlocked, matched) - _promised(state)
    return _need(state, sequence, matched) - room


def _need(state: State, sequence: Sequence, matched: int) -> int:
    """Slots that a sequence of which `matched` tokens are cached needs beyond those."""
    request, total = sequence.request, len(sequence.ids)
    return total - matched + state.outputs.of(len(request.prompt) + request.max_tokens - total)


def rows_missing(state: State, sequence: Sequence) -> int:
    """Rows that the sequence needs, for its further choices too, beyond those that there are for it."""
    if sequence.resumed and sequence.request.forked:
        return 1 - state.rows.num_free
    wanted = sequence.request.rows_held(state.rows.capacity)
    return wanted - (state.rows.num_free - state.reserved_rows)


def _seat(state: State, sequence: Sequence, promised: int) -> Admission | None:
    """Match, lock and give a row; None (and nothing changed) if there are too few slots beside `promised`."""
    rows, tree, request = state.rows, state.tree, sequence.request
    ids, limit = sequence.raw, sequence.matchable
    found = tree.match(request.namespace, ids, limit)
    tree.lock(found.node)
    need = _need(state, sequence, found.length)
    if need > state.available - promised:
        tree.unlock(found.node)
        return None
    if not request.admitted:
        tree.note_hit(found.node, request.priority)
        reads: Literal["logprobs", "pooling"] = "pooling" if request.params.pooling else "logprobs"
        told = verdict(state, request.namespace, ids, limit, reads, request.unsalted)
        _first_admission(state, request, told, found.node)
    row = rows.seat(sequence, found.slots, found.node)
    if not request.forked:
        state.reserved_rows += request.rows_held(rows.capacity) - 1
    del state.waiting[sequence.key]
    state.queue.seat(sequence, found.node)
    return Admission(row, found.slots, need)


def verdict(
    state: State,
    namespace: str,
    ids: bytes,
    limit: int,
    reads: Literal["logprobs", "pooling"],
    unsalted: str | None = None,
) -> Verdict:
    """What a request with the prompt `ids`, which may take `limit` tokens of it from the cache, finds now,
    and why no more: what it `reads` of the prompt, if the tree has more than that; or its salt, if what it
    would find in the namespace `unsalted` is more."""
    if state.config.disable_radix_cache:
        return Verdict(0, "disabled")
    matched, stopped = state.tree.peek(namespace, ids, len(ids) // 4 - 1, unsalted)
    if matched <= limit:
        return Verdict(matched, stopped)
    # It may be less than the limit: inside a listed prefix nothing is found.
    return Verdict(state.tree.peek(namespace, ids, limit)[0], reads)


def _promised(state: State) -> int:
    """Slots that running rows still need: the rest of their prompts and the output to be expected of them."""
    rows = state.rows
    active = rows.active
    rest = np.maximum(rows.length[active] - rows.planned[active], 0)
    return int((rest + state.outputs.of(rows.limit[active] - rows.length[active])).sum())


def _first_admission(state: State, request: Request, verdict: Verdict, node: Node) -> None:
    """The request begins, with the cached path to `node`."""
    request.admitted = True
    if request.program is not None:
        counts = request.program.counts
        counts.requests += 1
        counts.prompt_tokens += len(request.prompt)
        counts.cached_tokens += verdict.matched
        if node.namespace == request.namespace:
            state.programs.found(request.program, node)
    counters = state.counters
    counters.prompt_tokens_cached += verdict.matched
    saved = verdict.matched * counters.seconds_per_prompt_token
    counters.seconds_saved += saved
    state.tell(request.tokenizer, Admitted(request.key, verdict, state.clock() - request.arrived, saved))
