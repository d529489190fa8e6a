"""Wakes the worker's main thread when a step is done on the device."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable

from sapwood.srt.worker.device.accelerator import Event


class Waker:
    """Waits for events in a thread of its own, which first calls `begin` (on a GPU: to choose the device);
    `fileno` can be read when one is there, or cannot come any more, which `clear` raises."""

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._news, self._tell = os.pipe()
        os.set_blocking(self._news, False)
        os.set_blocking(self._tell, False)
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def fileno(self) -> int:
        return self._news

    def watch(self, event: Event) -> None:
        """Have it waited for, after those before it."""
        self._events.put(event)

    def clear(self) -> None:
        """Forget what can be read. Raises what has ended the thread: nobody would be woken any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news, 4096)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._begin()
            while True:
                self._events.get().synchronize()
                self._wake()
        except Exception as e:  # the edge of a thread: the main one raises it
            self._failed = e
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it can be read anyway
            os.write(self._tell, b"\0")
