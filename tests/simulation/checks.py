"""What holds of the scheduler's state between any two messages, seen from outside."""

from __future__ import annotations

import numpy as np

from sapwood.srt.cache.node import Node
from sapwood.srt.scheduler.state import State
from tests.simulation.clients import Clients
from tests.simulation.programs import check_programs


def check_sums(state: State) -> None:
    """Free, cached and private slots add up. Cheap."""
    rows, pool, tree = state.rows, state.pool, state.tree
    private = int(rows.private[rows.active].sum())
    sums = (pool.num_free, tree.cached_tokens, private)
    assert min(sums) >= 0, f"{sums} slots"
    assert sum(sums) == pool.total, f"{sums} of {pool.total} slots"
    assert 0 <= tree.evictable_tokens <= tree.cached_tokens
    assert state.rows.num_active + len(state.waiting) == len(state.sequences)


def check_all(state: State, clients: Clients) -> None:
    """Everything; O(pool + tree + waiting)."""
    check_sums(state)
    state.check()
    _check_rows(state)
    _check_requests(state, clients)
    _check_locks(state)
    check_programs(state)


def _check_rows(state: State) -> None:
    """No row is owned twice, and each sequence is in one place."""
    rows = state.rows
    active = np.flatnonzero(rows.active).tolist()
    assert sorted([*active, *rows._free]) == list(range(rows.capacity)), "a row is lost, or there twice"
    for row in active:
        sequence = rows.sequence[row]
        assert sequence is not None, f"row {row} has no sequence"
        assert sequence.row == row, f"the sequence of row {row} is in row {sequence.row}"
        assert state.sequences.get(sequence.key) is sequence, f"row {row} goes on after its end"
        assert rows.key[row] == sequence.key
        assert sequence.line is None, f"row {row} waits too"
        assert sequence.pending == 0
        seated, done, planned = int(rows.seated[row]), int(rows.done[row]), int(rows.planned[row])
        length, inflight = int(rows.length[row]), int(rows.inflight[row])
        limit = int(rows.limit[row])
        drafts = int(rows.proposed[row])
        assert seated <= done <= planned <= length + inflight + drafts, (
            f"row {row}: {done} {planned} {length}"
        )
        assert length + inflight + drafts <= max(limit, len(sequence.request.prompt)), (
            f"row {row} is beyond its end"
        )
        assert not drafts or (rows.waits[row] and inflight == 1), f"row {row} has drafts and goes on"
        assert not sequence.request.loading, f"row {row} has no grammar yet"
        assert rows.node[row].depth <= planned, f"row {row} has locked more than it has"
    waiting = {key for key, sequence in state.sequences.items() if sequence.row < 0}
    assert waiting == set(state.waiting), "who has no row does not wait, or the other way round"


def _check_requests(state: State, clients: Clients) -> None:
    """Counts of choices and of reserved rows; told and untold values of prompts add up."""
    alive: dict[int, int] = {}
    for sequence in state.sequences.values():
        assert state.requests.get(sequence.request.key) is sequence.request, "a choice outlives its request"
        alive[sequence.request.key] = alive.get(sequence.request.key, 0) + 1
    reserved = 0
    for key, request in state.requests.items():
        unborn = 0 if request.forked else request.params.n - 1
        assert request.live == alive.get(key, 0) + unborn, f"{request.rid} has {request.live} choices left"
        if not request.forked and state.sequences[key].row >= 0:
            reserved += request.rows_held(state.rows.capacity) - 1
        if request.params.logprob_start is not None:
            first, end = max(1, request.params.logprob_start), request.sent
            told = len(clients[key].reads)
            assert request.reads_from == (first + told - 1 if first + told < end else -1), request.rid
    assert state.reserved_rows == reserved, (state.reserved_rows, reserved)


def _check_locks(state: State) -> None:
    """The locks of the tree are those of the rows, and of what is listed."""
    locks: dict[Node, int] = {}
    for row in np.flatnonzero(state.rows.active).tolist():
        node = state.rows.node[row]
        while node.parent is not None:
            locks[node] = locks.get(node, 0) + 1
            node = node.parent
        assert node.depth == 0, f"row {row} has locked what is not in the tree"
    nodes = list(state.tree.nodes())
    for end in (node for node in nodes if node.listed):
        while end.parent is not None:
            locks[end] = locks.get(end, 0) + 1
            end = end.parent
    for node in nodes:
        held = locks.get(node, 0)
        assert node.lock_count == held, f"{node.lock_count} locks for {held} rows at depth {node.depth}"


def check_idle(state: State) -> None:
    """Nothing runs, nothing waits, and every slot is free or cached."""
    assert not state.requests, f"{list(state.requests)} have not ended"
    assert not state.sequences
    assert not state.waiting
    assert not state.in_flight, "a step was never answered"
    assert state.rows.num_active == 0
    assert state.reserved_rows == 0
    assert state.pool.num_free + state.tree.cached_tokens == state.pool.total, "slots are lost"
    assert state.tree.evictable_tokens == state.tree.cached_tokens - state.tree.listed_tokens, (
        "a lock was left behind"
    )
