"""The runtime without HTTP: its processes, and one asyncio loop in a thread that talks to them.

caller's threads ──coroutines──► loop thread (Client) ──ipc──► tokenizer, scheduler, worker
                                      ▲ a death                    │
                             launcher's thread (LaunchThread) ◄────┘
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sapwood.srt.client import Client
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ModelError, ProcessDied, Unavailable
from sapwood.srt.launch import ENGINE_ROLES
from sapwood.srt.launch_thread import JOIN_SECONDS, LaunchThread, closed
from sapwood.srt.offline_work import Gate, Work, outcomes
from sapwood.srt.orders import Serve
from sapwood.srt.progress import bar
from sapwood.srt.server import shared_prefixes
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.service import Service

T = TypeVar("T")

LAST_WORDS_SECONDS = 1.0


class OfflineRuntime:
    """Started by its constructor, which returns once every process is ready; ended by `close`.

    Raises ProcessDied if a process cannot start. After a death, whatever runs and whatever comes later
    raises with the reason.
    """

    def __init__(self, config: Config, source: ModelSource, roles: Mapping[str, str] = ENGINE_ROLES) -> None:
        self._owner = os.getpid()
        # Reentrant: the collector may run `close` while this thread holds it.
        self._door = threading.RLock()
        self._open = True
        self._connected = False
        self._launcher = LaunchThread(config, source, roles, self._died, on_serve=self._begun_anew)
        self._loop = asyncio.new_event_loop()
        self.service = Service(config, source, Client(config, self._launcher.directory))
        self.gate = Gate(config.max_queued_requests)
        self._looper = threading.Thread(target=self._run_loop, name="sapwood loop", daemon=True)
        self._looper.start()
        try:
            self.run(self.service.client.start())
            self._connected = True
            self._prefixes = shared_prefixes.read(self.service)
            ready = self._launcher.launch()
            self.service.take(ready)
            listed = self.run(shared_prefixes.compute(self.service, self._prefixes))
        except BaseException:
            self.close()
            raise
        self.service.facts |= listed
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
        with self._door:
            if self._open and os.getpid() == self._owner:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        if os.getpid() != self._owner:
            raise Unavailable(f"the engine of process {self._owner} cannot be used in a fork", code="fork")
        raise closed()

    def outcomes(self, items: Sequence[Work], progress: bool) -> list[Outcome]:
        """What each of `items` gives, in order; the first error cancels the rest and is raised."""
        with bar(len(items) if progress else 0) as advance:
            return self.run(outcomes(self.service, self.gate, items, advance))

    def tokenizer(self) -> Any:
        """The model's `tokenizers.Tokenizer`, loaded anew. Raises ModelError."""
        return tokenizer_of(self.service.source)

    def discard(self, source: AsyncGenerator[Any, None]) -> None:
        """End an asynchronous generator of the loop that is read no further."""

        async def end() -> None:
            await source.aclose()

        with contextlib.suppress(Unavailable):
            self.submit(end())

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Run `call` on the loop some time; never once closed."""
        with self._door:
            if self._open and os.getpid() == self._owner:
                self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """End the processes and both threads. Safe to repeat, in any thread; does nothing in a fork."""
        if os.getpid() != self._owner:
            return
        self._launcher.close()
        with self._door:
            self.soon(self._loop.stop)
            self._open = False
        # The collector may run a finalizer in any thread, the loop's among them.
        if self._looper.is_alive() and self._looper is not threading.current_thread():
            self._looper.join(JOIN_SECONDS)

    def _died(self, error: ProcessDied) -> None:
        if error.details:  # a traceback, which callers do not get
            logging.getLogger("sapwood").error("%s\n%s", error.message, error.details.rstrip())
        self.soon(self.service.client.fail_all, error.info())

    def _begun_anew(self, serve: Serve) -> None:
        self.service.max_request_tokens = serve.max_request_tokens
        with contextlib.suppress(Unavailable):
            self.submit(shared_prefixes.compute_again(self.service, self._prefixes))

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
        client.fail_all(closed().info())
        if self._connected:
            await client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=LAST_WORDS_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def tokenizer_of(source: ModelSource) -> Any:
    """A model's `tokenizers.Tokenizer`, loaded anew. Raises ModelError."""
    from sapwood.srt.tokenizer import vocabulary

    if source.tokenizer_file is None:
        raise ModelError(f"{source.name} was loaded without a tokenizer")
    return vocabulary.load(source.tokenizer_file)
