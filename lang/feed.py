"""Text and values that come later: any number of threads and event loops may wait for them.

What waits is written once, as a generator that yields the futures to wait for (`Waiting`); `blocking` and
`awaiting` run it in a thread and on an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from sapwood.lang.where import as_one

T = TypeVar("T")

Changed = Future[None]
Waiting = Generator[Changed, None, T]
Reading = Generator[Changed | str, None, None]


class Signal:
    """Wakes all who wait. Take `next` before looking at what it tells of, then wait if there is nothing."""

    __slots__ = ("_future", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._future: Changed | None = None

    def next(self) -> Changed:
        with self._lock:
            if self._future is None:
                self._future = Future()
                # It wakes several: one of them that is cancelled must not cancel it for the others.
                self._future.set_running_or_notify_cancel()
            return self._future

    def wake(self) -> None:
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            future.set_result(None)


class Feed:
    """Text that comes in pieces, and its end: an error, or none."""

    __slots__ = ("_signal", "ended", "error", "pieces")

    def __init__(self, text: str = "") -> None:
        self.pieces = [text] if text else []
        self.ended = False
        self.error: BaseException | None = None
        self._signal = Signal()

    def add(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self._signal.wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more; after the first time it does nothing."""
        if not self.ended:
            self.error, self.ended = error, True
            self._signal.wake()

    def text(self) -> str:
        """All that has come."""
        return "".join(self.pieces)

    def over(self) -> Waiting[None]:
        """Waits for the end. Does not raise its error."""
        while not self.ended:
            changed = self._signal.next()
            if not self.ended:
                yield changed

    def read(self) -> Reading:
        """The pieces from the first on. Does not raise the error."""
        place = 0
        while True:
            changed, ended = self._signal.next(), self.ended
            while place < len(self.pieces):
                place += 1
                yield self.pieces[place - 1]
            if ended:
                return
            if not self.ended and place == len(self.pieces):
                yield changed


class Cell(Feed):
    """A variable: the text of it as it comes, and at its end its value."""

    __slots__ = ("meta", "value")

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None
        self.meta: Any = None

    def set(self, value: Any, meta: Any = None) -> None:
        self.value, self.meta = value, meta
        self.end()

    def errors(self) -> list[BaseException]:
        """All that its end tells of."""
        return [] if self.error is None else [self.error]


class Gathered(Cell):
    """A list of the values of others, in order. The first error among them is its own, with notes of the
    others."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Cell]) -> None:
        super().__init__()
        self.parts = parts

    def over(self) -> Waiting[None]:
        for part in self.parts:
            yield from part.over()
        if self.ended:
            return
        error = as_one(self.errors())
        if error is None:
            self.value, self.meta = [part.value for part in self.parts], [part.meta for part in self.parts]
        self.end(error)

    def errors(self) -> list[BaseException]:
        return [error for part in self.parts for error in part.errors()]

    def read(self) -> Reading:
        yield from self.over()


def known(value: Any) -> Cell:
    """A variable whose value is there."""
    cell = Cell()
    if isinstance(value, str):
        cell.add(value)
    cell.set(value)
    return cell


class Names:
    """The variables of a state by name. A name may be there before its value; `closed`: no more will come."""

    __slots__ = ("_signal", "cells", "closed", "error")

    def __init__(self, cells: dict[str, Cell] | None = None) -> None:
        self.cells = dict(cells or {})
        self.closed = False
        self.error: BaseException | None = None
        self._signal = Signal()

    def __setitem__(self, name: str, cell: Cell) -> None:
        self.cells[name] = cell
        self._signal.wake()

    def close(self, error: BaseException | None = None) -> None:
        self.error, self.closed = error, True
        self._signal.wake()

    def expect(self, name: str) -> Waiting[Cell]:
        """Waits until the program has come to this variable. Raises KeyError, or the program's error, if it
        ends without."""
        while True:
            changed, closed = self._signal.next(), self.closed
            if name in self.cells:
                return self.cells[name]
            if closed:
                raise self.error or KeyError(name)
            if not self.closed:
                yield changed


def blocking(waiting: Waiting[T], may_wait: Callable[[], None]) -> T:
    """Wait in this thread; `may_wait` raises if it must not."""
    while True:
        try:
            changed = next(waiting)
        except StopIteration as done:
            value: T = done.value
            return value
        may_wait()
        changed.result()


async def awaiting(waiting: Waiting[T]) -> T:
    """Wait on the running loop."""
    while True:
        try:
            changed = next(waiting)
        except StopIteration as done:
            value: T = done.value
            return value
        await asyncio.wrap_future(changed)


def reading(pieces: Reading, may_wait: Callable[[], None]) -> Iterator[str]:
    """The pieces, in this thread; `may_wait` raises if it must not wait."""
    for piece in pieces:
        if isinstance(piece, str):
            yield piece
        else:
            may_wait()
            piece.result()


async def reading_async(pieces: Reading) -> AsyncIterator[str]:
    """The pieces, on the running loop."""
    for piece in pieces:
        if isinstance(piece, str):
            yield piece
        else:
            await asyncio.wrap_future(piece)
