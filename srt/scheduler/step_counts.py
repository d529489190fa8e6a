"""The positions that steps compute, by program, in numpy columns: a plain decode step runs no Python for each
row or program, whoever its rows are of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler.rows import Rows

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_INDEX = (1 << 32) - 1
"""The low bits of a number are its program's place in the columns, which others have had before."""


class Part(NamedTuple):
    """Of a step in flight, whose its rows are (0: of no program), where they extend from, where their prompts
    end, and up to where they had been computed before; one entry a row each."""

    numbers: Int64s
    starts: Int32s
    prompts: Int32s
    known: Int32s


class Positions(NamedTuple):
    """Computed positions of prompts and of outputs, those of both that had been computed before, and those of
    drafts."""

    prompts: int
    outputs: int
    again: int
    drafts: int


class StepCounts:
    """Hands out the programs' numbers, none of them twice, and counts for those that are `open`."""

    def __init__(self) -> None:
        self._numbers: Int64s = np.zeros(64, dtype=np.int64)
        """By place, the number that is open there. Place 0 is nobody's."""
        self._sums: Int64s = np.zeros((4, 64), dtype=np.int64)
        """What Positions says, by place."""
        self._free = list(range(63, 0, -1))
        self._opened = 0

    def open(self) -> int:
        """The number of a new program."""
        if not self._free:
            size = len(self._numbers)
            self._numbers = np.pad(self._numbers, (0, size))
            self._sums = np.pad(self._sums, ((0, 0), (0, size)))
            self._free = list(range(2 * size - 1, size - 1, -1))
        place = self._free.pop()
        self._opened += 1
        self._numbers[place] = number = self._opened << 32 | place
        return number

    def close(self, number: int) -> None:
        """Nobody asks for it any more; what of it is in flight yet is not counted."""
        place = number & _INDEX
        self._numbers[place] = 0
        self._sums[:, place] = 0
        self._free.append(place)

    def part(self, rows: Rows, of: Int32s, starts: Int32s) -> Part | None:
        """What is to be known of a step's rows when it is taken in; None if they are of no program."""
        numbers = rows.program[of]
        return Part(numbers, starts, rows.prompt[of], rows.known[of]) if numbers.any() else None

    def add(self, part: Part, ends: Int32s, drafts: Int32s | None) -> None:
        """A step has extended its rows up to `ends`, which includes drafts."""
        plain = ends if drafts is None else ends - drafts
        prompts = np.maximum(np.minimum(plain, part.prompts) - part.starts, 0)
        again = np.maximum(np.minimum(plain, part.known) - part.starts, 0)
        places = part.numbers & _INDEX
        places[self._numbers[places] != part.numbers] = 0  # forgotten since
        kinds = (prompts, plain - part.starts - prompts, again, drafts)
        for sums, each in zip(self._sums, kinds, strict=True):
            if each is not None and each.any():
                np.add.at(sums, places, each.astype(np.int64))  # of one dtype it is many times as fast

    def take(self, number: int) -> Positions:
        """What has been counted for an open number since it was last taken."""
        sums = self._sums[:, number & _INDEX]
        positions = Positions(*sums.tolist())
        sums[:] = 0
        return positions
