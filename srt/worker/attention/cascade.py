"""The levels of a cascade: what several rows of a step share is read once, and what is their own row by row.

            level 0            level 1       own (causal)
 row 3   ┌ [0, 512) ─────────┬ [512, 768) ─┬ [768, 801)
 row 7   │                   └             └ [768, 790)
 row 0   │                   ┬ [512, 513) ── [513, 600)     shares nothing more: a piece of its own instead
 row 5   └                   ┴ [512, 513) ── [513, 640)

The queries of a group must be neighbours, and rows that share need not be. They are sorted by what they
share, and their tokens are gathered before and scattered after: two copies of the queries, some hundred
kilobytes, where a group for each run of neighbours would read the shared slots again each time, the more
often the more mixed the step is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.srt.worker.attention.paged import Int32s, Paged, indptr_of
from sapwood.srt.worker.attention.selection import Indices, Tokens, joined, tokens_of

SHARED_LEVELS = 2
"""Levels above the rows' own: each costs a kernel and a merge in every layer, deeper ones are short."""
LARGEST_TILE = 128


@dataclass(slots=True)
class Level:
    """G groups of neighbouring queries that read the same slots, as FlashInfer's page tables: see `Paged`."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_indices: Tensor


@dataclass(slots=True)
class Cascade:
    """`levels` over the step's `tokens`, in this order, the rows' own level last; `rest` are the rows that
    share nothing, and have none of these tokens."""

    tokens: Tokens
    levels: list[Level]
    rest: Indices


def spared_of(paged: Paged, worth: int, group: int) -> int:
    """How many reads of a position's K and V the cascade of a step spares; 0 where there is none.

    As `cascade_of`; nothing is done on the device.
    """
    ids, ends = _worthy(*_ranks(paged), worth, paged.counts * group)
    return sum(_saved(ids, ends, paged.counts * group))


def cascade_of(paged: Paged, worth: int, group: int) -> Cascade | None:
    """The cascade of a step; None unless a level spares `worth` reads of a position's K and V or more.

    `group`: query heads a KV head. What a level that is not worth it would have shared, deeper levels read
    with what is theirs.
    """
    ids, ends = _worthy(*_ranks(paged), worth, paged.counts * group)
    if not len(ids):
        return None
    seated = _fill(ids, ends) & (ends[-1] <= paged.starts)
    order = np.lexsort(ids[::-1])
    order = order[seated[order]]
    if not len(order):
        return None
    own = np.arange(len(seated))
    bounds = [np.zeros_like(ends[0]), *ends, paged.starts + paged.counts]
    levels = [
        _level(paged, order, group, begin, end)
        for group, begin, end in zip([*ids, own], bounds[:-1], bounds[1:], strict=True)
    ]
    return Cascade(tokens_of(paged, order), levels, np.flatnonzero(~seated))


def _ranks(paged: Paged) -> tuple[Int32s, Int32s]:
    """[ranks, rows]: the number of each row's first stretch, second stretch, ... (-1: none), and its end."""
    rows, shared = len(paged.starts), paged.shared.tolist()
    ids: list[Int32s] = []
    ends: list[Int32s] = []
    rank, covered = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    at = number = 0
    while at < len(shared):
        begin, end, count = shared[at : at + 3]
        members = np.array(shared[at + 3 : at + 3 + count])
        at += 3 + count
        own_rank = int(rank[members[0]])
        if (covered[members] != begin).any() or (rank[members] != own_rank).any():
            continue  # levels have no gaps: what follows one is not shared
        if own_rank == len(ids):
            ids.append(np.full(rows, -1, np.int32))
            ends.append(np.zeros(rows, np.int32))
        ids[own_rank][members], ends[own_rank][members] = number, end
        rank[members], covered[members] = own_rank + 1, end
        number += 1
    shape = (len(ids), rows)
    return np.array(ids, np.int32).reshape(shape), np.array(ends, np.int32).reshape(shape)


def _worthy(ids: Int32s, ends: Int32s, worth: int, queries: Int32s) -> tuple[Int32s, Int32s]:
    """The ranks that remain if the least of them goes while there are too many or it is not worth it."""
    while len(ids):
        saved = _saved(ids, ends, queries)
        if len(ids) <= SHARED_LEVELS and min(saved) >= worth:
            break
        least = saved.index(min(saved))
        ids, ends = np.delete(ids, least, 0), np.delete(ends, least, 0)
    return ids, ends


def _saved(ids: Int32s, ends: Int32s, queries: Int32s) -> list[int]:
    """How many reads of a position each rank spares, of rows with so many `queries` (tokens times query heads
    a KV head). Each tile of queries reads what it needs, and how large a tile is follows from the mean of
    all groups of a level, those of one row among them: many of these make a large group's reads many."""
    saved = []
    begins = np.zeros_like(queries)
    for group, end in zip(ids, ends, strict=True):
        members = np.flatnonzero(group >= 0)
        _, first, place = np.unique(group[members], return_index=True, return_inverse=True)
        together = np.bincount(place, queries[members]).astype(np.int64)
        alone = queries[(ids[0] >= 0) & (group < 0)]
        tile = tile_of(int(together.sum() + alone.sum()) // (len(together) + len(alone)))
        lengths = (end - begins)[members].astype(np.int64)
        apart = lengths * -(-queries[members] // LARGEST_TILE)
        saved.append(int(apart.sum() - (lengths[first] * -(-together // tile)).sum()))
        begins = end
    return saved


def tile_of(queries: int) -> int:
    """The tile that FlashInfer reads K and V for, where rows or groups have so many queries on the mean."""
    return next((size for size in (16, 64) if queries <= size), LARGEST_TILE)


def _fill(ids: Int32s, ends: Int32s) -> npt.NDArray[np.bool_]:
    """Give a row that shares at the first rank, but not at a later one, a position of its own there, in
    place: no group's KV may be empty. Returns which rows share at all."""
    alone = ids.max() + 1 + np.arange(ids.shape[1], dtype=np.int32)
    for rank in range(1, len(ids)):
        missing = ids[rank] < 0
        ids[rank] = np.where(missing, alone, ids[rank])
        ends[rank] = np.where(missing, ends[rank - 1] + 1, ends[rank])
    shares: npt.NDArray[np.bool_] = ids[0] >= 0
    return shares


def _level(paged: Paged, order: Indices, ids: Indices, begins: Indices, ends: Indices) -> Level:
    """The level at which the rows of `order` with the same number read the positions from begin to end."""
    numbers = ids[order]
    first = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    tokens = indptr_of(paged.counts[order]).numpy()
    readers = order[first]
    lengths = (ends - begins)[readers]
    places = paged.kv_indptr.numpy()[readers] + begins[readers]
    return Level(
        qo_indptr=torch.from_numpy(np.append(tokens[first], tokens[-1]).astype(np.int32)),
        kv_indptr=indptr_of(lengths),
        last_page_len=torch.ones(len(first), dtype=torch.int32),
        kv_indices=joined(paged.kv_indices, places, lengths),
    )
