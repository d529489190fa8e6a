"""Runs Steps on a device: a step is planned and launched while the one before it runs, and read when done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.srt import messages
from sapwood.srt.messages import Step, StepResult
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.parallel import Group
from sapwood.srt.worker.constraints import Constraints, Filling
from sapwood.srt.worker.device.accelerator import Accelerator, Event
from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.forward import DeviceForward
from sapwood.srt.worker.device.lane import Given, Lane
from sapwood.srt.worker.device.pieces import joined, pieces_of
from sapwood.srt.worker.device.sampler import DeviceSampler, Launched
from sapwood.srt.worker.device.waker import Waker
from sapwood.srt.worker.reader import PromptReader, Reads
from sapwood.srt.worker.runner import failures, follow, lines_of, places_of, tokens_of
from sapwood.srt.worker.sampler import Places
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Pending:
    """A step that has been launched. `done`: its results are in the host's memory."""

    step: Step
    samples: Int32s
    at: npt.NDArray[np.intp]
    places: Places
    filling: Filling | None
    launched: list[Launched]
    """What was drawn, in groups of places; nothing on a rank that only follows."""
    read: Callable[[], Reads]
    lane: Lane
    begun: float
    done: Event


@dataclass(slots=True)
class Parts:
    """What a runner is made of. The streams are the accelerator's: nothing is given to any other."""

    decoder: Decoder[Any]
    tokens: TokenPool
    columns: DeviceColumns
    sampler: DeviceSampler
    reader: PromptReader
    constraints: Constraints
    forward: DeviceForward
    lanes: Sequence[Lane]
    accelerator: Accelerator
    group: Group
    compute: Any
    plan: Any
    copy: Any


class DeviceRunner:
    """Steps must come in order, and at most as many as there are lanes before the first of them is read.

    Nothing waits for the step that is launched. Only where the host must know what the step before has drawn
    (a row with a grammar) does a launch wait for that one, and with its forward pass under way.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending: deque[Pending] = deque()
        self._results: list[StepResult] = []
        self._waker = Waker(parts.accelerator.choose)
        self._ended = 0.0
        """When the last result was read."""

    def fileno(self) -> int:
        """Can be read when a step has ended, which `finished` then tells."""
        return self._waker.fileno()

    def start(self, step: Step) -> list[StepResult]:
        """Launch a step: the results of those before it that had to be waited for, or have ended."""
        parts = self._parts
        lane = parts.lanes[step.number % len(parts.lanes)]
        while lane.busy:
            self._finish()
        if (size := parts.forward.overdue(lane)) is not None:
            self._drain()
            parts.forward.capture(lane, size)
        lane.busy = True
        self._launch(step, lane, time.perf_counter())
        return self.finished()

    def finished(self) -> list[StepResult]:
        """The results of the steps that have ended since the last call, in order."""
        self._waker.clear()
        while self._pending and self._pending[0].done.query():
            self._finish()
        results, self._results = self._results, []
        return results

    def has_spare_work(self) -> bool:
        """Whether no step is in flight, and there are graphs to be made."""
        return not self._pending and self._parts.forward.lacking() is not None

    def idle(self) -> bool:
        """Make one graph in one lane, if no step is in flight, as a request that comes meanwhile waits for
        it: False if there is none to be made."""
        lacking = None if self._pending else self._parts.forward.lacking()
        return lacking is not None and self._parts.forward.capture(*lacking)

    def warm_up(self) -> None:
        """Run what a step may need once, so that what is compiled at first use is compiled."""
        parts = self._parts
        parts.accelerator.synchronize()  # all that was made so far was made on a stream that none waits for
        with parts.accelerator.using(parts.compute):
            for lane in parts.lanes:
                for given in lane.warm_ups():
                    hidden = parts.forward(lane.plan(given), lane)
                    logits = parts.decoder.logits(hidden, lane.lines(np.zeros(1, np.int32)))
                    one, none = np.ones(1, np.int32), np.empty(0, np.int32)
                    self._sample(logits, Places(given.rows[:1], one, one, one * 0, none))
                    done = parts.accelerator.event()
                    done.record(parts.compute)
                    done.synchronize()
        # A graph has collectives in it: ranks that made theirs each in its own time would wait for ever.
        while parts.group.size > 1 and self.idle():
            pass

    def _launch(self, step: Step, lane: Lane, begun: float) -> None:
        parts = self._parts
        given, samples, drafts, ends = _given(step)
        at = np.flatnonzero(samples)
        firsts = (given.starts + given.counts - drafts)[at]
        places = places_of(given.rows[at], samples[at], firsts, drafts[at], ends[at], given.ids)
        with parts.accelerator.using(parts.plan):
            for start in step.admitted:
                parts.columns.seat(start.row, messages.unpack(start.prefix))
            planned = lane.plan(given)
            lines = lane.lines(lines_of(places, ends[at]))
            lane.planned.record(parts.plan)
        with parts.accelerator.using(parts.compute):
            lane.planned.wait(parts.compute)
            self._admit(step)
            parts.columns.inputs(planned.batch.ids, planned.owner)
            hidden = parts.forward(planned, lane)
            read = parts.reader.launch(hidden, given.rows, given.starts, given.counts)
            filling = self._constrain(step, places)
            launched: list[Launched] = []
            if len(at):
                if filling is not None:
                    parts.constraints.finish(filling)
                    places.masks, places.masked = filling.masks, filling.masked(places.widths)
                for some, span in pieces_of(places):
                    launched += self._sample(parts.decoder.logits(hidden, lines[span]), some)
        done = self._copied(launched)
        self._pending.append(Pending(step, samples, at, places, filling, launched, read, lane, begun, done))
        self._waker.watch(done)

    def _sample(self, logits: Tensor, places: Places) -> list[Launched]:
        """Rank 0 draws, and the other ranks hear of it: all their rows' next inputs are the same."""
        if self._parts.group.rank == 0:
            return [self._parts.sampler.launch(logits, places)]
        self._parts.sampler.follow(places)
        return []

    def _admit(self, step: Step) -> None:
        """Release and admit rows. On the compute stream: what the step before draws is counted for the rows
        as they were."""
        parts = self._parts
        released = messages.unpack(step.released)
        parts.tokens.release(released)
        parts.columns.release(released)
        for start in step.admitted:
            parts.tokens.admit(start)
        if parts.group.rank == 0:  # who alone counts what rows have had
            parts.columns.admit([start.row for start in step.admitted])

    def _constrain(self, step: Step, places: Places) -> Filling | None:
        """Begin to fill the masks of rows that have a grammar, which first hear of what they have drawn."""
        constraints = self._parts.constraints
        if self._parts.group.rank:
            return None
        released = messages.unpack(step.released)
        grammars = any(start.grammar for start in step.admitted)
        if not (grammars or constraints.follows(released) or constraints.follows(places.rows)):
            return None
        self._drain()
        constraints.release(released)
        for start in step.admitted:
            constraints.admit(start)
        return constraints.begin(places.rows, places.drafts, places.proposed)

    def _copied(self, launched: Sequence[Launched]) -> Event:
        """The event after which all that the step has given is in the host's memory."""
        parts, computed, done = self._parts, self._parts.accelerator.event(), self._parts.accelerator.event()
        computed.record(parts.compute)
        with parts.accelerator.using(parts.copy):
            computed.wait(parts.copy)
            for part in launched:
                part.fetch()
            done.record(parts.copy)
        return done

    def _drain(self) -> None:
        while self._pending:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest step, and tell what it gave."""
        pending = self._pending.popleft()
        pending.done.synchronize()
        pending.lane.busy = False
        reads = pending.read()
        result = StepResult(pending.step.number, b"", {}, reads.errors, 0.0, reads.reads)
        if pending.launched:
            counts = self._tell(pending, result)
            if pending.step.drafts:
                given = np.zeros_like(pending.samples)
                given[pending.at] = counts
                result.counts = messages.pack(given)
        now = time.perf_counter()
        # What it shared with the step before is that one's.
        result.seconds = now - max(pending.begun, self._ended)
        self._ended = now
        self._results.append(result)

    def _tell(self, pending: Pending, result: StepResult) -> Int32s:
        """Put all that was sampled into the result; how many ids each place has given."""
        places, filling = pending.places, pending.filling
        drawn, logprobs = joined([part.read() for part in pending.launched])
        before = drawn.counts
        if filling is not None:
            result.errors += filling.errors
            follow(self._parts.constraints, filling, places, drawn, result)
        result.errors += failures(places, drawn, filling, result.errors)
        result.ids = messages.pack(drawn.ids)
        if drawn.counts is not before:  # a grammar has ended before the last id
            offsets = np.arange(before.sum()) - np.repeat(np.cumsum(before) - before, before)
            kept = np.flatnonzero(offsets < np.repeat(drawn.counts, before)).tolist()
            logprobs = {new: logprobs[old] for new, old in enumerate(kept) if old in logprobs}
        result.logprobs = logprobs
        return drawn.counts


def _given(step: Step) -> tuple[Given, Int32s, Int32s, Int32s]:
    """A step's arrays; of each row how many it samples, how many drafts it has, and where its tokens end."""

    def column(data: bytes) -> Int32s:
        return messages.unpack(data).astype(np.int32)

    rows, starts, counts = column(step.rows), column(step.starts), column(step.counts)
    samples = column(step.samples)
    drafts = column(step.drafts) if step.drafts else np.zeros_like(samples)
    owner, positions, ends = tokens_of(rows, starts, counts)
    given = Given(
        ids=column(step.ids),
        owner=owner.astype(np.int32),
        positions=positions,
        slots=column(step.slots),
        rows=rows,
        starts=starts,
        counts=counts,
        shared=column(step.shared),
    )
    return given, samples, drafts, ends
