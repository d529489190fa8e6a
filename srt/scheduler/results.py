"""Takes in a StepResult: inserts what was computed, hands tokens on, sees ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.channel import FRAME_WEIGHT, weight
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import PromptRead, RowRead, StepResult, TokenLogprob, Tokens
from sapwood.srt.namespaces import LISTED
from sapwood.srt.scheduler import drafts
from sapwood.srt.scheduler.ends import Reason, finish, keep_in_tree, unreserve
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.state import Sent, State

SMOOTHING = 0.1


@dataclass(slots=True)
class _Emitted:
    """Tokens of a step on their way to the tokenizers."""

    keys: list[npt.NDArray[np.int64]] = field(default_factory=list)
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    tokenizers: list[npt.NDArray[np.int32]] = field(default_factory=list)
    places: list[npt.NDArray[np.intp]] = field(default_factory=list)


class _End(NamedTuple):
    """A choice that ends with its output token `n`; `matched` is the EOS or stop id, if one ended it."""

    sequence: Sequence
    n: int
    reason: Reason
    matched: int | None


class _Drawn(NamedTuple):
    """What a step has drawn: of its i-th row `counts[i]` ids, from `first[i]` on."""

    ids: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


def apply(state: State, result: StepResult) -> None:
    """Take in the result of the oldest step in flight, read against what was sent.

    What is read of prompts goes out first, tokens before any Done of the same step. A row that has ended
    since is a surplus and is dropped; one that was retracted since takes its tokens in while it waits.
    """
    sent = state.in_flight.popleft()
    assert sent.number == result.number, (sent.number, result.number)
    drawn = _drawn(sent, result)
    failed = {error.row: error.error for error in result.errors}
    _count(state, sent, result)
    here = state.rows.key[sent.rows] == sent.keys
    emitted = _Emitted()
    ended: list[_End] = []
    if failed:
        here &= ~np.isin(sent.rows, list(failed))
    for read in result.reads:
        if read.row not in failed:
            _read(state, sent, read)
    plain = here if sent.drafts is None else here & (sent.drafts == 0)
    _advance(state, sent, plain)
    ended += _prompts_only(state, sent, here)
    if sent.prompt_tokens:
        _branch(state, sent, here)
    plain = plain & (sent.samples == 1)
    ended += _append(state, sent, plain, drawn.ids, drawn.first, emitted)
    for i in np.flatnonzero(~plain).tolist():
        ended += _by_itself(state, sent, i, bool(here[i]), drawn, failed, emitted)
    _send(state, emitted, result.logprobs)
    for end in _with_grammars(state, sent, result, ended):
        finish(state, *end)
    _fail(state, sent, failed)
    if state.drafts.on:
        drafts.look(state, sent.rows[plain])


def _drawn(sent: Sent, result: StepResult) -> _Drawn:
    ids = messages.unpack(result.ids)
    counts = messages.unpack(result.counts) if result.counts else sent.samples
    ends = np.cumsum(counts)
    assert not len(ends) or ends[-1] == len(ids), (int(ends[-1]), len(ids))
    return _Drawn(ids, ends - counts, counts)


def _by_itself(
    state: State,
    sent: Sent,
    i: int,
    here: bool,
    drawn: _Drawn,
    failed: dict[int, ErrorInfo],
    emitted: _Emitted,
) -> list[_End]:
    """A row that forks, has a draft, draws nothing, or is no longer what it was."""
    place = int(drawn.first[i])
    ids = drawn.ids[place : place + drawn.counts[i]]
    if sent.drafts is not None and sent.drafts[i] and int(sent.rows[i]) not in failed:
        state.programs.drew_after_drafts(sent.part, i, len(ids) - 1)
    if sent.samples[i] > 1 and int(sent.rows[i]) not in failed and int(sent.keys[i]) in state.sequences:
        return _fork(state, sent, i, ids, place, emitted)
    if not here:
        return _late(state, sent, i, ids, place, failed, emitted)
    if sent.drafts is not None and sent.drafts[i]:
        return _verified(state, sent, i, ids, place, emitted)
    return []


def _fail(state: State, sent: Sent, failed: dict[int, ErrorInfo]) -> None:
    for row, error in failed.items():
        place = int(np.flatnonzero(sent.rows == row)[0])
        failing = state.sequences.get(int(sent.keys[place]))
        if failing is not None:
            finish(state, failing, output_count(state, failing), "error", None, error)


def output_count(state: State, sequence: Sequence) -> int:
    """Output tokens of a choice known so far."""
    total = int(state.rows.length[sequence.row]) if sequence.row >= 0 else len(sequence.ids)
    return total - len(sequence.request.prompt)


def _count(state: State, sent: Sent, result: StepResult) -> None:
    counters = state.counters
    counters.steps += 1
    counters.prompt_tokens_computed += sent.prompt_tokens
    if sent.part is not None:
        state.programs.steps.add(sent.part, sent.ends, sent.drafts)
    state.drafts.cost.saw(sent.tokens, sent.prompt_tokens, result.seconds)
    if not sent.prompt_tokens:
        state.row_cost.saw(sent.tokens, 0, result.seconds)
    else:
        each = result.seconds / sent.tokens
        known = counters.seconds_per_prompt_token
        counters.seconds_per_prompt_token = known + SMOOTHING * (each - known) if known else each


def _advance(state: State, sent: Sent, here: npt.NDArray[np.bool_]) -> None:
    """Note what is computed, and put each prompt chunk into the tree so that siblings can share it."""
    rows = state.rows
    rows.done[sent.rows[here]] = sent.ends[here]
    for row in sent.rows[here & sent.extends].tolist():
        rows.busy[row] = False
        sequence = rows.sequence[row]
        assert sequence is not None
        # One that must compute even what the tree has would hold that twice, and a retraction of it is for
        # nothing: a mean begins anew. It gives its tokens to the tree at its end.
        if sequence.request.params.pooling != "mean":
            keep_in_tree(state, row, int(rows.done[row]))


def _read(state: State, sent: Sent, read: RowRead) -> None:
    """Tell what was read of a prompt; what is told is never asked for again."""
    place = int(np.flatnonzero(sent.rows == read.row)[0])
    sequence = state.sequences.get(int(sent.keys[place]))
    if sequence is None:
        return
    request, start, values = sequence.request, read.start, read.logprobs
    assert read.pooled or start == request.reads_from + 1, (start, request.reads_from)
    told = start + len(values)
    request.reads_from = -1 if read.pooled or told >= request.sent else told - 1
    # No message is heavier than a frame, if one position is not: the tokenizer names one at a time.
    size = max(1, FRAME_WEIGHT * len(values) // weight(read))
    for at in range(0, len(values), size):
        state.tell(request.tokenizer, PromptRead(request.key, start + at, values[at : at + size]))
    if read.pooled:
        state.tell(request.tokenizer, PromptRead(request.key, pooled=read.pooled))


def _prompts_only(state: State, sent: Sent, here: npt.NDArray[np.bool_]) -> list[_End]:
    """Requests of no output whose prompts are through."""
    rows = state.rows
    ended: list[_End] = []
    for row in sent.rows[here & sent.extends & (sent.ends == rows.limit[sent.rows])]:
        sequence = rows.sequence[row]
        assert sequence is not None
        ended.append(_End(sequence, 0, "length", None))
    return ended


def _append(
    state: State,
    sent: Sent,
    plain: npt.NDArray[np.bool_],
    tokens: npt.NDArray[np.int32],
    first: npt.NDArray[np.int32],
    emitted: _Emitted,
) -> list[_End]:
    """One token more for each row in `plain`; returns the choices that end with it."""
    rows = state.rows
    places = np.flatnonzero(plain)
    if not len(places):
        return []
    at = sent.rows[places]
    new = tokens[first[places]]
    rows.ids[at, rows.length[at]] = new
    rows.length[at] += 1
    rows.inflight[at] -= 1
    emitted.keys.append(sent.keys[places])
    emitted.ids.append(new)
    emitted.tokenizers.append(rows.tokenizer[at])
    emitted.places.append(first[places].astype(np.intp))
    state.queue.generated(rows.tenant[at])
    stopped = np.isin(new, state.eos_ids) & ~rows.ignore_eos[at]
    for i in np.flatnonzero(rows.has_stops[at]):
        sequence = rows.sequence[at[i]]
        assert sequence is not None
        stopped[i] |= int(new[i]) in sequence.request.params.stop_token_ids
    ended: list[_End] = []
    for i in np.flatnonzero(stopped | (rows.length[at] >= rows.limit[at])):
        sequence = rows.sequence[at[i]]
        assert sequence is not None
        n = output_count(state, sequence)
        ended.append(
            _End(sequence, n, "stop", int(new[i])) if stopped[i] else _End(sequence, n, "length", None)
        )
    return ended


def _verified(
    state: State, sent: Sent, i: int, ids: npt.NDArray[np.int32], place: int, emitted: _Emitted
) -> list[_End]:
    """What was kept of a row's draft, and the token after it; the other slots are free from now on."""
    assert sent.drafts is not None
    rows, row, proposed = state.rows, int(sent.rows[i]), int(sent.drafts[i])
    sequence = rows.sequence[row]
    assert sequence is not None
    before, planned = int(rows.length[row]), int(sent.ends[i])
    ended = _take(state, sequence, ids, place, emitted)
    taken = int(rows.length[row]) - before
    valid = planned - 1 - proposed + taken
    rows.inflight[row] -= 1
    rows.proposed[row] = 0
    rows.done[row] = rows.planned[row] = valid
    rows.private[row] -= planned - valid
    state.pool.free(rows.slots[row, valid:planned])
    state.surplus(sequence.request.program, len(ids) - taken)
    drafts.verified(state, sequence, ids[:taken], bool(ended))
    return ended


def _late(
    state: State,
    sent: Sent,
    i: int,
    ids: npt.NDArray[np.int32],
    place: int,
    failed: dict[int, ErrorInfo],
    emitted: _Emitted,
) -> list[_End]:
    """A row that is no longer what it was: a surplus, or a retracted sequence whose tokens arrive."""
    sequence = state.sequences.get(int(sent.keys[i]))
    if int(sent.rows[i]) in failed:
        return []
    if sequence is None or sequence.row >= 0:
        state.surplus(state.programs.whose(sent.part, i), len(ids))
        return []
    sequence.pending = 0
    if not sent.samples[i]:
        request = sequence.request
        # What is to be listed must be in the tree to its end: it is computed once more.
        over = not request.max_tokens and request.namespace != LISTED
        through = over and sent.ends[i] == len(request.prompt)
        ended = [_End(sequence, 0, "length", None)] if through else []
    else:
        if not sequence.request.forked:
            _begin_choices(state, sequence.request)
        before = len(sequence.ids)
        ended = _take(state, sequence, ids, place, emitted)
        if sent.drafts is not None and sent.drafts[i]:
            taken = len(sequence.ids) - before
            sequence.known += taken - 1
            state.surplus(sequence.request.program, len(ids) - taken)
            drafts.verified(state, sequence, ids[:taken], bool(ended))
    state.wait(sequence)
    return ended


def _branch(state: State, sent: Sent, here: npt.NDArray[np.bool_]) -> None:
    """Choices of prompts with a grammar, which draw their first tokens in rows of their own."""
    for row in sent.rows[here & sent.extends & (sent.samples == 1)].tolist():
        sequence = state.rows.sequence[row]
        assert sequence is not None
        if not sequence.request.forked:
            unreserve(state, sequence.request)
            _begin_choices(state, sequence.request)


def _begin_choices(state: State, request: Request) -> None:
    """Choices 1 to n - 1 begin to wait, with the prompt alone, first in the queue."""
    request.forked = True
    for choice in range(1, request.params.n):
        sequence = Sequence(request, choice, request.prompt, resumed=True, known=len(request.prompt) - 1)
        state.sequences[sequence.key] = sequence
        state.wait(sequence)


def _fork(
    state: State, sent: Sent, i: int, ids: npt.NDArray[np.int32], place: int, emitted: _Emitted
) -> list[_End]:
    """The prompt's last logits gave one token for each choice: choices 1 to n - 1 begin to wait for a row.

    They go first in the queue and find their whole prompt in the tree.
    """
    rows = state.rows
    source = state.sequences[int(sent.keys[i])]
    request = source.request
    prompt = source.ids if source.row < 0 else rows.ids[source.row, : rows.length[source.row]].copy()
    if source.row >= 0:
        unreserve(state, request)
    request.forked = True
    source.pending = 0
    ended: list[_End] = []
    for choice in range(request.params.n):
        if choice == 0:
            sequence = source
        else:
            sequence = Sequence(request, choice, prompt, resumed=True, known=len(prompt))
            state.sequences[sequence.key] = sequence
        ended += _take(state, sequence, ids[choice : choice + 1], place + choice, emitted)
        if sequence.row >= 0:
            rows.sampled[sequence.row] = True
        else:
            state.wait(sequence)
    return ended


def _take(
    state: State, sequence: Sequence, ids: npt.NDArray[np.int32], place: int, emitted: _Emitted
) -> list[_End]:
    """Tokens more for one choice, in a row or not, up to one with which it ends; returns it if it does."""
    rows, request = state.rows, sequence.request
    n = output_count(state, sequence)
    reason: Reason | None = None
    matched = None
    for taken, token in enumerate(ids.tolist(), 1):
        if _stops(state, request, token):
            reason, matched = "stop", token
        elif n + taken >= request.max_tokens:
            reason = "length"
        if reason is not None:
            ids = ids[:taken]
            break
    if sequence.row >= 0:
        row, length = sequence.row, int(rows.length[sequence.row])
        rows.ids[row, length : length + len(ids)] = ids
        rows.length[row] += len(ids)
    else:
        sequence.ids = np.concatenate([sequence.ids, ids])
    state.queue.generated(np.full(len(ids), request.tenant, dtype=np.int32))
    emitted.keys.append(np.full(len(ids), sequence.key, dtype=np.int64))
    emitted.ids.append(ids)
    emitted.tokenizers.append(np.full(len(ids), request.tokenizer, dtype=np.int32))
    emitted.places.append(np.arange(place, place + len(ids)))
    return [_End(sequence, n + len(ids), reason, matched)] if reason is not None else []


def _stops(state: State, request: Request, token: int) -> bool:
    ends = token in state.eos_ids and not request.ignores_eos
    return ends or token in request.params.stop_token_ids


def _with_grammars(state: State, sent: Sent, result: StepResult, ended: list[_End]) -> list[_End]:
    """Those that have `ended`, and those after whose last token their grammar allows nothing. Others are told
    what their grammars force."""
    if not result.grammars:
        return ended
    ends = {end.sequence: end for end in ended}
    places = {row: i for i, row in enumerate(sent.rows.tolist())}
    failed = {error.row for error in result.errors}
    for row, grammar in result.grammars.items():
        i = places[row]
        sequence = state.sequences.get(int(sent.keys[i]))
        if sequence is None or row in failed or not sent.samples[i]:
            continue
        end = ends.get(sequence)
        if grammar.ended and (end is None or end.reason == "length"):
            ends[sequence] = _End(sequence, output_count(state, sequence), "stop", None)
        elif end is None:
            drafts.force(state, sequence, grammar.forced)
    return list(ends.values())


def _send(state: State, emitted: _Emitted, logprobs: dict[int, TokenLogprob]) -> None:
    if not emitted.keys:
        return
    keys, ids = np.concatenate(emitted.keys), np.concatenate(emitted.ids)
    tokenizers, places = np.concatenate(emitted.tokenizers), np.concatenate(emitted.places)
    state.counters.output_tokens += len(ids)
    for tokenizer in np.unique(tokenizers):
        mine = np.flatnonzero(tokenizers == tokenizer)
        values = {}
        if logprobs:
            values = {k: logprobs[int(p)] for k, p in enumerate(places[mine]) if int(p) in logprobs}
        message = Tokens(keys[mine].astype("<i8").tobytes(), messages.pack(ids[mine]), values)
        state.tell(int(tokenizer), message)
