"""Does what takes long (prompts to encode, questions) in threads of their own, so that no stream waits."""

from __future__ import annotations

import ctypes
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sapwood.srt.errors import ErrorInfo, SapwoodError
from sapwood.srt.messages import ChatPrompt, TextPrompt
from sapwood.srt.tokenizer.prompts import Prompt

LONG_CHARS = 8192
"""A text of this length takes some milliseconds to encode."""
THREADS = 2
TRIM_SECONDS = 0.2
"""After a job that took longer, memory goes back to the system: a megabyte of text takes hundreds of them."""

In = TypeVar("In")
Out = TypeVar("Out")


def safely(work: Callable[[In], Out], given: In, failed: str) -> Out | ErrorInfo:
    """The result, or the error that the request ends with; whatever is in a prompt, the process goes on.
    `failed` says what of it is an unforeseen failure."""
    try:
        return work(given)
    except SapwoodError as e:
        return e.info()
    except Exception as e:
        logging.getLogger("sapwood").exception(failed)
        return SapwoodError(f"{failed} ({type(e).__name__})").info()


class Background(Generic[In, Out]):
    """Works in threads, which start with the first job. `wake` is called, from them, after each job; `failed`
    is for `safely`."""

    def __init__(
        self,
        work: Callable[[In], Out],
        failed: str,
        threads: int = THREADS,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._failed = failed
        self._count = threads
        self._wake = wake
        self._todo: queue.SimpleQueue[In] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[In, Out | ErrorInfo]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.pending = 0

    def put(self, job: In) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"encoder-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self.pending += 1
        self._todo.put(job)

    def finished(self) -> Iterator[tuple[In, Out | ErrorInfo]]:
        """What is done by now."""
        while self.pending:
            try:
                result = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            yield result

    def _run(self) -> None:
        while True:
            job, begin = self._todo.get(), time.monotonic()
            self._done.put((job, safely(self._work, job, self._failed)))
            if self._wake is not None:
                self._wake()
            if time.monotonic() - begin > TRIM_SECONDS:
                _trim()


def _trim() -> None:
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def is_long(prompt: Prompt) -> bool:
    """Whether encoding the prompt would hold up other streams, or other prompts, noticeably."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > LONG_CHARS
    return isinstance(prompt, ChatPrompt) and _chars((prompt.messages, prompt.template_kwargs)) > LONG_CHARS


def _chars(value: object) -> int:
    """About the length of a JSON value, without recursion: it may be nested as deeply as a client likes."""
    chars, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        chars += len(value) if isinstance(value, str) else 1
    return chars
