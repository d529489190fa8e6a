"""Encodes long prompts in threads of their own, so that they hold up no stream."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sapwood.srt.errors import ErrorInfo, SapwoodError
from sapwood.srt.messages import ChatPrompt, Ids, TextPrompt
from sapwood.srt.tokenizer.prompts import Prompt

LONG_CHARS = 8192
"""A text of this length takes some milliseconds to encode."""
THREADS = 2

Job = TypeVar("Job")


def encode_safely(encode: Callable[[Prompt], Ids], prompt: Prompt) -> Ids | ErrorInfo:
    """The ids, or the error that the request ends with; whatever is in a prompt, the process goes on."""
    try:
        return encode(prompt)
    except SapwoodError as e:
        return e.info()
    except Exception as e:
        logging.getLogger("sapwood").exception("a prompt could not be encoded")
        return SapwoodError(f"the prompt could not be encoded ({type(e).__name__})").info()


class Background(Generic[Job]):
    """Encodes in `THREADS` threads, which start with the first prompt."""

    def __init__(self, encode: Callable[[Prompt], Ids]) -> None:
        self._encode = encode
        self._todo: queue.SimpleQueue[tuple[Job, Prompt]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Job, Ids | ErrorInfo]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.pending = 0

    def put(self, job: Job, prompt: Prompt) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"encoder-{i}", daemon=True) for i in range(THREADS)
            ]
            for thread in self._threads:
                thread.start()
        self.pending += 1
        self._todo.put((job, prompt))

    def finished(self) -> Iterator[tuple[Job, Ids | ErrorInfo]]:
        """What is done by now."""
        while self.pending:
            try:
                result = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            yield result

    def _work(self) -> None:
        while True:
            job, prompt = self._todo.get()
            self._done.put((job, encode_safely(self._encode, prompt)))


def is_long(prompt: Prompt) -> bool:
    """Whether encoding the prompt would hold up other streams noticeably."""
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
