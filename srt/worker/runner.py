"""Runs a Step: brings the rows up to date, computes the forward pass, samples."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from sapwood.srt import messages
from sapwood.srt.messages import Step, StepResult
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.worker.reader import PromptReader
from sapwood.srt.worker.sampler import Sampled, Sampler
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


class Runner:
    """One model; `forward` runs its layers over one pool. Steps must come in order; a plain decode runs no
    loop over its rows."""

    def __init__(
        self, decoder: Decoder, forward: Callable[[Batch], torch.Tensor], token_pool: TokenPool
    ) -> None:
        self._decoder = decoder
        self._forward = forward
        self._tokens = token_pool
        self._sampler = Sampler(token_pool)
        self._reader = PromptReader(decoder, token_pool)

    def run(self, step: Step) -> StepResult:
        """The result of the step; `seconds` is what it took."""
        begin = time.perf_counter()
        tokens = self._tokens
        tokens.release(messages.unpack(step.released))
        for start in step.admitted:
            tokens.admit(start)
        rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
        counts, samples = messages.unpack(step.counts), messages.unpack(step.samples)
        batch, ends = self._batch(rows, starts, counts, step)
        hidden = self._forward(batch)
        read = self._reader.read(hidden, rows, starts, counts)
        sampled = self._sample(hidden, rows, samples, starts + counts, ends - 1)
        return StepResult(
            number=step.number,
            ids=messages.pack(sampled.ids),
            logprobs=sampled.logprobs,
            errors=[*read.errors, *sampled.errors],
            seconds=time.perf_counter() - begin,
            reads=read.reads,
        )

    def _batch(self, rows: Int32s, starts: Int32s, counts: Int32s, step: Step) -> tuple[Batch, Int32s]:
        tokens = self._tokens
        ends = np.cumsum(counts, dtype=np.int32)
        owner = np.repeat(rows, counts)
        positions = np.arange(len(owner), dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        positions = positions.astype(np.int32)
        slots = messages.unpack(step.slots).astype(np.int32)
        tokens.slot_table[owner, positions] = slots
        ids = messages.unpack(step.ids).astype(np.int32)
        pooled = ids < 0
        ids[pooled] = tokens.last[owner[pooled]]
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

    def _sample(
        self, hidden: torch.Tensor, rows: Int32s, samples: Int32s, positions: Int32s, last: Int32s
    ) -> Sampled:
        places = np.flatnonzero(samples)
        if not len(places):
            return Sampled(np.empty(0, dtype=np.int32), {}, [])
        logits = self._decoder.logits(hidden, torch.from_numpy(last[places].astype(np.int32)))
        return self._sampler.sample(
            logits, rows[places].astype(np.int32), samples[places], positions[places].astype(np.int32)
        )
