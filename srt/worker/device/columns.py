"""What the device keeps of each row between steps: its slots, its last sampled token, what it has had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.kernels.ops.device_changes import Seen
from sapwood.srt.worker.device.transfer import Pinned, upload
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


class DeviceColumns:
    """The columns of a TokenPool that the device writes or reads by itself; of the same rows.

    `last` int32 [capacity], `slot_table` int32 [capacity, max_tokens + 1]. How a row samples stays on the
    host, which sends a step what its rows need with the step. Rows with penalties have an entry in
    `seen`, 5 bytes a token of the vocabulary; entries are made when they are needed, and stay.
    """

    def __init__(self, pool: TokenPool, device: torch.device, pinned: Pinned) -> None:
        capacity = len(pool.last)
        self.last = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.slot_table = torch.zeros(pool.slot_table.shape, dtype=torch.int32, device=device)
        self.device = device
        self.entries: npt.NDArray[np.int64] = np.full(capacity, -1, dtype=np.int64)
        """Of each row its entry in `seen`; -1: it has no penalties."""
        self.seen = Seen(*(torch.zeros((0, 0), dtype=d, device=device) for d in (torch.int32, torch.uint8)))
        self._free: list[int] = []
        self._pool = pool
        self._pinned = pinned

    def seat(self, row: int, prefix: Int32s) -> None:
        """The slots of a row's first positions. On the stream that reads the slot table."""
        if len(prefix):
            sent = upload({"prefix": prefix}, self.device, self._pinned)
            self.slot_table[row, : len(prefix)].copy_(sent["prefix"])

    def inputs(self, ids: Tensor, owner: Tensor) -> None:
        """Put each row's last token where its id is -1; ids, owner (the rows) int32 [n] on the device."""
        ids.copy_(torch.where(ids < 0, self.last.index_select(0, owner), ids))

    def release(self, rows: Int32s) -> None:
        """Forget rows that have been given up."""
        counted = rows[self.entries[rows] >= 0]
        self._free += self.entries[counted].tolist()
        self.entries[counted] = -1

    def admit(self, rows: Sequence[int]) -> None:
        """Begin to count for those rows, just admitted to the pool, that have penalties. From now on their
        counts are the device's: the host's are given up. On the stream that samples."""
        self.release(np.array(rows, dtype=np.int32))
        for row in rows:
            change = self._pool.changes.get(row)
            if change is None or change.prompt_seen is None or change.output_counts is None:
                continue
            entry = self.entries[row] = self._entry(len(change.output_counts))
            history: dict[str, npt.NDArray[Any]] = {
                "counts": change.output_counts,
                "prompt": change.prompt_seen,
            }
            sent = upload(history, self.device, self._pinned)
            self.seen.counts[entry].copy_(sent["counts"])
            self.seen.prompt[entry].copy_(sent["prompt"])
            change.output_counts = change.prompt_seen = None
            self._pool.change[row] = change.fields

    def _entry(self, vocab: int) -> int:
        """A free entry; if there is none, twice as many are made."""
        if not self._free:
            have = self.seen.counts.shape[0]
            more = min(max(4, have), len(self.entries) - have)
            self.seen = Seen(_longer(self.seen.counts, more, vocab), _longer(self.seen.prompt, more, vocab))
            self._free += range(have, have + more)
        return self._free.pop()


def _longer(table: Tensor, more: int, vocab: int) -> Tensor:
    result = table.new_zeros((table.shape[0] + more, vocab))
    if table.numel():
        result[: table.shape[0]].copy_(table)
    return result
