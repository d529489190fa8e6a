"""What a plan of FlashInfer's double stores, and attention over it, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Buffers:
    """What a kernel reads: indptrs, page indices, last page lengths, on the wrapper's device."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass
class Plan:
    buffers: Buffers
    host: Buffers
    heads: tuple[int, int, int]
    page_size: int
    causal: bool
    window_left: int
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    number: int


def attend(
    row: int, plan: Plan, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor
) -> None:
    """One row: the last query is at the last key, where it is causal."""
    buffers, (q_heads, kv_heads, _) = plan.buffers, plan.heads
    first, last = buffers.qo_indptr[row : row + 2].tolist()
    begin, end = buffers.indptr[row : row + 2].tolist()
    pages = buffers.indices[begin:end].long()
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < len(k_cache):
        raise IndexError(f"a page that does not exist: {pages.tolist()}")
    length = max(end - begin - 1, 0) * plan.page_size + int(buffers.last_page_len[row])
    if length <= 0 or length > (end - begin) * plan.page_size:
        out[first:last] = 0.0
        return
    k, v = (
        _taken(cache, pages).flatten(0, 1)[:length].repeat_interleave(q_heads // kv_heads, dim=1)
        for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("qhd,khd->qhk", q[first:last].float(), k) * plan.scale
    at = torch.arange(last - first)[:, None] + (length - (last - first))
    keys = torch.arange(length)
    hidden = torch.zeros(last - first, length, dtype=torch.bool)
    if plan.causal:
        hidden |= keys > at
    if plan.window_left >= 0:
        hidden |= keys < at - plan.window_left
    scores.masked_fill_(hidden[:, None], -math.inf)
    lse[first:last] = scores.logsumexp(-1) / math.log(2)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out[first:last] = torch.einsum("qhk,khd->qhd", weights, v).to(out.dtype)


def _taken(cache: Tensor, pages: Tensor) -> Tensor:
    """These pages in float32; torch indexes no fp8, only bytes."""
    return cache.view(torch.uint8)[pages].view(cache.dtype).float()
