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
from sapwood.srt.worker.token_pool import TokenPool

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
        first one becomes the row's next input.
        """
        pool = self._pool
        first = np.cumsum(samples) - samples
        source = np.repeat(np.arange(len(rows), dtype=np.int32), samples)
        owner = rows[source]
        offsets = np.arange(len(source), dtype=np.int32) - first[source].astype(np.int32)
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
            *self._changes(rows, positions),
        )
        pool.last[rows] = ids[first]
        return Sampled(ids, self._logprobs(logits, source, owner, ids), _failures(owner, errors))

    def _changes(self, rows: Int32s, positions: Int32s) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What is done to each row's logits before it is drawn from; (None, None) if nothing is."""
        pool = self._pool
        if not pool.changes:
            return None, None
        changes = pool.change[rows]
        changes[positions >= pool.banned_before[rows], sampling.NUM_BANNED] = 0
        return torch.from_numpy(changes), torch.from_numpy(pool.penalties[rows])

    def _logprobs(
        self,
        logits: torch.Tensor,
        source: Int32s,
        owner: Int32s,
        ids: Int32s,
    ) -> dict[int, TokenLogprob]:
        wanted = np.flatnonzero(self._pool.logprobs[owner] >= 0)
        if not len(wanted):
            return {}
        further = self._pool.logprob_ids
        chosen = {k: further[row] for k, row in enumerate(owner[wanted].tolist()) if row in further}
        tops = self._pool.logprobs[owner[wanted]]
        told = token_logprobs(logits, source[wanted], ids[wanted], tops, chosen)
        return dict(zip(wanted.tolist(), told, strict=True))


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
