"""How much output to expect of requests: room is kept for that, not for all that they may produce.

`ratio` of what a request may still produce is expected. It follows what ended requests produced of what they
were allowed. When rows had to be retracted, it was too low: it jumps to what the running rows show, and
comes back step by step. An error costs little either way: a retracted row is resumed from the cache.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

FIRST = 0.1
LEARNING = 0.05
"""Weight of the last request that ended."""
DECAY_STEPS = 600
"""Steps after which a jump is forgotten."""
LONGEST = 4096
"""Of more than so many tokens that a request may produce nothing is expected: it names no length."""
LEAST = 16
"""Tokens of output for which there is always to be room."""
AHEAD = 20
"""Tokens for each row beyond what they have produced, after a retraction."""

Int32s = npt.NDArray[np.int32]


class OutputEstimate:
    """`conservativeness` multiplies what is expected."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._factor = conservativeness
        self._learned = FIRST
        self._jump = 0.0

    @property
    def ratio(self) -> float:
        """The share of what a request may produce that it is expected to."""
        return min(1.0, self._factor * max(self._learned, self._jump))

    @overload
    def of(self, left: int) -> int: ...
    @overload
    def of(self, left: Int32s) -> Int32s: ...
    def of(self, left: Any) -> Any:
        """Tokens to keep room for, of a request or of each of several that may produce `left` more."""
        if isinstance(left, int):
            return min(max(int(min(left, LONGEST) * self.ratio), LEAST), max(left, 0))
        expected = np.maximum(np.minimum(left, LONGEST) * self.ratio, LEAST)
        return np.minimum(expected, np.maximum(left, 0)).astype(np.int32)

    def ended(self, produced: int, allowed: int) -> None:
        """A request has ended by itself."""
        if allowed > 0:
            self._learned += LEARNING * (min(1.0, produced / min(allowed, LONGEST)) - self._learned)

    def retracted(self, produced: Int32s, allowed: Int32s) -> None:
        """A row had to go: the running rows have produced so much of what they are allowed."""
        total = int(np.minimum(allowed, LONGEST).sum())
        if total > 0:
            self._jump = min(1.0, max(self._jump, (int(produced.sum()) + AHEAD * len(produced)) / total))

    def stepped(self) -> None:
        """A step has been planned."""
        self._jump = max(0.0, self._jump - 1 / DECAY_STEPS)
