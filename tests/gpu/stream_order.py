"""Which work of a device's streams is known to have ended: a vector clock for each, and for the host."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import sapwood.srt.messages

DEFAULT, COMPUTE, PLAN, COPY = "default", "compute", "plan", "copy"
ROOT = Path(sapwood.srt.messages.__file__).parents[1]
SOURCES = str(ROOT / "srt"), str(ROOT / "kernels")
"""Where the code lies whose lines are told."""

Clock = dict[str, int]
"""Of each stream, how many of its operations have ended."""


@dataclass(frozen=True, slots=True)
class Stream:
    name: str


class Access(NamedTuple):
    """One operation's: the `time`-th of its stream."""

    stream: str
    time: int
    where: tuple[str, ...]

    def ended(self, *clocks: Clock) -> bool:
        """Whether any of these knows it to have ended."""
        return any(clock.get(self.stream, 0) >= self.time for clock in clocks)

    def __str__(self) -> str:
        return f"{self.stream} ({' < '.join(self.where)})"


class Order:
    """What each stream and the host know to have ended before what they do next. `current`: the name of the
    stream that is launched on."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.current = DEFAULT
        self._streams: dict[str, Clock] = {}

    def of(self, stream: str) -> Clock:
        return self._streams.setdefault(stream, {})

    def launch(self) -> Access:
        """One more operation, behind all that the host has waited for by now."""
        clock = self.of(self.current)
        _learn(clock, self.host)
        clock[self.current] = clock.get(self.current, 0) + 1
        return Access(self.current, clock[self.current], where())

    def recorded(self, stream: str) -> Clock:
        """All that has ended once what the stream has been given so far has."""
        _learn(self.of(stream), self.host)
        return dict(self.of(stream))

    def stream_waits(self, stream: str, clock: Clock) -> None:
        _learn(self.of(stream), clock)

    def host_waits(self, clock: Clock) -> None:
        """Other threads' waits tell the main thread nothing."""
        if threading.current_thread() is threading.main_thread():
            _learn(self.host, clock)

    def host_waits_for_all(self) -> None:
        for clock in self._streams.values():
            self.host_waits(clock)


def _learn(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def where() -> tuple[str, ...]:
    """The innermost lines of the runtime."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if name.startswith(SOURCES):
            found.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)
