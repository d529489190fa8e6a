"""From logits to token ids on any device, without waiting for it: what `sampling` promises, on tensors alone.

Weights are e ** ((logit - top) / temperature) in float32, as in C++, then integers of 2 ** -44: sums of
integers have no order, so that a draw does not depend on the other lines, nor on how many there are, whatever
order a device's scan has. Only the exponential's last bits are the device's own: ids are those of
`sampling.sample` but where a draw, or a border of top_p or min_p, lies within float32's rounding of a token's
weight.

Draws are inverses of the cumulative distribution at Philox's number for (seed, choice, position). A library's
own sampler (FlashInfer's, say) numbers its draws by their place in the batch: the same request would give
other tokens beside other rows, or when it is resumed. So nothing is drawn with one; it may only filter
(`Renorm`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sapwood.kernels.ops.sampling import GREEDY_BELOW, NOT_FINITE, NOTHING_LEFT, OK

WORKSPACE = 2**29
"""Bytes that an op over whole lines takes at a time, beside a line's own: it goes through them in chunks."""
SCALE = 2.0**44
MAX_VOCAB = 2**19 - 1
"""So many of the largest weights still have their sum in an int64."""
_BLOCK = 256
"""Weights whose sums are searched before the weights themselves: a device's scan of a long row is slow."""
_DRAW_BYTES = 28
_RANK_BYTES = 64
_RENORM_BYTES = 36


class Renorm(Protocol):
    """The two filters of `flashinfer.sampling`: what they set to 0 is dropped; their values are not used.

    Which tokens they keep differs in ties alone: all whose probability (float32) is that of the last one kept
    are kept, here only those with the lowest ids.
    """

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor, is_deterministic: bool) -> Tensor: ...

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor, is_deterministic: bool) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Filters:
    """Of n lines the temperature, top_p, min_p float32 [n] and top_k int32 [n] (0: off). `by_k`, `by_p`,
    `floors`: some line has a top_k, a top_p, a min_p. Where these are False nobody looks."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    by_k: bool
    by_p: bool
    floors: bool

    @property
    def ranks(self) -> bool:
        """Whether tokens are dropped by their rank."""
        return self.by_k or self.by_p

    def part(self, span: slice) -> Filters:
        return replace(
            self,
            temperature=self.temperature[span],
            top_k=self.top_k[span],
            top_p=self.top_p[span],
            min_p=self.min_p[span],
        )


def chunks(lines: int, bytes_a_line: int) -> Iterator[slice]:
    """The lines in order, as many at a time as WORKSPACE has room for."""
    size = max(1, WORKSPACE // max(1, bytes_a_line))
    for begin in range(0, lines, size):
        yield slice(begin, min(begin + size, lines))


def draw(
    logits: Tensor,
    filters: Filters | None,
    u: Tensor | None,
    *,
    lines: Tensor | None = None,
    renorm: Renorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids int32 [n, m] drawn at `u` float64 [n, m] from each line, and the line's error int32 [n], as
    `sampling.sample` (and its `sample_reference`) says; an id beside an error is 0. Without filters and `u`
    all lines are greedy, and m is 1.

    logits float32 [s, v]; `lines` int64 [n]: which are drawn from (None: all, n is s). With `renorm` top_k
    and top_p are its, else lines are sorted. Takes about 28 v bytes a line, 36 v with `renorm` and 64 v to
    sort, in chunks; 4 v at most where all are greedy.
    """
    v = logits.shape[1]
    assert v <= MAX_VOCAB
    n = logits.shape[0] if lines is None else lines.shape[0]
    if filters is None:
        bytes_a_token = 0 if lines is None else 4
    else:
        ranking = _RANK_BYTES if renorm is None else _RENORM_BYTES
        bytes_a_token = ranking if filters.ranks else _DRAW_BYTES
    parts = []
    for span in chunks(n, v * bytes_a_token):
        some = logits[span] if lines is None else logits.index_select(0, lines[span])
        top, best = torch.max(some, -1)  # of several maxima the lowest id; NaN is above all
        ids, left = best[:, None], None
        if filters is not None and u is not None:
            ids, left = _draw(some, top, filters.part(span), u[span], renorm, ids)
        errors = _errors(top, left)
        parts.append((ids.masked_fill(errors[:, None] != OK, 0).int(), errors))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([errors for _, errors in parts])


def _draw(
    logits: Tensor,
    top: Tensor,
    filters: Filters,
    u: Tensor,
    renorm: Renorm | None,
    best: Tensor,
) -> tuple[Tensor, Tensor]:
    """The ids, and whether a line has anything left to be drawn, bool [n]; of one that is no distribution
    both may be anything."""
    greedy = (filters.temperature < GREEDY_BELOW) | (filters.top_k == 1)
    factor = torch.where(greedy, 1.0, filters.temperature.reciprocal())
    weights = (logits - top[:, None]).mul_(factor[:, None]).exp_()
    if renorm is not None:
        # Its kernels look for thresholds: in numbers, whatever comes of it.
        weights.masked_fill_(~(top.abs() < float("inf"))[:, None], 1.0)
    ids, totals = _at_share(_kept(logits, weights, filters, renorm), u)
    return torch.where(greedy[:, None], best, ids), (totals > 0) | greedy


def _errors(top: Tensor, left: Tensor | None) -> Tensor:
    some = top > float("-inf")
    found = torch.where(some if left is None else some & left, OK, NOTHING_LEFT)
    return torch.where(top < float("inf"), found, NOT_FINITE).int()  # NaN is not less


def _kept(logits: Tensor, weights: Tensor, filters: Filters, renorm: Renorm | None) -> Tensor:
    """The weights as integers, 0 where a filter drops them."""
    counted = (weights * SCALE).long()
    if filters.ranks and renorm is None:
        counted.mul_(_ranked(logits, counted, filters))
    elif filters.ranks and renorm is not None:
        top_k, top_p = filters.top_k, filters.top_p
        if filters.by_k:
            first = renorm.top_k_renorm_probs(_shares(counted), top_k.clamp(min=1), is_deterministic=True)
            counted.mul_((first > 0) | (top_k == 0)[:, None])
        if filters.by_p:
            second = renorm.top_p_renorm_probs(_shares(counted), top_p, is_deterministic=True)
            counted.mul_((second > 0) | (top_p >= 1.0)[:, None])
    if filters.floors:
        counted.masked_fill_(weights < filters.min_p[:, None], 0)
    return counted


def _shares(counted: Tensor) -> Tensor:
    """Probabilities, float32."""
    return counted.float().div_(counted.sum(-1, keepdim=True))


def _ranked(logits: Tensor, counted: Tensor, filters: Filters) -> Tensor:
    """Whether top_k, then top_p keep a token: those before which less than top_p of the weight lies."""
    v = logits.shape[1]
    values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    cumulative = counted.gather(1, order).cumsum_(-1)
    most = torch.where(filters.top_k > 0, filters.top_k, v).long().clamp_(max=v)[:, None]
    total = cumulative.gather(1, most - 1)
    enough = torch.ceil(filters.top_p.double()[:, None] * total).long()
    by_p = torch.minimum(torch.searchsorted(cumulative, enough) + 1, most)
    last = torch.where(filters.top_p[:, None] >= 1.0, most, by_p) - 1
    value, token = values.gather(1, last), order.gather(1, last)
    tied = (logits == value) & (torch.arange(v, device=logits.device) <= token)
    return tied.logical_or_(logits > value)


def _at_share(counted: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first id, in order, at which the cumulative weight exceeds the share `u` of the total; and the
    totals [n]. Of a total of 0 the id is any number."""
    n, v = counted.shape
    if v % _BLOCK:
        counted = torch.nn.functional.pad(counted, (0, -v % _BLOCK))
    blocks = counted.view(n, -1, _BLOCK)
    sums = blocks.sum(-1).cumsum_(-1)
    # Less than the total, however that rounds: u, at most 1 - 2 ** -53, takes half a last place off at least.
    target = (u * sums[:, -1:]).long()
    # Of a line that is no distribution anything may come, but within it.
    at = torch.searchsorted(sums, target, right=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, at[:, :, None].expand(-1, -1, _BLOCK)).cumsum_(-1)
    before = sums.gather(1, at) - inside[:, :, -1]
    within = torch.searchsorted(inside, (target - before)[:, :, None], right=True)
    return at * _BLOCK + within[:, :, 0], sums[:, -1]


def verify(ids: Tensor, errors: Tensor, drafts: Tensor, ends: Tensor) -> Tensor:
    """How many ids each row keeps, int32 [n]: one, and one more behind each draft that is what was drawn at
    its place, up to the first end, or the first place at which nothing could be drawn. The next input is the
    last one kept.

    ids, errors int32 [n, d + 1]: what was drawn behind 0, 1, ... d drafts, and how; drafts int32 [n, d], -1
    behind a row's last; ends int32 [e].
    """
    going = (ids[:, :-1] == drafts) & (ids[:, :-1, None] != ends).all(-1)
    going &= (errors[:, :-1] == OK) & (errors[:, 1:] == OK)
    return going.int().cumprod(-1).sum(-1).int() + 1


def verify_reference(ids: Tensor, errors: Tensor, drafts: Tensor, ends: Tensor) -> Tensor:
    kept = []
    for drawn, wrong, proposed in zip(ids.tolist(), errors.tolist(), drafts.tolist(), strict=True):
        count = 1
        for token, draft, error, after in zip(drawn, proposed, wrong, wrong[1:], strict=False):
            if token != draft or token in ends.tolist() or error != OK or after != OK:
                break
            count += 1
        kept.append(count)
    return torch.tensor(kept, dtype=torch.int32)
