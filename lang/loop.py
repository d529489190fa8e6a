"""Where requests run: an event loop, the caller's own or one in the background for programs that are `def`.

There is one background thread per process, which all such programs share; it starts with the first of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sapwood.lang.errors import LangError

T = TypeVar("T")

MOST_THREADS = 256
"""Threads at most for `def` programs in whose caller's thread they do not run, and as many again for those
that such a program runs, which it may wait for: so there is always one that waits for no other's thread. Each
starts when needed."""

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("sapwood_depth", default=0)


class Host:
    """An event loop and the thread that it runs in."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self._thread = thread

    def inside(self) -> bool:
        """Whether this is the loop's own thread, which must not wait."""
        return threading.get_ident() == self._thread

    def may_wait(self) -> None:
        """Raise LangError if waiting here would stop the loop that is waited for."""
        if self.inside():
            raise LangError(
                "this would wait on the event loop that it waits for: in async code use `await` with an "
                "`async def` program, `run_async` or `stream`"
            )

    def call(self, function: Callable[[], object]) -> None:
        """Call it on the loop: at once if this is its thread, else soon, in the order of the calls."""
        if self.inside():
            function()
        else:
            self.loop.call_soon_threadsafe(function)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait for it. An interrupted wait cancels it."""
        if self.inside():
            coroutine.close()
            self.may_wait()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()


def running() -> Host:
    """The running loop. Raises RuntimeError if none runs."""
    return Host(asyncio.get_running_loop(), threading.get_ident())


class _Background:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._process = os.getpid()

    def _mine(self) -> None:
        """A forked process has none of its parent's threads."""
        if self._process != os.getpid():
            self._host, self._threads, self._process = None, {}, os.getpid()

    def host(self) -> Host:
        with self._lock:
            self._mine()
            if self._host is None:
                self._host = _start()
            return self._host

    def threads(self, depth: int) -> ThreadPoolExecutor:
        with self._lock:
            self._mine()
            if depth not in self._threads:
                self._threads[depth] = ThreadPoolExecutor(MOST_THREADS, "sapwood-program")
            return self._threads[depth]


def _start() -> Host:
    loop = asyncio.new_event_loop()
    started: Future[int] = Future()
    stopped = threading.Event()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(lambda: started.set_result(threading.get_ident()))
        while not stopped.is_set():
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # Of a task, which has it as its error too: who waits for that hears of it.
                continue
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=serve, name="sapwood-lang", daemon=True)
    thread.start()
    host = Host(loop, started.result())

    def stop() -> None:
        stopped.set()
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)

    atexit.register(stop)
    return host


_background = _Background()


def background() -> Host:
    """The loop of the background thread, which is started if it does not run yet."""
    return _background.host()


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do a `def` program's code in another thread, if it is run from async code, streamed, or in a batch."""

    def do() -> T:
        _depth.set(depth + 1)
        try:
            return work()
        except StopIteration as error:
            raise RuntimeError("the program raised StopIteration") from error  # which no future holds

    depth = _depth.get()
    return _background.threads(depth).submit(contextvars.copy_context().run, do)
