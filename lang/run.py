"""One run of a program: its requests, which share a program id, its errors, and its end."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from sapwood.lang.backend import Backend
from sapwood.lang.line import Cancelled, Line
from sapwood.lang.loop import Host
from sapwood.lang.options import Defaults
from sapwood.lang.where import as_one

T = TypeVar("T")

END_SECONDS = 10.0
"""How long a finished run waits for the backend to hear of it."""


async def end(backend: Backend, program: str) -> dict[str, Any] | None:
    """Tells the backend that a program is over, for its report. None fails because the backend does not hear
    of it: there the program times out."""
    task = asyncio.ensure_future(backend.end(program))
    # Whoever waits here may be cancelled: then nobody asks for its error.
    task.add_done_callback(lambda over: over.cancelled() or over.exception())
    done, late = await asyncio.wait([task], timeout=END_SECONDS)
    for one in late:
        one.cancel()
    return task.result() if done and not task.cancelled() and task.exception() is None else None


class Run:
    """A context manager, for a thread and for a loop, around the program's own code.

    Leaving it waits for all operations and raises an error of theirs that the program has not been told of.
    Left by an exception it cancels what runs. Either way the backend then hears that the program is over.
    """

    def __init__(self, host: Host, backend: Backend, defaults: Defaults, streaming: bool = False) -> None:
        self.host = host
        self.backend = backend
        self.defaults = defaults
        self.streaming = streaming
        self.program = uuid.uuid4().hex
        self.report: dict[str, Any] | None = None
        self.asked = False
        # A branch that is done and that the program has let go of is none any more.
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._untold: dict[int, BaseException] = {}  # by their ids
        self._body: asyncio.Task[Any] | None = None
        self.main = Line(self)

    def add(self, line: Line) -> None:
        """A state of the run, which ends with it."""
        with self._lock:
            self._lines.add(line)

    def lines(self) -> list[Line]:
        """All that something can still happen to."""
        with self._lock:
            return list(self._lines)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the run's, on its loop; call it there."""
        task = self.host.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def perform(self, code: Callable[[], Awaitable[T]]) -> T:
        """Do the program's own code, in a task of its own: who cancels the run cancels nothing else. Raises
        Cancelled then."""
        caller = asyncio.current_task()
        assert caller is not None
        before = caller.cancelling()
        body = self._body = asyncio.ensure_future(_outcome(code))
        try:
            value: T
            value, error = await body
        except asyncio.CancelledError:
            if self.main.over and caller.cancelling() == before:
                raise Cancelled("the run was cancelled") from None
            raise
        finally:
            self._body = None
        if error is not None:
            raise error
        return value

    def follow(self, task: asyncio.Task[Any]) -> None:
        """Keep a run that nobody awaits. Its error ends the state's text, which is where it is raised."""
        self._body = task
        task.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        for line in self.lines():
            line.close(Cancelled("the run was cancelled"), error)

    def failed(self, error: BaseException) -> None:
        """An error that nobody has been told of yet."""
        self._untold[id(error)] = error

    def told(self, error: BaseException) -> None:
        """The program gets to know of the error, which is then its own affair."""
        self._untold.pop(id(error), None)

    def cancel(self) -> None:
        """Stop the run: what it awaits fails, its requests are cancelled. From any thread; does not wait. A
        run that is over stays as it is."""
        if not self.main.over:
            self.host.call(self._cancel)

    def _cancel(self) -> None:
        if self._body is not None:
            self._body.cancel()
        cancelled = Cancelled("the run was cancelled")
        for line in self.lines():
            line.fail(cancelled)
            line.close(cancelled, cancelled)
        for task in self._tasks:
            task.cancel()

    async def _idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _settle(self) -> None:
        await self._idle()
        if (error := as_one(self._untold.values())) is not None:
            raise error

    async def _close(self, error: BaseException | None) -> None:
        cancelled = Cancelled("the program has ended before this was done")
        cancelled.__cause__ = error
        told = error if isinstance(error, Exception) or error is None else cancelled
        if told is not None:
            for line in self.lines():
                line.fail(told)  # before its task fails it by being cancelled
        for task in self._tasks:
            task.cancel()
        await self._idle()
        if error is None:
            await self._end()  # first, so that who has read all of a stream has the report
        for line in self.lines():
            line.close(cancelled, told)
        if error is not None:
            await self._end()

    async def _end(self) -> None:
        if self.asked:
            self.report = await end(self.backend, self.program)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.host.wait(self._settle())
        except BaseException as e:
            error = e
            raise
        finally:
            self.host.wait(self._close(error))

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._settle()
        except BaseException as e:
            error = e
            raise
        finally:
            # A second cancellation must not stop the cancelling.
            await asyncio.shield(asyncio.ensure_future(self._close(error)))


async def _outcome(code: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Its value, or its error. It is not raised: an exit that a task raises ends the whole loop."""
    try:
        return await code(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
