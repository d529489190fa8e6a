"""Where drafts are looked up: in the sequence's own ids, and in what others of its namespace have said."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

SUFFIX = 4
"""So many last tokens are to be found again in another sequence."""
OWN_SUFFIX = (4, 3)
"""In its own ids: as many, or else as few."""
OWN_WINDOW = 16_384
"""Last ids of a sequence that are searched."""
MAX_IDS = 65_536
"""Last ids that are kept of a namespace."""
MAX_NAMESPACES = 32

_NONE = np.empty(0, np.int32)
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], dtype=np.uint32)


def own(ids: Int32s, most: int) -> Int32s:
    """What came after the last few of `ids` when they came before, the last time: `most` tokens, or none. If
    that overlaps them, they are a period, which goes on."""
    ids = ids[-OWN_WINDOW:]
    longest, shortest = OWN_SUFFIX
    if len(ids) <= shortest:
        return _NONE
    places = np.flatnonzero(ids[shortest - 1 : -1] == ids[-1]) + shortest - 1
    for back in range(1, longest):
        fits = places[(places >= back) & (ids[places - back] == ids[-1 - back])]
        if not len(fits):
            if back < shortest:
                return _NONE
            break
        places = fits
    return np.resize(ids[int(places[-1]) + 1 :], most)


class Recent:
    """The output of sequences that ended lately, by namespace; a namespace finds its own only."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _Said] = OrderedDict()

    def add(self, namespace: str, ids: Int32s) -> None:
        """A sequence of the namespace has ended; `ids` begin a few tokens before its output."""
        if len(ids) <= SUFFIX:
            return
        said = self._of.setdefault(namespace, _Said())
        self._of.move_to_end(namespace)
        said.add(ids[-MAX_IDS // 2 :])
        if len(self._of) > MAX_NAMESPACES:
            self._of.popitem(last=False)

    def after(self, namespace: str, last: Int32s, most: int) -> Int32s:
        """What came after the SUFFIX tokens `last`, when they last came in an output of the namespace: at
        most `most` tokens, or none."""
        said = self._of.get(namespace)
        return said.after(last, most) if said is not None and len(last) == SUFFIX else _NONE

    def clear(self) -> None:
        """Forget everything."""
        self._of.clear()


class _Said:
    """Ids one after the other, and where each few of them came last, by a hash: what is found is compared."""

    def __init__(self) -> None:
        self._ids = np.empty(2048, np.int32)
        self._size = 0
        self._places = np.zeros(4096, np.int32)

    def add(self, ids: Int32s) -> None:
        if self._size + len(ids) > len(self._ids):
            self._make_room(len(ids))
        begin = max(self._size - SUFFIX + 1, 0)
        self._ids[self._size : self._size + len(ids)] = ids
        self._size += len(ids)
        self._note(begin)

    def after(self, last: Int32s, most: int) -> Int32s:
        place = int(self._places[_hashes(last)[0] % len(self._places)])
        if place == 0 or not np.array_equal(self._ids[place - SUFFIX : place], last):
            return _NONE
        return self._ids[place : min(place + most, self._size)].copy()

    def _make_room(self, more: int) -> None:
        """Twice as large, or without its older half."""
        kept = self._ids[: self._size]
        size = len(self._ids)
        while size < MAX_IDS and size < self._size + more:
            size *= 2
        if self._size + more > size:
            kept = kept[-(MAX_IDS // 2) :]
        self._ids = np.empty(size, np.int32)
        self._places = np.zeros(2 * size, np.int32)
        self._ids[: len(kept)] = kept
        self._size = len(kept)
        self._note(0)

    def _note(self, begin: int) -> None:
        """Remember the places of all that ends after index `begin`."""
        ids = self._ids[begin : self._size]
        if len(ids) >= SUFFIX:
            ends = np.arange(begin + SUFFIX, self._size + 1, dtype=np.int32)
            self._places[_hashes(ids) % len(self._places)] = ends


def _hashes(ids: Int32s) -> npt.NDArray[np.uint32]:
    """A hash of each SUFFIX ids in a row."""
    values = ids.astype(np.uint32)
    n = len(values) - SUFFIX + 1
    mixed = np.zeros(n, np.uint32)
    for i in range(SUFFIX):
        mixed = (mixed ^ (values[i : i + n] * _ODD[i])) * np.uint32(0x01000193)
    return mixed ^ (mixed >> np.uint32(15))
