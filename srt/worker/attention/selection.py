"""Some of a step's rows as a step of their own: their page tables, and which of its tokens are theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.srt.worker.attention.paged import Paged, indptr_of

Indices = npt.NDArray[np.integer[Any]]
Tokens = slice | Tensor
"""A stretch of the step's tokens, or their indices: int64 [m] on the device."""


def select(paged: Paged, rows: Indices) -> Paged:
    """The rows `rows` of a step, in this order, without what they share; the step itself if it is all."""
    if len(rows) == len(paged.starts) and (np.diff(rows) == 1).all():
        return paged
    starts, counts = paged.starts[rows], paged.counts[rows]
    first = paged.kv_indptr.numpy()[rows]
    return Paged(
        starts=starts,
        counts=counts,
        qo_indptr=indptr_of(counts),
        kv_indptr=indptr_of(starts + counts),
        last_page_len=paged.last_page_len[: len(rows)],
        kv_indices=joined(paged.kv_indices, first, starts + counts),
        shared=paged.shared[:0],
    )


def tokens_of(paged: Paged, rows: Indices) -> Tokens:
    """The tokens of the rows `rows`, one row's after the other's: a slice where they stand like this."""
    bounds = paged.qo_indptr.numpy()
    if (np.diff(rows) == 1).all():
        return slice(int(bounds[rows[0]]), int(bounds[rows[-1] + 1]))
    return _runs(bounds[rows], paged.counts[rows], paged.kv_indices.device)


def joined(values: Tensor, first: Indices, lengths: Indices) -> Tensor:
    """Stretches of `values`, one after the other: stretch i has `lengths[i]` entries from `first[i]` on.

    Only the two arrays of the host go to the device; nothing comes from there. Nothing is copied where the
    stretches are one.
    """
    if (first[1:] == (first + lengths)[:-1]).all():
        return values[int(first[0]) : int(first[-1] + lengths[-1])]
    return values.index_select(0, _runs(first, lengths, values.device))


def _runs(first: Indices, lengths: Indices, device: torch.device) -> Tensor:
    """int64 on the device: first[0], first[0] + 1, ..., then from first[1] on, and so on."""
    total = int(lengths.sum())
    table = np.stack([first - (np.cumsum(lengths) - lengths), lengths]).astype(np.int64)
    offset, repeats = torch.from_numpy(table).to(device, non_blocking=True)
    runs = torch.repeat_interleave(offset, repeats, output_size=total)
    runs += torch.arange(total, device=device)
    return runs
