"""Which rows of a step have the same tokens in the same slots: attention reads those once for all of them.

    positions   0 ................ 512 ........ 768
    row 0       ━━━━━━━━━━━━━━━━━━━┯━━━━━━━━━━━━┯───────     [0, 512) of rows 0 to 3
    row 1                          │            └─────────   [512, 768) of rows 0 and 1
    row 2                          └━━━━━━━━━━━━┯────────    [512, 768) of rows 2 and 3
    row 3                                       └───────

Slots are compared, not paths or ids: a row that computed what another had put into the tree meanwhile has its
own slots in the midst of the path. A row never gets other slots for what it has, and it shares at most what
it or another was seated with. So stretches change only with the rows of the step. Rows are kept sorted by
their slots as long as they are seated, though with drafts they are in every second step only; and only those
that come and go are looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.cache.radix import common_prefix
from sapwood.srt.scheduler.rows import Rows

Int32s = npt.NDArray[np.int32]

TILE = 64
"""Stretches begin and end at its multiples: the positions that attention works on at a time, and so merges
alike whoever shares them. One tile of two rows is worth a stretch: to name it costs less than to read it."""
SETS = 2
"""Sets of rows whose stretches are kept: rows that carry drafts are in every second step."""


class SharedPrefixes:
    """The stretches of steps; those of the last SETS sets of rows are kept, for steps of the same to come."""

    def __init__(self) -> None:
        self._stretches: OrderedDict[bytes, bytes] = OrderedDict()
        """By the seats of a step's rows."""
        self._sorted: list[tuple[bytes, int]] = []
        """The slots of each row's prompt, in whole tiles as far as they were computed, and the row."""
        self._common: list[int] = []
        """How many tiles each of these has in common with the next (the last one: 0)."""
        self._keys: dict[int, bytes] = {}
        self._known = np.empty((3, 0), np.int64)
        """By row: whether it is in the list, and the order and the end that it is in the list with."""

    def of(self, rows: Rows, members: npt.NDArray[np.integer], starts: Int32s) -> bytes:
        """`Step.shared` for a step of the rows `members` with their first new positions `starts`.

        What two rows share, they share in one stretch after another from position 0 on, each with all that
        share it, and in this order in the message.
        """
        seats = rows.order[members].tobytes()  # a number for each time that a row is given away
        stretches = self._stretches.get(seats)
        if stretches is None:
            self._follow(rows, members, starts)
            stretches = self._stretches[seats] = self._find(members)
            if len(self._stretches) > SETS:
                self._stretches.popitem(last=False)
        else:
            self._stretches.move_to_end(seats)
        return stretches

    def _follow(self, rows: Rows, members: npt.NDArray[np.integer], starts: Int32s) -> None:
        """Bring the sorted rows up to date: those that are seated and have been in a step."""
        if self._known.shape[1] != rows.capacity:
            self._known = np.zeros((3, rows.capacity), np.int64)
        # What a row has not computed before the step is not shared, whatever is in its columns.
        ends = np.minimum(starts, rows.prompt_end[members]) // TILE * TILE
        now = self._known.copy()
        now[0] *= rows.active & (now[1] == rows.order)
        now[:, members] = np.ones_like(ends), rows.order[members], ends
        changed = (now != self._known).any(axis=0)
        for row in np.flatnonzero(changed & (self._known[0] != 0)).tolist():
            self._forget(row)
        for row in np.flatnonzero(changed & (now[0] != 0)).tolist():
            self._add(rows.slots[row, : now[2, row]].tobytes(), row)
        self._known = now

    def _add(self, key: bytes, row: int) -> None:
        self._keys[row] = key
        place = bisect_left(self._sorted, (key, row))
        if place:
            self._common[place - 1] = _common_tiles(self._sorted[place - 1][0], key)
        after = _common_tiles(key, self._sorted[place][0]) if place < len(self._sorted) else 0
        self._sorted.insert(place, (key, row))
        self._common.insert(place, after)

    def _forget(self, row: int) -> None:
        place = bisect_left(self._sorted, (self._keys.pop(row), row))
        del self._sorted[place]
        after = self._common.pop(place)
        if place:
            self._common[place - 1] = min(self._common[place - 1], after)

    def _find(self, members: npt.NDArray[np.integer]) -> bytes:
        """The stretches of the sorted rows that are `members`: those between which all neighbours have enough
        in common."""
        place = np.full(self._known.shape[1], -1, np.int64)
        place[members] = np.arange(len(members))
        indices: list[int] = []
        common: list[int] = []
        for index, tiles in zip(place[[row for _, row in self._sorted]].tolist(), self._common, strict=True):
            if index >= 0:
                indices.append(index)
                common.append(tiles)
            elif common:
                common[-1] = min(common[-1], tiles)
        found: list[list[int]] = []
        within: list[tuple[int, int]] = []  # tiles that all from a row on have in common, and that row
        last = -1
        for i, tiles in enumerate(common):
            if tiles == last:
                continue  # as with the neighbour before, so with this one
            first, last = i, tiles
            while within and within[-1][0] > tiles:
                end, first = within.pop()
                begin = max(tiles, within[-1][0] if within else 0)
                shared_by = sorted(indices[first : i + 1])
                found.append([begin * TILE, end * TILE, len(shared_by), *shared_by])
            if tiles > (within[-1][0] if within else 0):
                within.append((tiles, first))
        # What holds for more rows was found later, and comes first.
        return messages.pack([value for stretch in reversed(found) for value in stretch])


def _common_tiles(a: bytes, b: bytes) -> int:
    if a[: 4 * TILE] != b[: 4 * TILE] or len(a) < 4 * TILE:
        return 0
    same = len(a) // 4 if a == b else common_prefix(a, b)
    return same // TILE
