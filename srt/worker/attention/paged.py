"""The KV of a step's rows as page tables of FlashInfer: page size 1, so that a page is a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Paged:
    """R rows, of which row i extends positions `starts[i]` on by `counts[i]` tokens.

    On the host, int32: `qo_indptr` [R + 1] over the step's tokens, `kv_indptr` [R + 1] over `kv_indices`,
    `last_page_len` [R] (all 1). On the device, int32: `kv_indices` [kv_indptr[R]], the slots of each row's
    positions 0 to starts + counts, one row's after the other's. `shared` as in `steps.Step`.
    """

    starts: Int32s
    counts: Int32s
    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_indices: Tensor
    shared: Int32s

    @property
    def decodes(self) -> bool:
        """Whether every row extends by one token."""
        return bool((self.counts == 1).all())


def indptr_of(counts: Int32s) -> Tensor:
    """int32 [R + 1] on the host: where each row's entries begin, and where the last one's end."""
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return torch.from_numpy(out)


def slots_of(slot_table: Tensor, rows: Tensor, kv_indptr: Tensor, total: int, out: Tensor) -> Tensor:
    """The first `total` of `out`, int32: the slots of the rows' positions, one row's after the other's.

    slot_table int32 [max_rows, positions]; rows int32 [R] and kv_indptr int32 [R + 1] on its device; total is
    kv_indptr[R]. Nothing is copied to the host.
    """
    lengths = kv_indptr[1:] - kv_indptr[:-1]
    first = rows.long() * slot_table.shape[1] - kv_indptr[:-1]
    base = torch.repeat_interleave(first, lengths, output_size=total)
    base += torch.arange(total, device=base.device)
    return torch.index_select(slot_table.view(-1), 0, base, out=out[:total])
