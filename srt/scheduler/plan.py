"""Builds Steps: decodes first, then prompts that are under way, then newly admitted ones, in one budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.messages import RowStart, Step
from sapwood.srt.scheduler import admission
from sapwood.srt.scheduler.preemption import make_way, retract_one
from sapwood.srt.scheduler.state import Sent, State

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Draft:
    """The prompt chunks of a step being planned, one entry a row."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


def plan(state: State, number: int) -> Step | None:
    """The next step, or None if nothing can join one before a result comes.

    A row joins before the result of the step in flight only if its input is that step's one sampled token;
    then its id is sent as -1, which the worker takes from its token pool.
    """
    state.tree.expire(state.clock())
    make_way(state)
    decodes = _make_room(state)
    decode_slots = _decode(state, decodes)
    least = max(1, state.budget // 4)
    budget = max(state.budget - len(decodes), least)
    draft = Draft()
    budget = _continue_prompts(state, draft, budget)
    admitted = admission.admit(state, budget)
    for new in admitted:
        budget -= _chunk(state, draft, new.row, budget)
    if not len(decodes) and not draft.rows:
        assert not admitted
        return None
    state.outputs.stepped()
    return _emit(state, number, decodes, decode_slots, draft, admitted)


def _make_room(state: State) -> npt.NDArray[np.intp]:
    """The rows that decode in this step, once there are slots for them and for the oldest row's next chunk.

    All retraction happens here, before anything of the step is planned.
    """
    rows = state.rows
    while True:
        decodes = rows.decoding()
        need = len(decodes)
        oldest = rows.oldest() if rows.num_active else -1
        if oldest >= 0 and not rows.sampled[oldest] and not rows.busy[oldest]:
            need += min(int(rows.length[oldest] - rows.planned[oldest]), state.budget)
        if need <= state.available or not retract_one(state):
            return decodes


def _decode(state: State, decodes: npt.NDArray[np.intp]) -> Int32s:
    """Plan one more token for each of the rows; returns their slots."""
    rows = state.rows
    slots = state.take(len(decodes))
    rows.slots[decodes, rows.planned[decodes]] = slots
    rows.planned[decodes] += 1
    rows.private[decodes] += 1
    rows.inflight[decodes] += 1
    return slots


def _continue_prompts(state: State, draft: Draft, budget: int) -> int:
    """Next chunks of rows that are in their prompt, oldest first; returns what is left of the budget."""
    rows = state.rows
    for row in rows.prefilling():
        if budget <= 0:
            break
        if not rows.busy[row] and rows.planned[row] < rows.length[row]:
            budget -= _chunk(state, draft, int(row), budget)
    return budget


def _chunk(state: State, draft: Draft, row: int, budget: int) -> int:
    """Plan up to `budget` more tokens of the row's prompt; returns how many."""
    rows = state.rows
    start, length = int(rows.planned[row]), int(rows.length[row])
    count = min(length - start, budget, state.available)
    if count <= 0:
        return 0
    rows.slots[row, start : start + count] = state.take(count)
    rows.planned[row] += count
    rows.private[row] += count
    sequence = rows.sequence[row]
    assert sequence is not None
    samples = sequence.samples if start + count == length else 0
    if samples == 1:
        rows.sampled[row] = True
        rows.inflight[row] = 1
    else:
        rows.busy[row] = True
    draft.rows.append(row)
    draft.starts.append(start)
    draft.counts.append(count)
    draft.samples.append(samples)
    return count


def _emit(
    state: State,
    number: int,
    decodes: npt.NDArray[np.intp],
    decode_slots: Int32s,
    draft: Draft,
    admitted: list[admission.Admission],
) -> Step:
    """The Step, decodes before chunks; what its result will be read against goes into `in_flight`."""
    rows, num_decodes = state.rows, len(decodes)
    step_rows = _column(decodes, draft.rows)
    starts = _column(rows.planned[decodes] - 1, draft.starts)
    counts = _column(np.ones(num_decodes), draft.counts)
    samples = _column(np.ones(num_decodes), draft.samples)
    spans = list(zip(draft.rows, draft.starts, draft.counts, strict=True))
    ids = [np.full(num_decodes, -1, dtype=np.int32), *(rows.ids[r, s : s + c] for r, s, c in spans)]
    slots = [decode_slots, *(rows.slots[r, s : s + c] for r, s, c in spans)]
    state.in_flight.append(
        Sent(
            number=number,
            rows=step_rows,
            keys=rows.key[step_rows],
            ends=starts + counts,
            extends=np.arange(len(step_rows)) >= num_decodes,
            samples=samples,
            prompt_tokens=sum(draft.counts),
            tokens=sum(draft.counts) + num_decodes,
        )
    )
    released, rows.released = rows.released, []
    return Step(
        number=number,
        released=messages.pack(released),
        admitted=[_row_start(state, a) for a in admitted],
        rows=messages.pack(step_rows),
        starts=messages.pack(starts),
        counts=messages.pack(counts),
        ids=messages.pack(np.concatenate(ids)),
        slots=messages.pack(np.concatenate(slots)),
        samples=messages.pack(samples),
        shared=state.shared.of(rows, step_rows, starts),
    )


def _column(decodes: npt.NDArray[Any], chunks: list[int]) -> Int32s:
    return np.concatenate([decodes, chunks]).astype(np.int32)


def _row_start(state: State, admitted: admission.Admission) -> RowStart:
    sequence = state.rows.sequence[admitted.row]
    assert sequence is not None
    request, params = sequence.request, sequence.request.params
    reads = params.pooling is None and request.reads_from >= 0
    return RowStart(
        row=admitted.row,
        prefix=messages.pack(admitted.prefix),
        params=params,
        seed=request.seed,
        choice=sequence.choice,
        prompt_len=len(request.prompt),
        history=messages.pack(sequence.ids) if params.penalised or reads else b"",
        read_from=request.reads_from + 1 if reads else -1,
    )
