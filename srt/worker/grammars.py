"""The grammars that rows may have: compiled in a thread of low priority, and again where that is needed."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest, ErrorInfo, SapwoodError
from sapwood.srt.grammar.engine import Engine, Matcher
from sapwood.srt.messages import GrammarLoaded, LoadGrammar
from sapwood.srt.models.registry import spec_of

NICE = 10
"""Of the thread at least, as far as the system has such a thing for threads."""
STACK_BYTES = 16 * 2**20
"""Of the thread: more than what compiles a grammar first has (grammar/child.py), where too deep ones end."""

logger = logging.getLogger("sapwood.worker")

T = TypeVar("T")


class Loaded:
    """A compiled grammar, from which rows begin."""

    def __init__(self, engine: Engine, text: str) -> None:
        """Raises BadRequest if the text is no grammar."""
        self.mask_words = engine.mask_words
        self._engine = engine
        self._text = text
        self._base: Matcher | None = engine.compile(text)

    def apart(self) -> Matcher:
        """A matcher at its beginning that shares nothing with any other. Raises BadRequest."""
        return self._engine.compile(self._text)

    @property
    def base(self) -> Matcher:
        """The matcher at its beginning of which all are copies at present. Raises BadRequest."""
        if self._base is None:
            self._base = self.apart()
        return self._base

    def spoil(self, base: Matcher) -> None:
        """A copy has failed: what all have walked may be to blame, so new ones are to be of another."""
        if self._base is base:
            self._base = None


class Grammars:
    """Those that were loaded and not dropped, by key. `make_engine` is called once, in the thread.

    `fileno` can be read when there is something to be had from `finished`. Everything but the compiling
    belongs to one thread.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._loaded: dict[bytes, Loaded] = {}
        self._wanted: set[bytes] = set()
        """Keys that were not dropped; the thread reads it."""
        self._todo: queue.SimpleQueue[LoadGrammar] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[bytes, Loaded | ErrorInfo]] = queue.SimpleQueue()
        self._news, self._tell = os.pipe()
        os.set_blocking(self._news, False)
        os.set_blocking(self._tell, False)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the engine now: it takes half a second, in which Python does nothing else."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            before = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(before)

    def load(self, message: LoadGrammar) -> None:
        """Have a grammar compiled; `finished` will tell, if it is not dropped before."""
        self.start()
        self._wanted.add(message.key)
        self._todo.put(message)

    def drop(self, keys: Collection[bytes]) -> None:
        """Forget grammars; rows that have begun go on. Of one that is not finished nothing will be told: its
        key must not be used again."""
        for key in keys:
            self._wanted.discard(key)
            self._loaded.pop(key, None)

    def fileno(self) -> int:
        return self._news

    def finished(self) -> list[GrammarLoaded]:
        """What has been loaded since, or why it could not be; a key that could not be loaded is dropped."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news, 4096)
        answers: list[GrammarLoaded] = []
        while True:
            try:
                key, result = self._done.get_nowait()
            except queue.Empty:
                return answers
            if key not in self._wanted:
                continue
            if isinstance(result, Loaded):
                self._loaded[key] = result
            else:
                self._wanted.discard(key)
            answers.append(GrammarLoaded(key, None if isinstance(result, Loaded) else result))

    def get(self, key: bytes) -> Loaded | None:
        return self._loaded.get(key)

    def _run(self) -> None:
        engine = _safely(self._make_engine)
        _make_way()
        while True:
            message = self._todo.get()
            if message.key not in self._wanted:
                continue
            result = engine if isinstance(engine, ErrorInfo) else _compiled(engine, message.text)
            self._done.put((message.key, result))
            with contextlib.suppress(BlockingIOError):  # full: it can be read anyway
                os.write(self._tell, b"\0")


def make_grammars(source: ModelSource) -> Grammars:
    """Those of the model's tokenizer; their masks are as wide as its logits."""

    def make_engine() -> Engine:
        if source.tokenizer_file is None:
            raise BadRequest("constraints need a tokenizer.json, which this model does not have")
        try:
            return Engine(source.tokenizer_file, spec_of(source.config).vocab, source.eos_ids)
        except ValueError as e:
            raise BadRequest(f"constraints do not work with this model's tokenizer: {e}") from None

    return Grammars(make_engine)


def _make_way() -> None:
    """This thread gets a low priority; nothing changes where it has a lower one, which it could not raise."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _compiled(engine: Engine, text: str) -> Loaded | ErrorInfo:
    return _safely(lambda: Loaded(engine, text))


def _safely(work: Callable[[], T]) -> T | ErrorInfo:
    """Its result or its error: a thread that ended would leave requests waiting for ever."""
    try:
        return work()
    except SapwoodError as e:
        return e.info()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as e:  # the engine's own panics are no Exceptions
        logger.exception("constraints")
        return SapwoodError(f"constraints cannot be followed here: {e}").info()
