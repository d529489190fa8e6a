"""A state's operations, in order: added by the program, done one after the other on the run's loop.

The program's side knows at once which variables there will be, and what the state will look like but for the
outputs' text (`shadow`); so what a backend cannot do, or a message that ends before it begins, is an error
where it is added. The loop's side holds the real `context`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sapwood.lang.backend import Fill
from sapwood.lang.context import Context
from sapwood.lang.errors import LangError
from sapwood.lang.feed import Cell, Feed, Names, known
from sapwood.lang.where import Where, here, note

if TYPE_CHECKING:
    from sapwood.lang.run import Run


class Cancelled(LangError):
    """The run was stopped, or has failed elsewhere, before this was done."""


Doing = Callable[["Line"], Coroutine[Any, Any, None] | None]


@dataclass(slots=True)
class Op:
    """Something to do with a line; `cells` get their values by it, or its error."""

    do: Doing
    where: Where
    cells: tuple[Cell, ...] = ()
    branches: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `count` segments of a context, which a task is having computed."""

    count: int
    task: asyncio.Task[None]
    answer: list[tuple[int, ...]]


class Line:
    """One state. `shown` is its text as it comes; `names` are its variables."""

    def __init__(self, run: Run, parent: Line | None = None, label: str = "") -> None:
        self.run = run
        self.label = label
        self.names: Names = Names(parent.names.cells if parent else None)
        self.shadow: Context = parent.shadow.forked() if parent else Context()
        self.closed = False  # for the program, which has joined it
        self.over = False
        self.context = Context()
        self.shown = Feed()
        self.ids: tuple[int, ...] | None = ()
        self.scopes: dict[str, list[int]] = {}  # where those that are open begin, the innermost last
        self.error: BaseException | None = None
        self.forked_at = 0
        self.prefix: Prefix | None = None
        self._ops: deque[Op] = deque()
        self._lock = threading.Lock()
        self._awake = parent is not None  # a branch is woken when its parent has come to the fork
        self._doing: Op | None = None
        self._worker: asyncio.Task[BaseException | None] | None = None
        run.add(self)

    # The program's side.

    def put(self, op: Op) -> None:
        """Have something done after all that was put before. On a failed line its cells fail."""
        with self._lock:
            error = self.error or (Cancelled("the program has ended") if self.over else None)
            if error is None:
                self._ops.append(op)
            wake = error is None and not self._awake
            self._awake = self._awake or wake
        if error is not None:
            _fail(op, error)
        elif wake:
            self.run.host.call(self._start)

    def look(self, what: Callable[[Line], Any]) -> Cell:
        """What the line has when all that was put before is done."""
        if self.over and self.error is None:
            return known(what(self))
        cell = Cell()

        def do(line: Line) -> None:
            cell.set(what(line))

        self.put(Op(do, here(), (cell,)))
        return cell

    def fork(self, size: int) -> list[Line]:
        """Branches that start from here. What no model has seen yet is sent at once, if there are several."""
        where = here()
        path = f"{self.label} > " if self.label else ""
        branches = [Line(self.run, self, f"{path}branch {i} of the fork at {where}") for i in range(size)]
        self.shadow = self.shadow.forked()

        async def do(line: Line) -> None:
            line.context = line.context.sealed()
            if size > 1 and line.context.new:
                await line.resolve()
                line.context = line.context.seen(None)
                line.prefix = line.fill()
            text = line.shown.text()  # one for all of them
            for branch in branches:
                branch.begin(line, text)

        self.put(Op(do, where, branches=branches))
        return branches

    # The loop's side.

    def begin(self, parent: Line, text: str) -> None:
        """Go on from where `parent` is, with the text that it has."""
        self.context, self.prefix, self.ids = parent.context.forked(), parent.prefix, parent.ids
        self.forked_at = len(text)
        self.shown.add(text)
        with self._lock:
            # Not read again: from here on `put` starts the line, if this does not.
            awake = self._awake = bool(self._ops)
        if awake:
            self._start()

    def fill(self) -> Prefix:
        """Have all segments computed, in a task of its own. It only saves time: where it fails, those fail
        who ask for more of it."""
        call = Fill(segments=self.context.sent(), program=self.run.program)
        answer: list[tuple[int, ...]] = []

        async def do() -> None:
            self.run.asked = True
            (filled,) = await asyncio.gather(self.run.backend.fill(call), return_exceptions=True)
            if not isinstance(filled, BaseException) and filled.input_ids is not None:
                answer.append(filled.input_ids)

        task = self.run.spawn(do())
        # The ids of an open message come after those of the segments, and are not told apart.
        return Prefix(0 if self.context.role else len(self.context.segments), task, answer)

    async def resolve(self) -> None:
        """Before a request: what was sent at a fork is computed, so that the request finds it."""
        if self.prefix is None:
            return
        prefix, self.prefix = self.prefix, None
        # Not awaited itself: who is cancelled while waiting must not cancel it for the other branches.
        await asyncio.wait([prefix.task])
        prefix.task.result()
        if prefix.answer:
            self.ids = prefix.answer[0]
            self.context = self.context.filled(prefix.count, prefix.answer[0])

    def _start(self) -> None:
        assert self._worker is None or self._worker.done(), "operations of a line are done in order"
        self._worker = self.run.spawn(self._work())
        self._worker.add_done_callback(self._over)

    def _next(self) -> Op | None:
        with self._lock:
            self._doing = self._ops.popleft() if self._ops else None
            self._awake = self._doing is not None
            return self._doing

    async def _work(self) -> BaseException | None:
        """Gives the error that ends it. It is not raised: an exit that a task raises ends the whole loop."""
        try:
            while (op := self._next()) is not None:
                waiting = op.do(self)
                if waiting is not None:
                    await waiting
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    def _over(self, task: asyncio.Task[BaseException | None]) -> None:
        if task.cancelled():
            self.fail(Cancelled("the program has ended before this was done"))
        elif (error := task.result()) is not None:
            if self._doing is not None:
                note(error, self._doing.where, self.label)
            self.run.failed(error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The line cannot go on: all that is to come fails too."""
        with self._lock:
            self.error = self.error or error
            left = [op for op in (self._doing, *self._ops) if op is not None]
            self._ops.clear()
        for op in left:
            _fail(op, error)
        self.shown.end(error)

    def close(self, left: BaseException, error: BaseException | None = None) -> None:
        """Nothing is added any more. What is not done yet fails with `left`; the text ends with `error`."""
        with self._lock:
            self.closed = self.over = True
        if self._ops or self._doing is not None or self._awake:
            self.fail(left)
        self.names.close(error)
        self.shown.end(error)


def _fail(op: Op, error: BaseException) -> None:
    for cell in op.cells:
        cell.end(error)
    for branch in op.branches:
        branch.fail(error)
