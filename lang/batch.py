"""Many runs of one program side by side, after what they all begin with was computed once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sapwood.lang.backend import Backend, Fill, Segments
from sapwood.lang.defaults import backend_of
from sapwood.lang.errors import Unsupported
from sapwood.lang.feed import Cell, blocking
from sapwood.lang.ir import Generation, Selection
from sapwood.lang.line import Cancelled
from sapwood.lang.loop import background
from sapwood.lang.ops import generate, score
from sapwood.lang.options import defaults_of
from sapwood.lang.progress import Bar
from sapwood.lang.run import end
from sapwood.lang.state import State
from sapwood.lang.trace import prefix_of, refuse

if TYPE_CHECKING:
    from sapwood.lang.program import _Program

Item = Mapping[str, Any] | Sequence[Any]


class Batch:
    """Checks the arguments of all items, and finds their common prefix, before anything runs."""

    def __init__(
        self,
        program: _Program,
        items: Sequence[Item],
        limit: int | str,
        progress_bar: bool,
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(items, (list, tuple)):
            raise TypeError(f"batch_kwargs must be a list or a tuple, got {type(items).__name__}")
        refuse()
        self._limit = _limit(limit)
        self._program = program
        self._options = options
        self._progress_bar = progress_bar
        self._backend = backend_of(options.get("backend")) if items else None
        self._arguments = [self._arguments_of(i, item) for i, item in enumerate(items)]
        self._host = background()
        self._host.may_wait()
        self._prefix: Segments = ()
        if self._backend is not None and len(items) > 1:
            self._prefix = self._traced(self._backend)
        self._cells = [Cell() for _ in items]
        self._left = False
        """Before it began, by an interrupt."""

    def _traced(self, backend: Backend) -> Segments:
        """What the first and the last item begin with, and the others most likely too: the program's own code
        is run for a trace, so it is not for each. Raises Unsupported if the backend cannot do what is asked
        of it first; where nothing can be filled, a trace is for that alone.
        """
        defaults = defaults_of(self._options)

        def check(part: Generation | Selection, segments: Segments) -> None:
            if isinstance(part, Generation):
                backend.check(generate(part, segments, defaults))
            else:
                backend.check(score(part, segments))

        (_, first), *_others, (_, last) = self._arguments
        try:
            backend.check(Fill(segments=()))
        except Unsupported:
            prefix_of(self._program.func, [first], check)
            return ()
        return prefix_of(self._program.func, [first, last], check)

    def _arguments_of(self, number: int, item: Item) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return self._program.arguments((), self._named(number, item))
        except TypeError as e:
            e.add_note(f"item {number} of batch_kwargs")
            raise

    def _named(self, number: int, item: Item) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        names = self._program.arg_names
        if isinstance(item, str) or len(item) > len(names):
            raise TypeError(
                f"item {number} of batch_kwargs must be a dict, or at most {len(names)} values in order"
            )
        return dict(zip(names, item, strict=False))

    def all(self) -> list[State]:
        """The states. All items have finished when the first error is raised."""
        with self._running():
            for cell in self._cells:
                blocking(cell.over(), self._host.may_wait)
        for number, cell in enumerate(self._cells):
            _raise(cell, number)
        return [cell.value for cell in self._cells]

    def one_by_one(self) -> Iterator[State]:
        """The states, each as soon as it and those before it are there."""
        with self._running():
            for number, cell in enumerate(self._cells):
                blocking(cell.over(), self._host.may_wait)
                _raise(cell, number)
                yield cell.value

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Around what waits for the items. When it is left, nothing of the batch runs any more."""
        begun: list[asyncio.Task[None]] = []

        def cancel() -> None:
            for task in begun:
                task.cancel()

        try:
            # An interrupt may come here when the items run already.
            self._host.wait(self._begin(begun))
            yield
            self._host.wait(_over(begun))
        except BaseException:
            self._left = True
            self._host.call(cancel)
            self._host.wait(_over(begun))
            raise

    async def _begin(self, begun: list[asyncio.Task[None]]) -> None:
        if self._left:
            return
        task = asyncio.ensure_future(self._work())
        task.add_done_callback(self._give_up)
        begun.append(task)

    def _give_up(self, task: asyncio.Task[None]) -> None:
        """What is not done when all is over never will be."""
        error = None if task.cancelled() else task.exception()
        for cell in self._cells:
            cell.end(error or Cancelled("the batch has ended before this was done"))

    async def _work(self) -> None:
        bar = Bar(len(self._cells), self._progress_bar)
        number = uuid.uuid4().hex
        backend = self._backend if self._prefix else None
        try:
            if backend is not None:
                # It only saves time: where it fails, those items fail that ask for more of it.
                fill = backend.fill(Fill(segments=self._prefix, program=number))
                await asyncio.gather(fill, return_exceptions=True)
            left = iter(zip(self._cells, self._arguments, strict=True))
            some = [self._some(left, bar) for _ in range(min(self._limit, len(self._cells)))]
            # Cancelled, it waits until all have ended, as it would not without `return_exceptions`.
            for error in await asyncio.gather(*some, return_exceptions=True):
                if error is not None:
                    raise error
        finally:
            bar.close()
            if backend is not None:
                await end(backend, number)

    async def _some(self, left: Iterator[tuple[Cell, Any]], bar: Bar) -> None:
        """One item after the other, while there are any."""
        for cell, (args, kwargs) in left:
            run = self._program.opened(self._host, self._options)
            done = await asyncio.gather(self._program.body(run, args, kwargs), return_exceptions=True)
            if isinstance(done[0], BaseException):
                cell.end(done[0])
            else:
                cell.set(done[0])
            bar.step()


async def _over(begun: list[asyncio.Task[None]]) -> None:
    if begun:
        await asyncio.wait(begun)


def _limit(limit: int | str) -> int:
    if limit == "auto":
        return max(96, 16 * (os.cpu_count() or 1))
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f'concurrency (num_threads) must be at least 1 or "auto", got {limit!r}')
    return limit


def _raise(cell: Cell, number: int) -> None:
    """The error of an item, if it has one."""
    if cell.error is not None:
        if isinstance(cell.error, Exception):
            cell.error.add_note(f"item {number} of the batch")
        raise cell.error
