"""Runs a Step: brings the rows up to date, computes the forward pass, samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.kernels.ops import sampling
from sapwood.srt import messages
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import RowError, Step, StepResult
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.parallel import Alone, Group
from sapwood.srt.worker.constraints import Constraints, Filling
from sapwood.srt.worker.reader import HostFetch, PromptReader
from sapwood.srt.worker.sampler import Drawn, Places, Sampler
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


class Runner:
    """One model; `forward` runs its layers over one pool. Steps must come in order; a plain decode without
    grammars runs no loop over its rows. Of a `group` of ranks it is rank 0, and tells the others (`Follower`)
    within the step what it has drawn."""

    def __init__(
        self,
        decoder: Decoder[Any],
        forward: Callable[[Batch], torch.Tensor],
        token_pool: TokenPool,
        constraints: Constraints,
        group: Group | None = None,
    ) -> None:
        self._decoder = decoder
        self._forward = forward
        self._tokens = token_pool
        self._constraints = constraints
        self._group: Group = group or Alone()
        self._sampler = Sampler(token_pool)
        self._reader = PromptReader(decoder, token_pool, HostFetch())

    def run(self, step: Step) -> StepResult:
        """The result of the step; `seconds` is what it took."""
        begin = time.perf_counter()
        self._update(step)
        rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
        counts, samples = messages.unpack(step.counts), messages.unpack(step.samples)
        drafts = messages.unpack(step.drafts) if step.drafts else np.zeros_like(samples)
        batch, ends = batch_of(self._tokens, rows, starts, counts, step)
        at = np.flatnonzero(samples)
        places = places_of(
            rows[at], samples[at], (starts + counts - drafts)[at], drafts[at], ends[at], batch.ids.numpy()
        )
        filling = self._constraints.begin(places.rows, places.drafts, places.proposed)
        hidden = self._forward(batch)
        read = self._reader.launch(hidden, rows, starts, counts)()
        result = StepResult(step.number, b"", {}, read.errors, 0.0, read.reads)
        if len(at):
            given = np.zeros_like(samples)
            given[at] = self._sample(hidden, places, ends[at], filling, result)
            result.counts = messages.pack(given) if step.drafts else b""
        result.seconds = time.perf_counter() - begin
        return result

    def _update(self, step: Step) -> None:
        """Release and admit rows."""
        released = messages.unpack(step.released)
        self._tokens.release(released)
        self._constraints.release(released)
        for start in step.admitted:
            self._tokens.admit(start)
            self._constraints.admit(start)

    def _sample(
        self, hidden: torch.Tensor, places: Places, ends: Int32s, filling: Filling | None, result: StepResult
    ) -> Int32s:
        """Puts all that is sampled into the result; how many ids each place has given."""
        widths = places.widths
        logits = self._decoder.logits(hidden, torch.from_numpy(lines_of(places, ends)))
        if filling is not None:
            self._constraints.finish(filling)
            result.errors += filling.errors
            places.masks, places.masked = filling.masks, filling.masked(widths)
        drawn = self._sampler.draw(logits, places)
        self._group.broadcast(torch.from_numpy(self._tokens.last[places.rows]))
        if filling is not None:
            follow(self._constraints, filling, places, drawn, result)
        result.errors += failures(places, drawn, filling, result.errors)
        result.ids = messages.pack(drawn.ids)
        result.logprobs = self._sampler.logprobs(logits, places, drawn)
        return drawn.counts


def batch_of(
    pool: TokenPool, rows: Int32s, starts: Int32s, counts: Int32s, step: Step
) -> tuple[Batch, Int32s]:
    """The tokens of a step, whose slots are now the pool's, and of each row where its tokens end."""
    owner, positions, ends = tokens_of(rows, starts, counts)
    slots = messages.unpack(step.slots).astype(np.int32)
    pool.slot_table[owner, positions] = slots
    ids = messages.unpack(step.ids).astype(np.int32)
    pooled = ids < 0
    ids[pooled] = pool.last[owner[pooled]]
    shared = messages.unpack(step.shared).astype(np.int32)
    batch = Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        rows=torch.from_numpy(rows.astype(np.int32)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        counts=torch.from_numpy(counts.astype(np.int32)),
        shared=torch.from_numpy(shared) if len(shared) else None,
    )
    return batch, ends


def tokens_of(rows: Int32s, starts: Int32s, counts: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    """Of each token of a step its row and its position; of each row where its tokens end."""
    ends = np.cumsum(counts, dtype=np.int32)
    owner = np.repeat(rows, counts)
    positions = np.arange(len(owner), dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
    return owner, positions.astype(np.int32), ends


def lines_of(places: Places, ends: Int32s) -> Int32s:
    """The tokens of a step whose logits are drawn from, one place's after the other's; `ends[i]` is where
    the i-th place's row ends."""
    last = np.repeat(ends - places.drafts - 1, places.widths)
    last += np.arange(len(last), dtype=np.int32) - np.repeat(places.first_lines, places.widths)
    return last.astype(np.int32)


def follow(
    constraints: Constraints, filling: Filling, places: Places, drawn: Drawn, result: StepResult
) -> None:
    """Tell the grammars what was drawn: each row's ids, of a fork the first one."""
    firsts, kept = np.cumsum(drawn.counts) - drawn.counts, drawn.counts.copy()
    ok = drawn.errors == sampling.OK
    for i in np.flatnonzero((filling.lines >= 0) & ok).tolist():
        row, forks = int(places.rows[i]), places.samples[i] > 1
        ids = drawn.ids[firsts[i] : firsts[i] + (1 if forks else drawn.counts[i])].tolist()
        taken, state = constraints.accept(row, ids)
        if not forks:
            kept[i] = taken
        if isinstance(state, ErrorInfo):
            result.errors.append(RowError(row, state))
        elif state is not None:
            result.grammars[row] = state
    if (kept != drawn.counts).any():
        drawn.first(kept)


def places_of(
    rows: Int32s, samples: Int32s, positions: Int32s, drafts: Int32s, ends: Int32s, ids: Int32s
) -> Places:
    """What a step samples; a row's drafts are its last ids, of which the last is before `ends[i]`."""
    places = Places(
        rows=rows.astype(np.int32),
        samples=samples.astype(np.int32),
        positions=positions.astype(np.int32),
        drafts=drafts.astype(np.int32),
        proposed=np.empty(0, dtype=np.int32),
    )
    if drafts.any():
        spans = zip(ends.tolist(), drafts.tolist(), strict=True)
        places.proposed = np.concatenate([ids[end - d : end] for end, d in spans])
    return places


def failures(places: Places, drawn: Drawn, filling: Filling | None, known: list[RowError]) -> list[RowError]:
    """Of rows from whose logits nothing could be drawn, and which are not `known` to have failed."""
    errors: list[RowError] = []
    for i in np.flatnonzero(drawn.errors).tolist():
        if any(error.row == places.rows[i] for error in known):
            continue
        if drawn.errors[i] == sampling.NOT_FINITE:
            what = "the model's logits are not numbers"
        elif filling is not None and filling.lines[i] >= 0:
            what = "no token may be sampled: all that the constraint allows is held back by logit_bias"
        else:
            what = "no token may be sampled: every one is held back by logit_bias or min_tokens"
        info = ErrorInfo(500, "server_error", "nothing_to_sample", what)
        errors.append(RowError(int(places.rows[i]), info))
    return errors
