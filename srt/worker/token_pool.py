"""What the worker keeps of each row between steps: its slots, its last sampled token, how to sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sapwood.kernels.ops.sampling import CHANGE_FIELDS, Change
from sapwood.srt import messages
from sapwood.srt.messages import RowStart


@dataclass(slots=True)
class Reading:
    """A row whose prompt is read: `next` is the first index whose logprob is still to be told (`prompt_len`:
    none is), `top` the number of alternatives, `chosen` are further ids to be told. With `pooling` "mean",
    `total` is the sum of the hidden states so far, in float64."""

    prompt: npt.NDArray[np.int32]
    prompt_len: int
    next: int
    top: int
    chosen: npt.NDArray[np.int32]
    pooling: Literal["last", "mean"] | None
    total: npt.NDArray[np.float64]

    @property
    def done(self) -> bool:
        return self.pooling is None and self.next >= self.prompt_len


class TokenPool:
    """Numpy columns of `capacity` rows with up to `max_tokens` positions each."""

    def __init__(
        self, capacity: int, max_tokens: int, vocab_size: int, hidden_size: int, eos_ids: list[int]
    ) -> None:
        def column(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return np.zeros(capacity, dtype=dtype)

        self.slot_table = np.zeros((capacity, max_tokens + 1), dtype=np.int32)
        self.last = column(np.int32)
        self.temperature = column(np.float32)
        self.top_k = column(np.int32)
        self.top_p = column(np.float32)
        self.min_p = column(np.float32)
        self.seed = column(np.int64)
        self.choice = column(np.int32)
        self.logprobs = column(np.int32)
        """-1: none; else the number of alternatives."""
        self.change = np.zeros((capacity, CHANGE_FIELDS), dtype=np.int64)
        """Of each row the addresses in `changes`, zeros for a row whose logits stay as they are."""
        self.penalties = np.zeros((capacity, 3), dtype=np.float32)
        self.banned_before = column(np.int32)
        """Sampling a position below this must not give a banned id."""
        self.changes: dict[int, Change] = {}
        self.reading: dict[int, Reading] = {}
        self.logprob_ids: dict[int, npt.NDArray[np.int32]] = {}
        """Further ids whose logprobs a row wants at every place."""
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int32)

    def release(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget what is kept of rows that have been given up."""
        self.change[rows] = 0
        for row in rows.tolist():
            for kept in (self.changes, self.reading, self.logprob_ids):
                kept.pop(row, None)

    def admit(self, start: RowStart) -> None:
        """Begin a row: its cached slots, its sampling parameters, its counts."""
        row, params = start.row, start.params
        prefix = messages.unpack(start.prefix)
        self.slot_table[row, : len(prefix)] = prefix
        self.temperature[row] = params.temperature
        self.top_k[row] = max(0, params.top_k) if params.top_k < self._vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = start.seed
        self.choice[row] = start.choice
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.release(np.array([row], dtype=np.int32))
        if params.logprob_ids:
            self.logprob_ids[row] = np.array(params.logprob_ids, dtype=np.int32)
        if start.read_from >= 0 or params.pooling is not None:
            self.reading[row] = self._reading(start)
        if params.penalised or params.logit_bias or params.min_tokens:
            self._change(start)

    def _reading(self, start: RowStart) -> Reading:
        params = start.params
        return Reading(
            prompt=messages.unpack(start.history)[: start.prompt_len],
            prompt_len=start.prompt_len,
            next=start.read_from if start.read_from >= 0 else start.prompt_len,
            top=params.logprobs or 0,
            chosen=np.array(params.logprob_ids, dtype=np.int32),
            pooling=params.pooling,
            total=np.zeros(self._hidden_size if params.pooling == "mean" else 0),
        )

    def _change(self, start: RowStart) -> None:
        row, params, v = start.row, start.params, self._vocab_size
        change = Change(
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias_ids=np.array(list(params.logit_bias), dtype=np.int32),
            biases=np.array(list(params.logit_bias.values()), dtype=np.float32),
        )
        if params.penalised:
            ids = messages.unpack(start.history)
            change.prompt_seen, change.output_counts = np.zeros(v, np.uint8), np.zeros(v, np.int32)
            change.prompt_seen[ids[: start.prompt_len]] = 1
            np.add.at(change.output_counts, ids[start.prompt_len :], 1)
        if params.min_tokens:
            change.banned = np.array(sorted({*self.eos_ids.tolist(), *params.stop_token_ids}), dtype=np.int32)
        self.changes[row] = change
        self.change[row] = change.fields
        self.penalties[row] = change.penalties
        self.banned_before[row] = min(start.prompt_len + params.min_tokens, np.iinfo(np.int32).max)
