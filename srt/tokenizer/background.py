"""Does what takes long (prompts to encode, questions) in threads of their own, so that no stream waits."""

from __future__ import annotations

import ctypes
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sapwood.srt.errors import ErrorInfo, SapwoodError
from sapwood.srt.messages import ChatPrompt, IdsPart, IdsPrompt, PartsPrompt, Spoken, TextPart, TextPrompt
from sapwood.srt.tokenizer.prompts import Prompt

LONG_CHARS = 8192
"""A text of this length takes some milliseconds to encode."""
PART_CHARS = 64
"""What a part counts for besides its text: each takes an encoding of its own."""
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
    """Works in threads, which start with the first job and last. `wake` is called, from them, after each job;
    `failed` is for `safely`, `weigh` says what a job adds to `held`. `pending` jobs are not `finished` yet.
    """

    def __init__(
        self,
        work: Callable[[In], Out],
        failed: str,
        threads: int = THREADS,
        wake: Callable[[], None] | None = None,
        weigh: Callable[[In], int] = lambda job: 0,
    ) -> None:
        self._work = work
        self._failed = failed
        self._count = threads
        self._wake = wake
        self._weigh = weigh
        self._todo: deque[In] = deque()
        self._lock = threading.Lock()
        self._tickets = threading.Semaphore(0)
        self._done: queue.SimpleQueue[tuple[In, Out | ErrorInfo]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.pending = 0
        self.held = 0

    def put(self, job: In) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"encoder-{i}", daemon=True)
                for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self.pending += 1
        self.held += self._weigh(job)
        with self._lock:
            self._todo.append(job)
        self._tickets.release()

    def drop(self, unwanted: Callable[[In], bool]) -> bool:
        """Forget such jobs that no thread has begun; whether there were any."""
        with self._lock:
            dropped = [job for job in self._todo if unwanted(job)]
            for job in dropped:
                self._todo.remove(job)
        self.pending -= len(dropped)
        self.held -= sum(map(self._weigh, dropped))
        return bool(dropped)

    def finished(self) -> Iterator[tuple[In, Out | ErrorInfo]]:
        """What is done by now."""
        while self.pending:
            try:
                result = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            self.held -= self._weigh(result[0])
            yield result

    def _run(self) -> None:
        while True:
            self._tickets.acquire()
            with self._lock:
                if not self._todo:  # what the ticket was for has been dropped
                    continue
                job, begin = self._todo.popleft(), time.monotonic()
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
    return not isinstance(prompt, IdsPrompt) and size_of(prompt) > LONG_CHARS


def is_chat(prompt: Prompt | None) -> bool:
    """Whether encoding the prompt waits for the chat template."""
    if isinstance(prompt, PartsPrompt):
        return any(isinstance(part, Spoken) for part in prompt.parts)
    return isinstance(prompt, ChatPrompt)


def size_of(prompt: Prompt) -> int:
    """About the prompt's length, in characters or bytes."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, IdsPrompt):
        return len(prompt.ids)
    if isinstance(prompt, PartsPrompt):
        return sum(map(_size_of_part, prompt.parts)) + _chars(prompt.template_kwargs)
    return _chars((prompt.messages, prompt.template_kwargs, prompt.tools))


def _size_of_part(part: TextPart | IdsPart | Spoken) -> int:
    if isinstance(part, Spoken):
        return PART_CHARS + len(part.role) + sum(map(_size_of_part, part.content))
    return PART_CHARS + (len(part.text) if isinstance(part, TextPart) else len(part.ids))


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
