"""A rank other than 0: computes the same steps over its part of the model, and samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sapwood.srt import messages
from sapwood.srt.messages import Step, TokenLogprob
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.parallel import Group
from sapwood.srt.worker.reader import Int64s, PromptReader
from sapwood.srt.worker.runner import batch_of, lines_of, places_of
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


class Follower:
    """What `Runner` is on rank 0; `run` gives nothing, as rank 0 alone answers.

    A step's rows say what is computed, and so which collectives there are: every rank goes the same way,
    whatever the values. Of what rank 0 draws a follower needs each row's next input alone, which it is told.
    How many drafts were kept it is not told: a row that had some goes on with ids that the scheduler sends.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        forward: Callable[[Batch], torch.Tensor],
        token_pool: TokenPool,
        group: Group,
    ) -> None:
        self._decoder = decoder
        self._forward = forward
        self._tokens = token_pool
        self._group = group
        self._reader = PromptReader(decoder, token_pool, _Unread())

    def run(self, step: Step) -> None:
        self._tokens.release(messages.unpack(step.released))
        for start in step.admitted:
            self._tokens.admit(start)
        rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
        counts, samples = messages.unpack(step.counts), messages.unpack(step.samples)
        drafts = messages.unpack(step.drafts) if step.drafts else np.zeros_like(samples)
        batch, ends = batch_of(self._tokens, rows, starts, counts, step)
        hidden = self._forward(batch)
        self._reader.launch(hidden, rows, starts, counts)
        at = np.flatnonzero(samples)
        if len(at):
            places = places_of(
                rows[at], samples[at], (starts + counts - drafts)[at], drafts[at], ends[at], batch.ids.numpy()
            )
            self._decoder.logits(hidden, torch.from_numpy(lines_of(places, ends[at])))
            drawn = torch.empty(len(at), dtype=torch.int32)
            self._group.broadcast(drawn)
            self._tokens.last[rows[at]] = drawn.numpy()


class _Unread:
    """`reader.Fetch` of what nobody asks for."""

    at_once = False

    def places(self, places: Int64s, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(places)

    def logprobs(
        self, logits: torch.Tensor, source: Int32s, ids: Int32s, tops: Int32s, chosen: Mapping[int, Int32s]
    ) -> Callable[[], list[TokenLogprob]]:
        return list

    def floats(self, values: torch.Tensor) -> Callable[[], npt.NDArray[np.float64]]:
        return lambda: np.empty(0)
