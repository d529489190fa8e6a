"""Log-probabilities of tokens on any device, without waiting for it; each depends on its own line only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sapwood.kernels.ops.device_sampling import MAX_VOCAB, SCALE, chunks

_BYTES = 40


class Logprobs(NamedTuple):
    """Of n entries: `values` float32 [n]; the most likely `top_ids` int32 [n, top] and their `top_values`
    float32 [n, top], best first, ties by lowest id (-1 and -infinity where there is none); `norms` float64
    [n], the logarithm of the sum of exponentials."""

    values: Tensor
    top_ids: Tensor
    top_values: Tensor
    norms: Tensor


def logprobs(logits: Tensor, source: Tensor, ids: Tensor, top: int) -> Logprobs:
    """Log-softmax of line `source[i]` at `ids[i]`, as `sampling.logprobs` (and `logprobs_reference`) says:
    logit - norm as doubles, rounded once. A line with NaN or +infinity, or with nothing but -infinity, gives
    NaN and no alternatives.

    logits float32 [s, v]; source, ids int64 [n]. Exponentials are doubles, and summed as integers, so that
    the sum has no order (C++'s are float32: its values differ in the last bits). Takes about 40 v bytes an
    entry, in chunks.
    """
    v = logits.shape[1]
    assert v <= MAX_VOCAB
    parts = []
    for span in chunks(source.shape[0], _BYTES * v):
        lines = logits.index_select(0, source[span])
        norms = _norms(lines)
        parts.append((norms, *_best(lines, norms, min(top, v), top)))
    norms, top_ids, top_values = (
        parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
    )
    return Logprobs(values_at(logits, source, ids, norms), top_ids, top_values, norms)


def values_at(logits: Tensor, source: Tensor, ids: Tensor, norms: Tensor) -> Tensor:
    """Log-probabilities float32 [n] of ids int64 [n] in lines int64 [n], whose norms [n] are known."""
    at = source * logits.shape[1] + ids
    return (logits.reshape(-1).index_select(0, at).double() - norms).float()


def _norms(lines: Tensor) -> Tensor:
    top = lines.amax(-1).double()
    weights = (lines.double() - top[:, None]).exp_().mul_(SCALE).round_()
    total = weights.long().sum(-1)
    norms = top + torch.log(total.double() / SCALE)
    # What +infinity and NaN have become as integers is undefined.
    return torch.where(top.isfinite(), norms, float("nan"))


def _best(lines: Tensor, norms: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    if not count:
        empty = lines.new_empty((lines.shape[0], width))
        return empty.int(), empty
    v = lines.shape[1]
    # Keys that differ: the order of the floats, -0 beside 0, then that of the ids, lowest first. Which of
    # equal ones `topk` finds is not said.
    bits = (lines + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = ordered * MAX_VOCAB + torch.arange(v - 1, -1, -1, device=lines.device)
    ids = v - 1 - torch.topk(keys, count, dim=-1).values % MAX_VOCAB
    found = lines.gather(1, ids).double() - norms[:, None]
    wrong = norms.isnan()[:, None]
    ids = ids.int().masked_fill_(wrong, -1)
    found = found.float().masked_fill_(wrong, float("-inf"))
    missing = width - count
    pad = torch.nn.functional.pad
    return pad(ids, (0, missing), value=-1), pad(found, (0, missing), value=float("-inf"))
