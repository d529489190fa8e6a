"""A virtual clock, and channels on which messages take time but keep their order."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Clock:
    """What is to happen, in order of time, and at one time in the order in which it was said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._said = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """`action` happens at `when`, or now if that is over."""
        self._said += 1
        heapq.heappush(self._events, (max(when, self.now), self._said, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def next(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        self.happened += 1
        action()
        return True


class Channel:
    """Hands everything to `receive` in the order in which it was sent, each after a random delay."""

    def __init__(
        self, clock: Clock, rng: random.Random, delay: float, receive: Callable[[Any], None]
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._delay = delay
        self._receive = receive
        self._last = 0.0

    def send(self, message: Any) -> None:
        arrives = self._clock.now + self._rng.expovariate(1 / self._delay)
        self._last = max(self._last, arrives)
        self._clock.at(self._last, lambda: self._receive(message))
