"""The runtime without HTTP: its processes, and one asyncio loop in a thread that talks to them.

caller's threads ──coroutines──► loop thread (Client) ──ipc──► tokenizer, scheduler, worker
                                      ▲ a death                    │
                                 watch thread (Launcher) ◄─────────┘
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from sapwood.srt.client import Client
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ProcessDied, Unavailable
from sapwood.srt.launch import ENGINE_ROLES, Interrupted, Launcher
from sapwood.srt.messages import Serve
from sapwood.srt.server.service import Service

T = TypeVar("T")

JOIN_SECONDS = 15.0
LAST_WORDS_SECONDS = 1.0


class OfflineRuntime:
    """Started by its constructor, which returns once every process is ready; ended by `close`.

    Raises ProcessDied if a process cannot start. After a death, whatever runs and whatever comes later
    raises with the reason.
    """

    def __init__(self, config: Config, source: ModelSource, roles: Mapping[str, str] = ENGINE_ROLES) -> None:
        self._owner = os.getpid()
        # Reentrant: the collector may run `close` while this thread holds it.
        self._gate = threading.RLock()
        self._open = True
        self._connected = False
        self._launcher = Launcher(config, source, roles)
        self._launcher.prepare()
        self._loop = asyncio.new_event_loop()
        self.service = Service(config, source, Client(config, self._launcher.directory))
        self._started: concurrent.futures.Future[Serve] = concurrent.futures.Future()
        self._watcher = threading.Thread(target=self._watch, name="sapwood launcher", daemon=True)
        self._looper = threading.Thread(target=self._run_loop, name="sapwood loop", daemon=True)
        self._looper.start()
        try:
            self.run(self.service.client.start())
            self._connected = True
            self._watcher.start()
            ready = self._started.result()
        except BaseException:
            self.close()
            raise
        self.service.facts = ready.facts
        self.service.max_request_tokens = ready.max_request_tokens
        self.service.state = "ready"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it; an exception here (Ctrl-C) cancels it there."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop, without waiting. Raises Unavailable once closed, and in a fork."""
        with self._gate:
            if self._open and os.getpid() == self._owner:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        if os.getpid() != self._owner:
            raise Unavailable(f"the engine of process {self._owner} cannot be used in a fork", code="fork")
        raise _closed()

    def discard(self, source: AsyncGenerator[Any, None]) -> None:
        """End an asynchronous generator of the loop that is read no further."""

        async def end() -> None:
            await source.aclose()

        with contextlib.suppress(Unavailable):
            self.submit(end())

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Run `call` on the loop some time; never once closed."""
        with self._gate:
            if self._open and os.getpid() == self._owner:
                self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """End the processes and both threads. Safe to repeat, in any thread; does nothing in a fork."""
        if os.getpid() != self._owner:
            return
        self._launcher.interrupt()
        self._join(self._watcher)
        self._launcher.close()
        with self._gate:
            self.soon(self._loop.stop)
            self._open = False
        self._join(self._looper)

    def _join(self, thread: threading.Thread) -> None:
        # The collector may run a finalizer in any thread, these two among them.
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        """The one thread that starts, watches and ends the processes."""
        with self._launcher:
            try:
                self._started.set_result(self._launcher.start())
                self._launcher.watch()
            except Interrupted:
                if not self._started.done():
                    self._started.set_exception(_closed())
            except Exception as e:
                error = e if isinstance(e, ProcessDied) else ProcessDied(f"the launcher failed: {e!r}")
                if not self._started.done():
                    self._started.set_exception(e)
                self.soon(self.service.client.fail_all, error.info())

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """End every stream with an error, and give those who wait for them the time to hear of it."""
        client = self.service.client
        client.fail_all(_closed().info())
        if self._connected:
            await client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=LAST_WORDS_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _closed() -> Unavailable:
    return Unavailable("the engine has been shut down", code="closed")
