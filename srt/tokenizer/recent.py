"""A bounded memory of names for a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable


class Recent:
    """Remembers each name for `seconds` after it was added, and at most `limit` of them, the newest."""

    def __init__(self, seconds: float, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._added: dict[str, float] = {}

    def add(self, name: str) -> None:
        self._added.pop(name, None)
        self._added[name] = self._clock()
        self._forget()

    def discard(self, name: str) -> bool:
        """Forget the name; whether it was remembered."""
        self._forget()
        return self._added.pop(name, None) is not None

    def __contains__(self, name: str) -> bool:
        self._forget()
        return name in self._added

    def __len__(self) -> int:
        return len(self._added)

    def _forget(self) -> None:
        oldest_kept = self._clock() - self._seconds
        while self._added:
            name = next(iter(self._added))
            if self._added[name] >= oldest_kept and len(self._added) <= self._limit:
                return
            del self._added[name]
