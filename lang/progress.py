"""How far a batch is, on a terminal."""

from __future__ import annotations

import sys

_WIDTH = 32


class Bar:
    """A line on standard error, if somebody sees it and wants it."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._total, self._done = total, 0
        self._shown = wanted and total > 0 and sys.stderr.isatty()
        self._draw()

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        self._draw()

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def _draw(self) -> None:
        if self._shown:
            full = _WIDTH * self._done // self._total
            sys.stderr.write(f"\r{'#' * full}{'.' * (_WIDTH - full)} {self._done}/{self._total}")
            sys.stderr.flush()
