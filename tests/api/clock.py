"""The time of a server's loop, which passes only when a test says so: nothing is late on a busy machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Clock:
    """What `loop.time()` is, and so what all of the loop's timers go by."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = loop.time()

    def __call__(self) -> float:
        return self._now

    def passes(self, seconds: float) -> None:
        """Callable from any thread. What is due by then happens soon."""
        self._now += seconds
        self._loop.call_soon_threadsafe(lambda: None)


@contextlib.contextmanager
def stopped(loop: asyncio.AbstractEventLoop) -> Iterator[Clock]:
    """The loop's time stands still, as far as nobody lets it pass. Afterwards it goes on from there."""
    real, clock = loop.time, Clock(loop)
    loop.time = clock  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        ahead = max(0.0, clock() - real())
        loop.time = lambda: real() + ahead  # type: ignore[method-assign]
        loop.call_soon_threadsafe(lambda: None)
