"""From logits to tokens: biases, bans and penalties per row, then draws that depend on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sapwood.kernels.ops import sampling
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import RowError, TokenLogprob
from sapwood.srt.worker.logprobs import token_logprobs
from sapwood.srt.worker.token_pool import Special, TokenPool

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Sampled:
    """Ids in the order of rows and samples, logprobs by index into them, and the rows that failed."""

    ids: Int32s
    logprobs: dict[int, TokenLogprob]
    errors: list[RowError]


class Sampler:
    """Samples from logits [s, vocab]: `rows[i]` draws `samples[i]` tokens for position `positions[i]`."""

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool

    def sample(self, logits: torch.Tensor, rows: Int32s, samples: Int32s, positions: Int32s) -> Sampled:
        """Logprobs are of the logits as they came; the tokens are drawn after biases, bans and penalties.

        A row that draws several (its choices fork there) draws them with consecutive choice numbers. The
        first one becomes the row's next input. `logits` may be changed.
        """
        pool = self._pool
        first = np.cumsum(samples) - samples
        source = np.repeat(np.arange(len(rows), dtype=np.int32), samples)
        owner = rows[source]
        offsets = np.arange(len(source), dtype=np.int32) - first[source].astype(np.int32)
        raw = self._adjust(logits, rows, positions)
        ids = np.zeros(len(source), dtype=np.int32)
        errors = np.zeros(len(source), dtype=np.int32)
        sampling.sample(
            logits,
            torch.from_numpy(source),
            torch.from_numpy(pool.temperature[owner]),
            torch.from_numpy(pool.top_k[owner]),
            torch.from_numpy(pool.top_p[owner]),
            torch.from_numpy(pool.min_p[owner]),
            torch.from_numpy(pool.seed[owner]),
            torch.from_numpy(pool.choice[owner] + offsets),
            torch.from_numpy(positions[source]),
            torch.from_numpy(ids),
            torch.from_numpy(errors),
        )
        pool.last[rows] = ids[first]
        self._remember(rows, ids[first])
        return Sampled(ids, self._logprobs(logits, raw, source, owner, ids), _failures(owner, errors))

    def _adjust(self, logits: torch.Tensor, rows: Int32s, positions: Int32s) -> dict[int, torch.Tensor]:
        """Change the logits of special rows; returns the raw ones of those that want logprobs."""
        raw: dict[int, torch.Tensor] = {}
        if not self._pool.special:
            return raw
        for i, row in enumerate(rows.tolist()):
            special = self._pool.special.get(row)
            if special is None:
                continue
            if self._pool.logprobs[row] >= 0:
                raw[i] = logits[i].clone()
            _change(logits[i], special, int(positions[i]))
        return raw

    def _remember(self, rows: Int32s, ids: Int32s) -> None:
        if not self._pool.special:
            return
        for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
            special = self._pool.special.get(row)
            if special is not None and special.history is not None:
                special.history.output[token] += 1

    def _logprobs(
        self,
        logits: torch.Tensor,
        raw: dict[int, torch.Tensor],
        source: Int32s,
        owner: Int32s,
        ids: Int32s,
    ) -> dict[int, TokenLogprob]:
        wanted = np.flatnonzero(self._pool.logprobs[owner] >= 0)
        if not len(wanted):
            return {}
        for i, values in raw.items():
            logits[i] = values
        further = self._pool.logprob_ids
        chosen = {k: further[row] for k, row in enumerate(owner[wanted].tolist()) if row in further}
        tops = self._pool.logprobs[owner[wanted]]
        told = token_logprobs(logits, source[wanted], ids[wanted], tops, chosen)
        return dict(zip(wanted.tolist(), told, strict=True))


def _change(logits: torch.Tensor, special: Special, position: int) -> None:
    params, history = special.params, special.history
    if history is not None:
        sampling.adjust(
            logits,
            torch.from_numpy(history.prompt),
            torch.from_numpy(history.output),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
    row = logits.numpy()
    if len(special.bias_ids):
        row[special.bias_ids] += special.biases
    if position < special.banned_before:
        row[special.banned] = -np.inf


def _failures(owner: Int32s, errors: Int32s) -> list[RowError]:
    if not errors.any():
        return []
    said = {
        sampling.NOT_FINITE: "the model's logits are not numbers",
        sampling.NOTHING_LEFT: "no token may be sampled: every one is held back by logit_bias or min_tokens",
    }
    worst = {int(row): int(error) for row, error in zip(owner, errors, strict=True) if error}
    return [
        RowError(row, ErrorInfo(500, "server_error", "nothing_to_sample", said[error]))
        for row, error in worst.items()
    ]
