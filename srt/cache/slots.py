"""The KV slots that nobody uses: which ids are free, handed out in runs as long as can be had."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int32]
"""Slot ids, `[num_tokens]`."""


class SlotPool:
    """Slots 0 to `total` - 1, each either free or owned by exactly one taker.

    Free slots are kept as disjoint runs `[start, end)` in ascending order, never two that touch: run i
    is `_starts[i]` to `_ends[i]`. Every operation is a few numpy calls over the runs, so its time grows
    with how scattered the free slots are, and hardly with how many are taken or freed.
    """

    def __init__(self, total: int) -> None:
        assert 0 < total < 2**31, f"a pool of {total} slots"
        self.total = total
        self.num_free = total
        self._starts: SlotArray = np.zeros(1, np.int32)
        self._ends: SlotArray = np.full(1, total, np.int32)

    def allocate(self, n: int) -> SlotArray:
        """Take `n` slots, `[n]` in ascending order: the start of the lowest run that holds them all, else
        the lowest free slots. AssertionError if fewer than `n` are free.
        """
        assert 0 <= n <= self.num_free, f"{n} slots asked for, {self.num_free} free"
        if n == 0:
            return np.empty(0, np.int32)
        self.num_free -= n
        lengths = self._ends - self._starts
        fits = lengths >= n
        i = int(fits.argmax())
        if not fits[i]:
            return self._gather(n, lengths)
        start = int(self._starts[i])
        if lengths[i] == n:
            self._starts = np.concatenate((self._starts[:i], self._starts[i + 1 :]))
            self._ends = np.concatenate((self._ends[:i], self._ends[i + 1 :]))
        else:
            self._starts[i] = start + n
        return np.arange(start, start + n, dtype=np.int32)

    def free(self, slots: SlotArray) -> None:
        """Give `slots` back, in any order. AssertionError if one of them is free already, comes twice, or
        does not exist; nothing is freed then.
        """
        if len(slots) == 0:
            return
        ids = slots.copy()
        ids.sort()
        assert ids[0] >= 0, f"slot {ids[0]} is below 0"
        assert ids[-1] < self.total, f"slot {ids[-1]} is not below {self.total}"
        breaks = (ids[1:] - ids[:-1] != 1).nonzero()[0]
        starts = np.concatenate((self._starts, ids[:1], ids[1:][breaks]))
        ends = np.concatenate((self._ends, ids[breaks] + 1, ids[-1:] + 1))
        # Disjoint runs have their starts and their ends in the same order, so these may be sorted apart.
        starts.sort(kind="stable")  # merges sorted parts
        ends.sort(kind="stable")
        # Only runs that overlap can show a start below the end before it.
        assert bool((starts[1:] >= ends[:-1]).all()), f"a slot of {slots.tolist()} was freed twice"
        apart = starts[1:] != ends[:-1]
        self._starts = np.concatenate((starts[:1], starts[1:][apart]))
        self._ends = np.concatenate((ends[:-1][apart], ends[-1:]))
        self.num_free += len(ids)

    def free_slots(self) -> SlotArray:
        """All free ids, ascending."""
        return _expand(self._starts, self._ends - self._starts)

    def _gather(self, n: int, lengths: SlotArray) -> SlotArray:
        total = lengths.cumsum()
        whole = int(total.searchsorted(n))
        take = lengths[: whole + 1].copy()
        take[whole] -= int(total[whole]) - n
        taken = _expand(self._starts[: whole + 1], take)
        self._starts[whole] += take[whole]
        whole += int(self._starts[whole] == self._ends[whole])
        self._starts = self._starts[whole:].copy()
        self._ends = self._ends[whole:].copy()
        return taken


def _expand(starts: SlotArray, lengths: SlotArray) -> SlotArray:
    """The ids of runs, one run after the other."""
    before = lengths.cumsum() - lengths
    ids = np.arange(int(lengths.sum()), dtype=np.int32) + np.repeat(starts - before, lengths)
    return ids.astype(np.int32)
