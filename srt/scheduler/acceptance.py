"""How likely the drafts of each source are kept: for a sequence, and over all that begin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

WEIGHT = 0.15
"""Of one token in a sequence's own rate."""
SHARED_WEIGHT = 0.02
"""Of one token in the rate with which sequences begin."""
FIRST_GAP = 32
MAX_GAP = 1024


class Source(IntEnum):
    """Where a draft comes from; the first that pays is taken.

    FORCED: the only text that the grammar allows. PATH: what the tree holds after the sequence's own tokens.
    SUFFIX: what came after the same few tokens in another sequence of the namespace. OWN: and in its own ids.
    """

    FORCED = 0
    PATH = 1
    SUFFIX = 2
    OWN = 3


FIRST_RATES = (1.0, 0.8, 0.6, 0.6)
LOWEST, HIGHEST = 0.02, 0.995


@dataclass(slots=True)
class Rates:
    """By source, the share of proposed tokens that are kept, given that those before them were."""

    of: list[float] = field(default_factory=lambda: list(FIRST_RATES))

    def saw(self, source: Source, kept: int, failed: bool, weight: float) -> None:
        """So many tokens in a row were kept, and the next one not, if it `failed`."""
        rate = 1.0 - (1.0 - self.of[source]) * (1.0 - weight) ** kept
        if failed:
            rate *= 1.0 - weight
        self.of[source] = min(max(rate, LOWEST), HIGHEST)


@dataclass(slots=True)
class Drafting:
    """One sequence's. `proposed` is its draft in flight, of this `source`. What was found but not proposed is
    `noted`, with the length at which it begins, and compared with what comes there: so rates change at no
    cost. After a draft that has given nothing there is none for `gap` tokens; forced text is proposed again
    from the length `forced_from` on."""

    rates: Rates
    proposed: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    source: Source = Source.FORCED
    gap: int = FIRST_GAP
    forced_from: int = 0
    noted: list[tuple[Source, Int32s]] = field(default_factory=list)
    noted_at: int = 0


def worthwhile(rate: float, least: float) -> int:
    """How many tokens of a draft are kept with a likelihood of at least `least`."""
    if rate <= least:
        return 0
    return int(math.log(least) / math.log(min(rate, HIGHEST)))


def expected(rate: float, count: int) -> float:
    """How many of `count` proposed tokens are kept, on average."""
    return count * rate if rate >= 1.0 else rate * (1.0 - rate**count) / (1.0 - rate)


def agreement(proposed: Int32s, actual: Int32s) -> tuple[int, bool]:
    """How many tokens at the start agree, and whether the next one, which is known, does not."""
    n = min(len(proposed), len(actual))
    differ = np.flatnonzero(proposed[:n] != actual[:n])
    return (int(differ[0]), True) if len(differ) else (n, False)
