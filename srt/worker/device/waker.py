"""Wakes the worker's main thread when a step is done on the device."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from sapwood.srt.worker.device.accelerator import Event


class Waker:
    """Waits for events in a thread of its own; `fileno` can be read when one is there."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
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
        """Forget what can be read."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news, 4096)

    def _run(self) -> None:
        while True:
            self._events.get().synchronize()
            with contextlib.suppress(BlockingIOError):  # full: it can be read anyway
                os.write(self._tell, b"\0")
