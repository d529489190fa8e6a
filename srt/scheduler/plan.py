"""Builds Steps: decodes first, then prompts that are under way, then newly admitted ones, in one budget; what
is left of it goes to drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.messages import RowStart, Step
from sapwood.srt.scheduler import admission, drafts
from sapwood.srt.scheduler.preemption import make_way, retract_one
from sapwood.srt.scheduler.restraint import Restraint, restrain
from sapwood.srt.scheduler.state import Sent, State

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Spans:
    """The rows of a step being planned that extend by more than their last token: spans of prompts, and
    `drafts` with the token before them. One entry a row, and its ids."""

    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    ids: list[Int32s] = field(default_factory=list)

    def add(self, row: int, start: int, ids: Int32s, samples: int, drafts: int = 0) -> None:
        """The row extends by these ids, of which the last so many are a draft."""
        self.rows.append(row)
        self.starts.append(start)
        self.counts.append(len(ids))
        self.samples.append(samples)
        self.drafts.append(drafts)
        self.ids.append(ids)


def plan(state: State, number: int) -> Step | None:
    """The next step, or None if nothing can join one before a result comes.

    A row joins before the result of the step in flight only if its input is that step's one sampled token;
    then its id is sent as -1, which the worker takes from its token pool.
    """
    state.tree.expire(state.clock())
    restraint = restrain(state)
    make_way(state)
    decodes = _make_room(state, restraint)
    waits = state.rows.waits
    ready = decodes[waits[decodes]] if waits.any() else decodes[:0]
    if restraint is not None:
        restraint.decoded(state, decodes)
        ready = restraint.free(state, ready)
    decode_slots = _decode(state, decodes)
    least = max(1, state.budget // 4)
    budget = max(state.budget - len(decodes), least)
    spans = Spans()
    budget = _continue_prompts(state, spans, budget, restraint)
    admitted = admission.admit(state, budget)
    for new in admitted:
        budget -= _chunk(state, spans, new.row, budget, restraint)
    if not len(decodes) and not spans.rows:
        assert not admitted
        return None
    state.outputs.stepped()
    if len(ready):
        decodes, decode_slots = _propose(state, ready, decodes, decode_slots, spans, budget)
    return _emit(state, number, decodes, decode_slots, spans, admitted)


def _propose(
    state: State,
    ready: npt.NDArray[np.intp],
    decodes: npt.NDArray[np.intp],
    decode_slots: Int32s,
    spans: Spans,
    budget: int,
) -> tuple[npt.NDArray[np.intp], Int32s]:
    """Give drafts to those of `ready` for which they pay; what decodes without, and its slots."""
    proposed = drafts.propose(state, ready, len(decodes) + sum(spans.counts), budget)
    for row, draft in proposed.items():
        start = int(state.rows.length[row]) - 1
        spans.add(row, start, np.append(state.rows.ids[row, start], draft), 1, len(draft))
    plain = ~np.isin(decodes, list(proposed))
    return decodes[plain], decode_slots[plain]


def _make_room(state: State, restraint: Restraint | None) -> npt.NDArray[np.intp]:
    """The rows that decode in this step, once there are slots for them and for the oldest row's next chunk.

    All retraction happens here, before anything of the step is planned.
    """
    rows = state.rows
    while True:
        decodes = rows.decoding()
        if restraint is not None:
            decodes = restraint.decoding(state, decodes)
        need = len(decodes)
        oldest = rows.oldest() if rows.num_active else -1
        if oldest >= 0 and not rows.sampled[oldest] and not rows.busy[oldest]:
            need += min(int(rows.length[oldest] - rows.planned[oldest]), state.budget)
        if need <= state.available:
            return decodes
        if need <= state.available + rows.proposed.sum():
            return decodes[:0]  # nobody is retracted for a draft: its slots are free with its result
        if not retract_one(state):
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


def _continue_prompts(state: State, spans: Spans, budget: int, restraint: Restraint | None) -> int:
    """Next spans of rows that are in their prompt, oldest first; returns what is left of the budget."""
    rows = state.rows
    for row in rows.prefilling():
        if budget <= 0:
            break
        if not rows.busy[row] and rows.planned[row] < rows.length[row]:
            budget -= _chunk(state, spans, int(row), budget, restraint)
    return budget


def _chunk(state: State, spans: Spans, row: int, budget: int, restraint: Restraint | None) -> int:
    """Plan up to `budget` more tokens of the row's prompt; returns how many."""
    rows = state.rows
    if restraint is not None:
        budget = restraint.prompt(int(rows.tenant[row]), budget)
    start, length = int(rows.planned[row]), int(rows.length[row])
    count = min(length - start, budget, state.available)
    if count <= 0:
        return 0
    if restraint is not None:
        restraint.prompted(int(rows.tenant[row]), count)
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
    spans.add(row, start, rows.ids[row, start : start + count], samples)
    return count


def _emit(
    state: State,
    number: int,
    decodes: npt.NDArray[np.intp],
    decode_slots: Int32s,
    spans: Spans,
    admitted: list[admission.Admission],
) -> Step:
    """The Step, decodes first; what its result will be read against goes into `in_flight`."""
    rows, num_decodes = state.rows, len(decodes)
    step_rows = _column(decodes, spans.rows)
    starts = _column(rows.planned[decodes] - 1, spans.starts)
    counts = _column(np.ones(num_decodes), spans.counts)
    samples = _column(np.ones(num_decodes), spans.samples)
    proposed = _column(np.zeros(num_decodes), spans.drafts) if any(spans.drafts) else None
    places = zip(spans.rows, spans.starts, spans.counts, strict=True)
    slots = [decode_slots, *(rows.slots[r, s : s + c] for r, s, c in places)]
    state.in_flight.append(
        Sent(
            number=number,
            rows=step_rows,
            keys=rows.key[step_rows],
            ends=starts + counts,
            extends=np.array([False] * num_decodes + [not draft for draft in spans.drafts], dtype=np.bool_),
            samples=samples,
            drafts=proposed,
            part=state.programs.steps.part(rows, step_rows, starts),
            prompt_tokens=sum(c for c, draft in zip(spans.counts, spans.drafts, strict=True) if not draft),
            tokens=sum(spans.counts) + num_decodes,
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
        ids=messages.pack(np.concatenate([np.full(num_decodes, -1, dtype=np.int32), *spans.ids])),
        slots=messages.pack(np.concatenate(slots)),
        samples=messages.pack(samples),
        shared=state.shared.of(rows, step_rows, starts),
        drafts=messages.pack(proposed) if proposed is not None else b"",
    )


def _column(decodes: npt.NDArray[Any], others: list[int]) -> Int32s:
    return np.concatenate([decodes, others]).astype(np.int32)


def _row_start(state: State, admitted: admission.Admission) -> RowStart:
    sequence = state.rows.sequence[admitted.row]
    assert sequence is not None
    request, params = sequence.request, sequence.request.params
    reads = params.pooling is None and request.reads_from >= 0
    followed = params.penalised or reads or request.grammar is not None
    return RowStart(
        row=admitted.row,
        prefix=messages.pack(admitted.prefix),
        params=params,
        seed=request.seed,
        choice=sequence.choice,
        prompt_len=request.sent,
        history=messages.pack(sequence.ids) + request.judged if followed else b"",
        read_from=request.reads_from + 1 if reads else -1,
        grammar=state.grammars.name(request.grammar) if request.grammar is not None else b"",
    )
