"""One run of a program: its requests, which share a program id, its errors, and its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from sapwood.lang.backend import Backend
from sapwood.lang.line import Cancelled, Line
from sapwood.lang.loop import Host
from sapwood.lang.options import Defaults

END_SECONDS = 10.0
"""How long a finished run waits for the backend to hear of it."""


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
        self.lines: list[Line] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._untold: list[BaseException] = []
        self._body: asyncio.Task[Any] | None = None
        self.main = Line(self)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the run's, on its loop; call it there."""
        task = self.host.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def follow(self, body: asyncio.Task[Any]) -> None:
        """Keep a task that nobody awaits. Its error ends the state's text, which is where it is raised."""
        self._body = body
        body.add_done_callback(self._followed)

    def _followed(self, body: asyncio.Task[Any]) -> None:
        error = None if body.cancelled() else body.exception()
        for line in self.lines:
            line.close(Cancelled("the run was cancelled"), error)

    def failed(self, error: BaseException) -> None:
        """An error that nobody has been told of yet."""
        if not any(error is known for known in self._untold):
            self._untold.append(error)

    def told(self, error: BaseException) -> None:
        """The program gets to know of the error, which is then its own affair."""
        self._untold = [other for other in self._untold if other is not error]

    def cancel(self) -> None:
        """Stop the run: what it awaits fails, its requests are cancelled. From any thread; does not wait. A
        run that is over stays as it is."""
        if not self.main.over:
            self.host.call(self._cancel)

    def _cancel(self) -> None:
        if self._body is not None:
            self._body.cancel()
        cancelled = Cancelled("the run was cancelled")
        for line in list(self.lines):
            line.fail(cancelled)
            line.close(cancelled, cancelled)
        for task in self._tasks:
            task.cancel()

    async def _idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _settle(self) -> None:
        await self._idle()
        if (error := self._first()) is not None:
            raise error

    def _first(self) -> BaseException | None:
        """The first untold error; the others are told in a note."""
        if not self._untold:
            return None
        first, *others = self._untold
        for other in others:
            first.add_note(f"another branch failed too: {type(other).__name__}: {other}")
        return first

    async def _close(self, error: BaseException | None) -> None:
        cancelled = Cancelled("the program has ended before this was done")
        cancelled.__cause__ = error
        for task in self._tasks:
            task.cancel()
        await self._idle()
        if error is None:
            await self._end()  # first, so that who has read all of a stream has the report
        for line in self.lines:
            line.close(cancelled, error if isinstance(error, Exception) or error is None else cancelled)
        if error is not None:
            await self._end()

    async def _end(self) -> None:
        """A run does not fail because the backend does not hear of its end: there the program times out."""
        if not self.asked:
            return
        task = asyncio.ensure_future(self.backend.end(self.program))
        done, late = await asyncio.wait([task], timeout=END_SECONDS)
        for one in late:
            one.cancel()
        if done and not task.cancelled() and task.exception() is None:
            self.report = task.result()

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
        self._body = asyncio.current_task()
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
            self._body = None
            # A second cancellation must not stop the cancelling.
            await asyncio.shield(asyncio.ensure_future(self._close(error)))
