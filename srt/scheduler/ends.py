"""How a row gives its slots back, and how a choice ends: in one place, exactly once."""

from __future__ import annotations

from typing import Literal

import numpy as np

from sapwood.srt.cache.node import Node
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import Done
from sapwood.srt.namespaces import LISTED
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.state import State

Reason = Literal["stop", "length", "abort", "error"]


def keep_in_tree(state: State, row: int, count: int) -> None:
    """Put the row's first `count` tokens, all computed, into the tree, and lock the path down to there.

    The row's slots do not change: where the tree had the token already, the row's own stays private.
    """
    rows, tree = state.rows, state.tree
    sequence = rows.sequence[row]
    assert sequence is not None
    assert count <= rows.done[row]
    node = rows.node[row]
    if count <= node.depth:
        return
    request = sequence.request
    ids, slots = rows.ids[row, :count].tobytes(), rows.slots[row, :count]
    # From its own node on: the slots above it are the tree's, in that very place.
    inserted = tree.insert(request.namespace, ids, slots, node, request.priority)
    tree.lock(inserted.node)
    tree.unlock(node)
    rows.node[row] = inserted.node
    rows.private[row] -= count - inserted.existing


def release(state: State, row: int, keep: int) -> Node:
    """Give up all of the row's slots: the first `keep` tokens to the tree, the rest to the pool, once.
    Returns where the row's path in the tree ends.

    In-order execution in the worker makes this safe while a step that writes to them is in flight: whoever
    gets the slots next writes in a later step.
    """
    rows = state.rows
    keep_in_tree(state, row, keep)
    own = rows.own(row)
    node: Node = rows.node[row]
    shared = node.path_slots()
    given = len(shared)
    duplicates = own[:given][own[:given] != shared]
    state.pool.free(np.concatenate([duplicates, own[given:]]))
    state.tree.unlock(node)
    rows.private[row] = 0
    return node


def _retain(state: State, request: Request, node: Node) -> None:
    """What the request has put into the tree, down to `node`, may have to stay there for a while."""
    if request.namespace == LISTED:
        if node.depth == len(request.prompt):
            state.tree.list_prefix(node)
            state.keep_room(state.tree.listed_tokens)
        return
    if request.keep > 0:
        state.tree.pin(node, state.clock() + request.keep)
    if request.program is not None and not state.config.disable_radix_cache:
        state.programs.left(request.program, node)


def finish(
    state: State,
    sequence: Sequence,
    n: int,
    reason: Reason,
    matched: int | None = None,
    error: ErrorInfo | None = None,
) -> None:
    """End a choice after its first `n` output tokens, wherever it is, and answer Done.

    A failed row's tokens never reach the tree.
    """
    request, rows = sequence.request, state.rows
    if sequence.row >= 0:
        keep = min(len(request.prompt) + max(n, 1) - 1, int(rows.done[sequence.row]))
        node = release(state, sequence.row, 0 if reason == "error" else keep)
        rows.vacate(sequence.row)
        unreserve(state, request)
        if reason != "error":
            _retain(state, request, node)
    else:
        state.waiting.pop(sequence.key, None)
    state.queue.discard(sequence)
    del state.sequences[sequence.key]
    if request.program is not None:
        request.program.counts.output_tokens += n
    if reason in ("stop", "length"):
        state.outputs.ended(n, request.max_tokens)
        state.drafts.keep(request, sequence.ids[: len(request.prompt) + n])
    drafts = sequence.drafted, sequence.accepted
    state.tell(request.tokenizer, Done(request.key, sequence.choice, n, reason, matched, error, *drafts))
    unborn = range(1, request.params.n) if not request.forked else ()
    for choice in unborn:
        state.tell(request.tokenizer, Done(request.key, choice, 0, reason, None, error))
    _leave(state, request, 1 + len(unborn))


def _leave(state: State, request: Request, choices: int) -> None:
    request.live -= choices
    if request.live:
        return
    del state.requests[request.key]
    state.grammars.leave(request)
    if request.program is not None:
        state.programs.leave(request.program)
    if state.config.disable_radix_cache:
        state.tree.flush(request.namespace)


def unreserve(state: State, request: Request) -> None:
    """The request leaves its row: give back those that were held for its further choices, if they were."""
    if not request.forked:
        state.reserved_rows -= request.rows_held(state.rows.capacity) - 1
