"""What is left of a broken state for the person who looks for the cause: one JSON file."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from sapwood.srt import messages, namespaces
from sapwood.srt.messages import Step
from sapwood.srt.scheduler.request import Sequence
from sapwood.srt.scheduler.state import Sent, State

BROKEN = (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What is raised where the state is not as it must be."""
TREE_DEPTH = 8
TREE_NODES = 500
MAX_WAITING = 1000


def dump(state: State, steps: Iterable[Step], error: Exception) -> dict[str, Any]:
    """The numbers, the rows, who waits, the last `steps`, the top of the tree and the traceback of `error`.

    There are no token ids in it and no names of namespaces: it may be sent to someone.
    """
    return {
        "error": traceback.format_exception(error),
        "state": _part(lambda: msgspec.structs.asdict(state.stats())),
        "pool": _part(lambda: {"total": state.pool.total, "free": state.pool.num_free}),
        "rows": _part(lambda: _rows(state)),
        "waiting": _part(lambda: [_waiting(s) for s in list(state.waiting.values())[:MAX_WAITING]]),
        "in_flight": _part(lambda: [_sent(sent) for sent in state.in_flight]),
        "steps": _part(lambda: [_step(step) for step in steps]),
        "tree": _part(lambda: _tree(state)),
    }


def write(data: dict[str, Any]) -> str:
    """Write a dump to a file of its own, which only this user can read, in the folder for temporary files;
    where, or why not."""
    try:
        handle, path = tempfile.mkstemp(prefix="sapwood-dump-", suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1, default=str)
    except OSError as e:
        return f"not written ({e.strerror})"
    return path


def _part(make: Callable[[], Any]) -> Any:
    """What is broken may not let itself be shown; the other parts are, then."""
    try:
        return make()
    except BROKEN as e:
        return f"cannot be shown: {type(e).__name__}: {e}"


def _rows(state: State) -> list[dict[str, Any]]:
    columns = {
        name: column
        for name, column in vars(state.rows).items()
        if isinstance(column, np.ndarray) and column.ndim == 1 and name != "active"
    }
    return [
        {"row": row, **{name: column[row].item() for name, column in columns.items()}}
        for row in np.flatnonzero(state.rows.active).tolist()
    ]


def _waiting(sequence: Sequence) -> dict[str, Any]:
    return {
        "key": sequence.key,
        "tokens": len(sequence.ids),
        "resumed": sequence.resumed,
        "pending": sequence.pending,
    }


def _sent(sent: Sent) -> dict[str, Any]:
    values = {name: getattr(sent, name) for name in Sent.__slots__}
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


def _step(step: Step) -> dict[str, Any]:
    packed = ("released", "rows", "starts", "counts", "slots", "samples", "drafts")
    columns = {name: messages.unpack(getattr(step, name)).tolist() for name in packed}
    admitted = [{"row": start.row, "prefix": len(start.prefix) // 4} for start in step.admitted]
    return {"number": step.number, "admitted": admitted, **columns}


def _tree(state: State) -> dict[str, Any]:
    data = state.tree.snapshot(TREE_DEPTH, ids=0, max_nodes=TREE_NODES)
    for namespace in data["namespaces"]:
        namespace["namespace"] = namespaces.label(namespace["namespace"])
    return data
