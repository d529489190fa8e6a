"""Log-probabilities of tokens, in the shape of messages: of the model's own distribution, row by row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from sapwood.kernels.ops import sampling
from sapwood.srt.messages import TokenLogprob
from sapwood.srt.params import MAX_TOP_LOGPROBS

Int32s = npt.NDArray[np.int32]


def token_logprobs(
    logits: torch.Tensor, source: Int32s, ids: Int32s, tops: Int32s, chosen: Mapping[int, Int32s]
) -> list[TokenLogprob]:
    """For each of n entries the value of `ids[i]` in row `source[i]` of the logits [s, vocab].

    `tops[i]` alternatives come with it (at most MAX_TOP_LOGPROBS), and the values of the ids `chosen[i]`.
    Where the logits are no numbers, the value is NaN.
    """
    count = len(ids)
    values = torch.zeros(count)
    top_ids = torch.zeros((count, MAX_TOP_LOGPROBS), dtype=torch.int32)
    top_values = torch.zeros((count, MAX_TOP_LOGPROBS))
    norms = torch.zeros(count, dtype=torch.float64)
    rows, tokens, most = (torch.from_numpy(np.ascontiguousarray(c, np.int32)) for c in (source, ids, tops))
    sampling.logprobs(logits, rows, tokens, most, values, top_ids, top_values, norms)
    result = []
    for i, (token, value, n) in enumerate(zip(ids.tolist(), values.tolist(), tops.tolist(), strict=True)):
        pairs = zip(top_ids[i, :n].tolist(), top_values[i, :n].tolist(), strict=True)
        # A vocabulary smaller than n leaves places empty: id -1.
        result.append(TokenLogprob(token, value, [pair for pair in pairs if pair[0] >= 0]))
    for i, wanted in chosen.items():
        row = logits[int(source[i])].numpy()
        # As the kernel computes the others: in double, rounded once.
        result[i].chosen = (row[wanted].astype(np.float64) - float(norms[i])).astype(np.float32).tolist()
    return result
