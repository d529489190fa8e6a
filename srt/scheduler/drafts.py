"""Which rows get drafts, and what is proposed. No draft changes an answer: the worker keeps what it draws.

    step        k           k + 1        k + 2
    row         sampled     sampled      input, d drafts      (d + 1 positions, up to d + 1 tokens)
                      └ result: found what may come next, so it `waits`: it joins k + 2 when it knows k + 1's

A row that waits is in every second step while others go on in each: so that must pay, not the draft alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.config import Config
from sapwood.srt.scheduler import sources
from sapwood.srt.scheduler.acceptance import (
    FIRST_GAP,
    MAX_GAP,
    SHARED_WEIGHT,
    WEIGHT,
    Drafting,
    Rates,
    Source,
    agreement,
    expected,
    worthwhile,
)
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.sources import Recent
from sapwood.srt.scheduler.state import State
from sapwood.srt.scheduler.step_cost import StepCost

Int32s = npt.NDArray[np.int32]

MAX_FORCED = 64
"""Tokens of a forced text in one draft."""
MAX_LOOKS = 4
"""Rows for which drafts are looked for with one result, of those that decode without."""
NO_ROOM_GAP = 8
"""Tokens for which a row decodes without drafts when there was no room for one."""
FULL = 0.97
"""Where a draft would have to be kept as likely as this, the step is full: none is looked for."""
GAIN_ALONE = 0.3
"""Tokens that a draft must bring on average where nothing else runs: the worker is idle between two steps."""
GAIN_AMONG_OTHERS = 1.5
"""And where others go on meanwhile: its row is left out of every second step."""

_SOURCES: dict[str, tuple[Source, ...]] = {
    "auto": (Source.PATH, Source.SUFFIX, Source.OWN),
    "radix": (Source.PATH, Source.SUFFIX),
    "ngram": (Source.OWN,),
    "none": (),
}


@dataclass(slots=True)
class Drafts:
    """What is known of drafts in general: `sources` in order, rates with which sequences begin, costs, and
    what sequences that have ended said."""

    on: bool
    most: int
    sources: tuple[Source, ...]
    rates: Rates = field(default_factory=Rates)
    cost: StepCost = field(default_factory=StepCost)
    recent: Recent = field(default_factory=Recent)
    gain_alone: float = GAIN_ALONE
    gain_among_others: float = GAIN_AMONG_OTHERS

    @classmethod
    def of(cls, config: Config) -> Drafts:
        """As the flags say."""
        algorithm = config.speculative_algorithm
        used = _SOURCES[algorithm]
        if config.disable_radix_cache:
            used = tuple(source for source in used if source is Source.OWN)
        return cls(algorithm != "none", config.speculative_num_draft_tokens, used)

    def keep(self, request: Request, ids: Int32s) -> None:
        """A sequence of the request has ended with these ids."""
        if Source.SUFFIX in self.sources:
            self.recent.add(request.namespace, ids[max(len(request.prompt) - sources.SUFFIX, 0) :])


def look(state: State, at: npt.NDArray[np.int32]) -> None:
    """Rows `at` have got a token and decode without drafts: those for which some would pay now wait."""
    rows, drafts, running = state.rows, state.drafts, len(at)
    least = drafts.cost.marginal(running)
    if least > FULL:
        return
    due = at[rows.active[at] & ~rows.waits[at] & (rows.length[at] >= rows.probe[at])]
    if not len(due) or _spare(state) <= 0:
        return
    if len(due) > MAX_LOOKS:
        due = due[np.argsort(rows.probe[due] - rows.length[due], kind="stable")[:MAX_LOOKS]]
    for row in due.tolist():
        ahead, length = int(rows.inflight[row]), int(rows.length[row])
        most = min(drafts.most, int(rows.limit[row]) - length - 1 - ahead)
        if most > 0 and _find(state, row, ahead, most, least) is not None:
            rows.waits[row] = True
        elif rows.probe[row] <= length:
            rows.probe[row] = length + running


def force(state: State, sequence: Sequence, forced: bytes) -> None:
    """The sequence's grammar leaves no choice of what comes next: it waits, if that is worth it."""
    rows, row, drafting = state.rows, sequence.row, sequence.drafting
    if row >= 0 and drafting is not None and rows.length[row] < drafting.forced_from:
        forced = b""
    sequence.forced = forced
    if row < 0 or not forced or not state.drafts.on:
        return
    count = len(forced) // 4 - int(rows.inflight[row])
    least = 1 if _alone(state, row) else max(1.0, state.drafts.gain_among_others)
    if count >= least and _spare(state) > 0:
        rows.waits[row] = True


def propose(state: State, ready: npt.NDArray[np.intp], tokens: int, budget: int) -> dict[int, Int32s]:
    """Drafts for rows of `ready`, which wait and whose ids are all known, in a step of so many tokens without
    them, of which it may have `budget` more. They are given slots that nobody else needs soon."""
    rows, room = state.rows, min(budget, _spare(state))
    proposed: dict[int, Int32s] = {}
    for row in ready.tolist():
        draft = _draft(state, row, tokens, room) if room > 0 else None
        if draft is None:
            soonest = int(rows.length[row]) + (1 if room > 0 else NO_ROOM_GAP)
            rows.waits[row], rows.probe[row] = False, max(int(rows.probe[row]), soonest)
            continue
        _commit(state, row, draft)
        proposed[row] = draft
        room -= len(draft)
        tokens += len(draft)
    return proposed


def verified(state: State, sequence: Sequence, ids: Int32s, ended: bool) -> None:
    """These ids have come of the step with the sequence's draft: what was kept of it, and the token after
    that, unless the sequence `ended` before, or the worker had to."""
    drafting = sequence.drafting
    assert drafting is not None
    proposed = len(drafting.proposed)
    kept, failed = agreement(drafting.proposed, ids)
    sequence.drafted += proposed
    sequence.accepted += kept
    state.counters.drafted_tokens += proposed
    state.counters.accepted_tokens += kept
    _learn(state, drafting, drafting.source, kept, failed and not ended)
    if len(ids) > 1:
        drafting.gap = FIRST_GAP
        return
    # One token would have come without a draft, too.
    rows, row = state.rows, sequence.row
    if row < 0:
        return
    rows.waits[row] = False
    soonest = int(rows.length[row]) + drafting.gap
    if drafting.source is Source.FORCED:
        drafting.forced_from = soonest
    else:
        rows.probe[row] = soonest
    drafting.gap = min(2 * drafting.gap, MAX_GAP)


def _draft(state: State, row: int, tokens: int, room: int) -> Int32s | None:
    """What to propose for the row, if anything."""
    rows = state.rows
    sequence = rows.sequence[row]
    assert sequence is not None
    left = min(room, int(rows.limit[row] - rows.length[row]) - 1)
    if left <= 0:
        return None
    if sequence.forced:
        _drafting(state, sequence).source = Source.FORCED
        return messages.unpack(sequence.forced)[: min(left, MAX_FORCED)]
    if rows.length[row] < rows.probe[row]:
        return None
    return _find(state, row, 0, min(left, state.drafts.most), state.drafts.cost.marginal(tokens))


def _commit(state: State, row: int, draft: Int32s) -> None:
    """Slots for the draft, behind that of the row's own next token."""
    rows, count = state.rows, len(draft)
    begin = int(rows.planned[row])
    rows.slots[row, begin : begin + count] = state.take(count)
    rows.planned[row] += count
    rows.private[row] += count
    rows.proposed[row] = count
    sequence = rows.sequence[row]
    assert sequence is not None
    _drafting(state, sequence).proposed = draft
    sequence.forced = b""


def _find(state: State, row: int, ahead: int, most: int, least: float) -> Int32s | None:
    """The first draft of up to `most` tokens that pays, if each must be kept with a likelihood of `least`;
    so many tokens `ahead` of it are being drawn. What is not to be proposed now is noted."""
    rows = state.rows
    sequence = rows.sequence[row]
    assert sequence is not None
    drafting = _drafting(state, sequence)
    length = int(rows.length[row])
    _settle(state, row, drafting)
    gain = state.drafts.gain_alone if _alone(state, row) else state.drafts.gain_among_others
    noted = []
    for source in state.drafts.sources:
        ids = _look_up(state, row, source, most + ahead)
        if len(ids) <= ahead:
            continue
        rate = drafting.rates.of[source]
        count = min(worthwhile(rate, least), most, len(ids) - ahead)
        pays = count > 0 and expected(rate, count) >= gain
        if pays and not ahead:
            drafting.source = source
            return ids[:count]
        noted.append((source, ids))
        if pays:
            drafting.noted, drafting.noted_at = noted, length
            return ids[:count]
    if noted:
        drafting.noted, drafting.noted_at = noted, length
        rows.probe[row] = length + max(len(ids) for _, ids in noted)
    return None


def _look_up(state: State, row: int, source: Source, most: int) -> Int32s:
    rows = state.rows
    ids = rows.ids[row, : rows.length[row]]
    match source:
        case Source.OWN:
            return sources.own(ids, most)
        case Source.SUFFIX:
            sequence = rows.sequence[row]
            assert sequence is not None
            return state.drafts.recent.after(sequence.request.namespace, ids[-sources.SUFFIX :], most)
        case _:
            node = rows.node[row]
            return messages.unpack(state.tree.after(node, ids[node.depth :].tobytes(), most))


def _settle(state: State, row: int, drafting: Drafting) -> None:
    """Compare what was noted with what came."""
    noted, drafting.noted = drafting.noted, []
    rows, begin = state.rows, drafting.noted_at
    for source, ids in noted:
        kept, failed = agreement(ids, rows.ids[row, begin : min(begin + len(ids), int(rows.length[row]))])
        _learn(state, drafting, source, kept, failed)


def _learn(state: State, drafting: Drafting, source: Source, kept: int, failed: bool) -> None:
    drafting.rates.saw(source, kept, failed, WEIGHT)
    state.drafts.rates.saw(source, kept, failed, SHARED_WEIGHT)


def _drafting(state: State, sequence: Sequence) -> Drafting:
    if sequence.drafting is None:
        sequence.drafting = Drafting(Rates(list(state.drafts.rates.of)))
    return sequence.drafting


def _alone(state: State, row: int) -> bool:
    """Whether nothing goes on while the row waits: all others wait too."""
    rows = state.rows
    return bool((rows.active & ~rows.waits).sum() == (not rows.waits[row]))


def _spare(state: State) -> int:
    """Slots that drafts may take for a while: none if somebody waits for slots, and never those that rows
    need in the next step."""
    if state.short:
        return 0
    rows = state.rows
    active = rows.active
    rest = int(np.maximum(rows.length[active] - rows.planned[active], 0).sum())
    return state.available - rest - rows.num_active
