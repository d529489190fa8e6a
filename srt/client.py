"""The server's end of the message protocol, shared by the HTTP server and the offline engine.

Everything here runs on one asyncio loop; no call blocks it, and no method may be called from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, Protocol

from sapwood.srt.channel import AsyncInbox, Outbox
from sapwood.srt.config import Config
from sapwood.srt.errors import (
    DeadlineExceeded,
    ErrorInfo,
    Overloaded,
    OwnDeadlineExceeded,
    Unavailable,
    from_info,
)
from sapwood.srt.messages import (
    ASK_SECONDS,
    Abort,
    Answer,
    AnyPrompt,
    Ask,
    Chunk,
    Ended,
    Generate,
    GrammarStats,
    Read,
    Started,
    Stats,
)
from sapwood.srt.names import Held, Names, Rid
from sapwood.srt.params import Constraint, Parsing, SamplingParams, Scheduling, checked_constraints

logger = logging.getLogger("sapwood.client")

Prompt = AnyPrompt
Event = Started | Read | Chunk | Ended
Question = Literal["flush", "state", "check", "tree", "explain", "tokenize", "detokenize", "program"]

_EVENTS = (Chunk, Started, Read, Ended)
MOST_FRAMES = 8
"""That are taken in at once: their events of a stream wake its reader once."""

TOO_SLOW = ErrorInfo(
    503, "server_error", "slow_reader", "the client reads too slowly: the request was aborted"
)
WALKED_AWAY = ErrorInfo(499, "client_error", "client_disconnected", "the client has gone away")


class Observer(Protocol):
    """Sees every event of every stream once, when it arrives; must be quick and must not raise.

    `arrived` is `time.monotonic()` when the request was submitted, `now` when the event came; `namespace` is
    the cache it looked into.
    """

    def on_started(self, event: Started, namespace: str) -> None: ...

    def on_chunk(self, event: Chunk, arrived: float, now: float) -> None: ...

    def on_ended(self, event: Ended, arrived: float) -> None: ...


class Stream:
    """The events of one request in order: Started, Reads, Chunks, and exactly one Ended, always the last.

    At most `limit` events wait for the reader, and the terminal one. `rid` is unique; `name` is what the
    client calls the request; `arrived` is `time.monotonic()` at submit. `on_end` is called when it ends,
    whether or not it is read.
    """

    def __init__(
        self, rid: str, name: str, tokenizer: int, limit: int, cancel: Callable[[str], None]
    ) -> None:
        self.rid = rid
        self.name = name
        self.tokenizer = tokenizer
        self.arrived = time.monotonic()
        self.ended = False
        self._events: deque[Event] = deque()
        self._limit = limit
        self._cancel = cancel
        self.namespace = ""
        self.wake = asyncio.Event()
        self.on_end: Callable[[], None] | None = None
        self.deadline: asyncio.TimerHandle | None = None

    def put(self, event: Started | Read | Chunk) -> bool:
        """Add an event for the reader. False, and nothing added, if too many wait already."""
        assert not self.ended, "an event after the terminal one"
        if len(self._events) >= self._limit:
            return False
        self._events.append(event)
        self.wake.set()
        return True

    def end(self, event: Ended) -> None:
        """Add the terminal event, for which there is always room."""
        assert not self.ended, "a second terminal event"
        self.ended = True
        self._events.append(event)
        self.wake.set()
        if self.on_end is not None:
            self.on_end()

    def ready(self) -> list[Event]:
        """Every event that waits, without waiting for one."""
        events = [*self._events]
        self._events.clear()
        return events

    def cancel(self) -> None:
        """The reader has gone away: abort the request, unless it has ended."""
        if not self.ended:
            self._cancel(self.rid)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self.ended:
                raise StopAsyncIteration
            self.wake.clear()
            await self.wake.wait()
        return self._events.popleft()


async def merge(streams: Sequence[Stream]) -> AsyncIterator[list[tuple[int, Event]]]:
    """All events of several streams, each with its stream's index, in batches of what is ready.

    Ends when every stream has ended. The streams must not be read in another way.
    """
    wake = asyncio.Event()
    open_streams = dict(enumerate(streams))
    for stream in streams:
        stream.wake = wake
    wake.set()  # for what has come already
    while open_streams:
        if not wake.is_set():
            await wake.wait()
        wake.clear()
        batch = [(i, event) for i, stream in open_streams.items() for event in stream.ready()]
        for i, event in batch:
            if isinstance(event, Ended):
                del open_streams[i]
        if batch:
            yield batch


class Client:
    """Sends requests to the tokenizers and hands each one's answer to its own Stream.

    `latest_stats` are the scheduler's last gauges and counters, `grammar_stats` the grammar process's;
    `failure` is set once `fail_all` was called.
    """

    def __init__(self, config: Config, directory: str, observer: Observer | None = None) -> None:
        self.latest_stats: Stats | None = None
        self.grammar_stats = GrammarStats()
        self.failure: ErrorInfo | None = None
        self._config = config
        self._directory = directory
        self._observer = observer
        self._streams: dict[str, Stream] = {}
        self._names: Names[Stream] = Names()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._turns = itertools.cycle(range(config.tokenizer_workers))
        self._asked = itertools.cycle(range(config.tokenizer_workers))
        self._unsent: deque[tuple[int, Abort]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Open the sockets and begin to receive."""
        self._inbox = AsyncInbox(self._directory, "server")
        count = self._config.tokenizer_workers
        self._outboxes = [Outbox(self._directory, "tokenizer", i) for i in range(count)]
        self._receiver = asyncio.create_task(self._receive(), name="client-receive")
        self._receiver.add_done_callback(self._receiver_ended)

    async def close(self) -> None:
        """Stop receiving; streams still open end with an error."""
        self.fail_all(ErrorInfo(503, "server_error", "closed", "the server has been closed"))
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._inbox.close()
        for outbox in self._outboxes:
            outbox.close()

    @property
    def live(self) -> int:
        """How many streams have not ended."""
        return len(self._streams)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        namespace: str = "",
        rid: str | None = None,
        timeout: float | None = None,
        scheduling: Scheduling | None = None,
    ) -> Stream:
        """Start one request, as `submit_all` does."""
        return self.submit_all([(prompt, params)], namespace, rid, timeout, scheduling=scheduling)[0]

    def submit_all(
        self,
        items: Sequence[tuple[Prompt, SamplingParams]],
        namespace: str = "",
        rid: Rid = None,
        timeout: float | None = None,
        waited: float = 0.0,
        scheduling: Scheduling | None = None,
        streamed: bool = True,
        constraint: Constraint | Sequence[Constraint | None] | None = None,
        parsing: Parsing | None = None,
    ) -> list[Stream]:
        """Start several requests, or none of them. One `rid` (the client's own name) or `constraint` is for
        all of them; a list has one for each. `params` and `scheduling` have been checked.

        One that has not ended within `timeout` or `--request-timeout` seconds, whichever is less (`waited` of
        them are over), is aborted: its stream ends with DeadlineExceeded (408 by its own time). If not
        `streamed`, Chunks may be few and large. Raises BadRequest if a constraint is too long, Conflict if a
        live request has that name, Overloaded if a tokenizer's queue is full, Unavailable after `fail_all`.
        """
        constraints = checked_constraints(constraint, len(items))
        if self.failure is not None:
            raise Unavailable(self.failure.message, code=self.failure.code)
        names = self._names.of(rid, len(items))
        streams: list[Stream] = []
        try:
            for name, (prompt, params), its in zip(names, items, constraints, strict=True):
                stream = self._open(name, namespace)
                stream.arrived -= waited
                streams.append(stream)
                place = (namespace, stream.arrived, scheduling or Scheduling())
                message = Generate(stream.rid, prompt, params, *place, streamed, its, parsing, streams[0].rid)
                if not self._outboxes[stream.tokenizer].send(message):
                    full = Overloaded("the tokenizer's queue is full")
                    self._end(stream, full.info())
                    raise full
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        self._set_deadlines(streams, timeout, waited)
        return streams

    def time_limit(self, timeout: float | None) -> tuple[float | None, DeadlineExceeded]:
        """The seconds that a request has which has set itself `timeout`, and its error after that."""
        limits = [limit for limit in (timeout, self._config.request_timeout) if limit is not None]
        limit = min(limits, default=None)
        kind = DeadlineExceeded if limit is None or limit != timeout else OwnDeadlineExceeded
        return limit, kind(f"the request has not ended within {limit or 0:g} s")

    def _set_deadlines(self, streams: list[Stream], timeout: float | None, waited: float) -> None:
        limit, error = self.time_limit(timeout)
        if limit is not None:
            loop = asyncio.get_running_loop()
            for stream in streams:
                stream.deadline = loop.call_later(
                    max(0.0, limit - waited), self._expire, stream, error.info()
                )

    def _expire(self, stream: Stream, error: ErrorInfo) -> None:
        self._send_abort(stream)
        self._end(stream, error)

    def abort(self, rid: str) -> int:
        """Abort the request of that name; its stream ends with an "abort" finish. How many prompts it has."""
        if (held := self._names.held.get(rid)) is not None:
            held.abort()
            return 1
        streams = self._names.streams(rid)
        for stream in streams:
            self._send_abort(stream)
        return len(streams)

    def abort_all(self) -> int:
        """Abort every live request; how many there are."""
        held = self._names.held
        streams = [stream for stream in self._streams.values() if stream.name not in held]
        for stream in streams:
            self._send_abort(stream)
        for each in held.values():
            each.abort()
        return len(streams) + len(held)

    async def ask(
        self,
        what: Question,
        timeout: float | None = ASK_SECONDS,
        *,
        prompt: Prompt | None = None,
        namespace: str = "",
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answer to a question (see Ask); raises the answer's own error, and Unavailable after `timeout`
        seconds without one (None: it is waited for as long as this is not cancelled)."""
        if self.failure is not None:
            raise Unavailable(self.failure.message, code=self.failure.code)
        call, outbox, sent = next(self._numbers), self._outboxes[next(self._asked)], False
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            sent = outbox.send(Ask(call, what, 0, prompt, namespace, options or {}, timeout is None))
            if not sent:
                raise Overloaded("the tokenizer's queue is full")
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise Unavailable(f"no answer to {what!r} within {timeout:g} s") from None
        finally:
            del self._calls[call]
            if sent and self.failure is None and (future.cancelled() or not future.done()):
                outbox.send(Ask(call, "cancel"))  # if not: what is too old is dropped there too

    def fail_all(self, error: ErrorInfo) -> None:
        """End every open stream and question with `error`, and refuse all later ones."""
        if self.failure is None:
            self.failure = error
        for stream in list(self._streams.values()):
            self._end(stream, error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(from_info(error))

    @contextlib.asynccontextmanager
    async def holding(self, name: str, timeout: float | None) -> AsyncIterator[Held]:
        """For work whose streams come and go: within it the client is not idle, and the name is held (see
        `Names.hold`) for `timeout` or `--request-timeout` seconds, whichever is less."""
        try:
            async with self._names.hold(name, *self.time_limit(timeout)) as held:
                self._idle.clear()
                yield held
        finally:
            self._see_idle()

    async def idle(self, timeout: float) -> bool:
        """Wait until nothing is live or held; False if something still is after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def _open(self, name: str | None, namespace: str) -> Stream:
        rid = uuid.uuid4().hex
        # The bound is in tokens, as it were: a piece holds at least so many.
        limit = max(16, self._config.stream_buffer // self._config.stream_interval)
        stream = Stream(rid, name or rid, next(self._turns), limit, self._walked_away)
        stream.namespace = namespace
        self._streams[rid] = stream
        self._names.add(stream)
        self._idle.clear()
        return stream

    def _end(self, stream: Stream, error: ErrorInfo | None) -> None:
        """The one place where streams end."""
        if stream.deadline is not None:
            stream.deadline.cancel()
        del self._streams[stream.rid]
        self._names.remove(stream)
        self._see_idle()
        ended = Ended(stream.rid, error)
        stream.end(ended)
        if self._observer is not None:
            self._observer.on_ended(ended, stream.arrived)

    def _see_idle(self) -> None:
        if not self._streams and not self._names.held:
            self._idle.set()

    def _walked_away(self, rid: str) -> None:
        stream = self._streams[rid]
        self._send_abort(stream)
        self._end(stream, WALKED_AWAY)

    def _send_abort(self, stream: Stream) -> None:
        abort = Abort(stream.rid)
        if self._unsent or not self._outboxes[stream.tokenizer].send(abort):
            self._unsent.append((stream.tokenizer, abort))

    def _send_unsent(self) -> None:
        """A tokenizer that was too busy for an abort shows by its messages that it goes on."""
        for _ in range(len(self._unsent)):
            tokenizer, abort = self._unsent.popleft()
            if not self._outboxes[tokenizer].send(abort):
                self._unsent.append((tokenizer, abort))

    async def _receive(self) -> None:
        # However many frames wait, the readers run before their buffers could be full of them.
        most = max(1, min(MOST_FRAMES, self._config.stream_buffer // 128))
        while True:
            self._take(await self._inbox.receive(most))
            if self._unsent:
                self._send_unsent()
            # A socket that always has a frame would never let the readers run.
            await asyncio.sleep(0)

    def _receiver_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the server cannot receive any more", exc_info=error)
            self.fail_all(ErrorInfo(500, "server_error", "internal_error", "the server cannot receive"))

    def _take(self, batch: list[Any]) -> None:
        now = time.monotonic()
        for message in batch:
            if isinstance(message, _EVENTS):
                stream = self._streams.get(message.rid)
                if stream is not None:  # else it ended here first: the reader went away or was too slow
                    self._deliver(stream, message, now)
            elif isinstance(message, Stats):
                self.latest_stats = message
            elif isinstance(message, GrammarStats):
                self.grammar_stats = message
            elif isinstance(message, Answer):
                self._answer(message)

    def _answer(self, answer: Answer) -> None:
        future = self._calls.get(answer.call)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(from_info(answer.error))
        else:
            future.set_result(answer.data)

    def _deliver(self, stream: Stream, event: Event, now: float) -> None:
        if isinstance(event, Ended):
            self._end(stream, event.error)
        elif not stream.put(event):
            self._send_abort(stream)
            self._end(stream, TOO_SLOW)
        elif self._observer is not None:
            if isinstance(event, Chunk):
                self._observer.on_chunk(event, stream.arrived, now)
            elif isinstance(event, Started):
                self._observer.on_started(event, stream.namespace)
