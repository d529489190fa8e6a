"""Which rows of a step have the same tokens in the same slots: attention reads those once for all of them.

    positions   0 ................ 512 ........ 768
    row 0       ━━━━━━━━━━━━━━━━━━━┯━━━━━━━━━━━━┯───────     [0, 512) of rows 0 to 3
    row 1                          │            └─────────   [512, 768) of rows 0 and 1
    row 2                          └━━━━━━━━━━━━┯────────    [512, 768) of rows 2 and 3
    row 3                                       └───────

Slots are compared, not paths or ids: a row that computed what another had put into the tree meanwhile has its
own slots in the midst of the path. A row never gets other slots for what it has, and it shares at most what
it was seated with. So stretches change only with the rows of the step.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.cache.radix import common_prefix
from sapwood.srt.scheduler.rows import Rows

Int32s = npt.NDArray[np.int32]

TILE = 64
"""Stretches begin and end at its multiples: the positions that attention works on at a time, and so merges
alike whoever shares them. One tile of two rows is worth a stretch: to name it costs less than to read it."""


class SharedPrefixes:
    """The stretches of steps; those of the last one are kept, for steps of the same rows to come."""

    def __init__(self) -> None:
        self._seated = b""
        self._stretches = b""

    def of(self, rows: Rows, members: npt.NDArray[np.integer], starts: Int32s) -> bytes:
        """`Step.shared` for a step of the rows `members` with their first new positions `starts`.

        What two rows share, they share in one stretch after another from position 0 on, each with all that
        share it, and in this order in the message.
        """
        seated = rows.order[members].tobytes()  # a number for each time that a row is given away
        if seated != self._seated:
            self._seated = seated
            self._stretches = _find(rows, members, starts)
        return self._stretches


def _find(rows: Rows, members: npt.NDArray[np.integer], starts: Int32s) -> bytes:
    if len(members) < 2:
        return b""
    tiles = min(int(rows.seated[members].max()), int(np.partition(starts, -2)[-2])) // TILE
    if tiles == 0:
        return b""
    # What a row has not computed before the step is not shared, whatever is in its columns.
    ends = np.minimum(starts // TILE, tiles) * TILE
    keys = [rows.slots[row, :end].tobytes() for row, end in zip(members, ends, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = [_common_tiles(keys[a], keys[b]) for a, b in pairwise(order)]
    return _stretches(np.array(order), np.array(common))


def _common_tiles(a: bytes, b: bytes) -> int:
    same = len(a) // 4 if a == b else common_prefix(a, b)
    return same // TILE


def _stretches(order: npt.NDArray[np.int_], common: npt.NDArray[np.int_]) -> bytes:
    """The stretches of rows that are sorted by their slots, the i-th of which has its first `common[i]` tiles
    in common with the next."""
    parts: list[npt.NDArray[np.int_]] = []
    spans = [(0, len(order), 0)]
    while spans:
        low, high, begin = spans.pop()
        between = common[low : high - 1]
        end = int(between.min())
        if end > begin:
            parts += [np.array([begin * TILE, end * TILE, high - low]), np.sort(order[low:high])]
        cuts = [low, *(low + 1 + np.flatnonzero(between == end)).tolist(), high]
        spans += [(first, last, end) for first, last in pairwise(cuts) if last - first > 1]
    return messages.pack(np.concatenate(parts)) if parts else b""
