"""One answer, streamed as server-sent events or whole, that ends with its client.

A stream is `data: {...}` events and a last `data: [DONE]`. An error before anything was produced is a plain
JSON answer with its status; one in the middle is an event `data: {"error": {...}}` before `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sapwood.srt.client import WALKED_AWAY, Event, Stream, merge
from sapwood.srt.errors import ErrorInfo, SapwoodError, from_info
from sapwood.srt.messages import Chunk, Ended, Read, Started
from sapwood.srt.server.outcome import Outcome

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

logger = logging.getLogger("sapwood.server")

Batch = list[tuple[int, Started | Read | Chunk]]

DONE = b"data: [DONE]\n\n"
WRITE = "sapwood.write"
"""The ASGI extension by which a connection takes pieces of a body that has begun, past all middleware."""
PIECE_BYTES = 65_536
"""Of a stream, after which other streams have their turn."""
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Shape(Protocol):
    """Turns events into the JSON values of one route. `outcome` has every event before it is asked for."""

    outcome: Outcome

    def parts(self) -> Iterator[Any]:
        """What a whole answer has one of for each choice, after the last event."""
        ...

    def whole(self, parts: list[Any]) -> Any:
        """The answer in one piece, around its parts (which have become JSON)."""
        ...

    def deltas(self, batch: Batch) -> Iterator[Any]:
        """What these events, each with its prompt's index, add to a stream."""
        ...

    def closing(self) -> Iterator[Any]:
        """What a stream has after the last event."""
        ...


class JsonAnswer(Response):
    """Any msgspec-encodable value as a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_value(error: ErrorInfo) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "code": error.code, "param": error.param}}


STATUS_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: {"retry-after": "1"},
    503: {"retry-after": "1"},
}


def error_answer(error: ErrorInfo, headers: dict[str, str] | None = None) -> JsonAnswer:
    """The error's JSON with its status, and the headers that go with that."""
    every = STATUS_HEADERS.get(error.status, {}) | (headers or {})
    return JsonAnswer(error_value(error), status_code=error.status, headers=every)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it at once when the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def while_here(request: Request, question: Awaitable[T]) -> T:
    """The answer to a question of a route; it is not waited for any more when the client disconnects, and an
    error that nobody reads is raised. The body must have been read."""
    answers: list[T] = []

    async def ask() -> None:
        answers.append(await question)

    await unless_gone(request.receive, ask())
    if not answers:
        raise from_info(WALKED_AWAY)
    return answers[0]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Reply(Response):
    """Sends what `shape` makes of the streams' events; aborts the streams when the client goes away.

    `field` is where the request has its prompt, which an error of another process calls `prompt`; `rename` is
    for what else such an error calls by other names than the request.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        shape: Shape,
        *,
        streamed: bool,
        field: str = "prompt",
        rename: Callable[[ErrorInfo], ErrorInfo] | None = None,
    ) -> None:
        self._streams = streams
        self._rename = rename
        self._field = field
        self._shape = shape
        self._streamed = streamed
        super().__init__(
            headers={"x-request-id": streams[0].name, **(EVENT_HEADERS if streamed else {})},
            media_type="text/event-stream" if streamed else "application/json",
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._send_events if self._streamed else self._send_whole
        try:
            await unless_gone(receive, answer(scope, receive, send))
        finally:
            for stream in self._streams:
                stream.cancel()
            logger.debug("%s %s has ended", scope["path"], self._streams[0].name)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for batch in merge(self._streams):
            _events, error = self._note(batch)
            if error is not None:
                await self._send_error(error, scope, receive, send)
                return
        parts = []
        try:
            for part in self._shape.parts():
                parts.append(msgspec.Raw(msgspec.json.encode(part)))
                await asyncio.sleep(0)  # a part may have megabytes, and other streams go on
            answer = JsonAnswer(self._shape.whole(parts), headers={"x-request-id": self._streams[0].name})
        except SapwoodError as e:
            answer = error_answer(e.info())
        await answer(scope, receive, send)

    async def _send_error(self, error: ErrorInfo, scope: Scope, receive: Receive, send: Send) -> None:
        if error.param == "prompt":
            message = re.sub(r"\Aprompt\b", self._field, error.message)
            error = msgspec.structs.replace(error, message=message, param=self._field)
        if self._rename is not None:
            error = self._rename(error)
        await error_answer(error, {"x-request-id": self._streams[0].name})(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        batches = merge(self._streams)
        events, error = self._note(await anext(batches))
        if error is not None:
            await self._send_error(error, scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        write: Write = scope.get("extensions", {}).get(WRITE) or _through(send)
        await self._send_deltas(events, write)
        async for batch in batches:
            events, error = self._note(batch)
            await self._send_deltas(events, write)
            if error is not None:
                await _send_last(send, _event(error_value(error)) + DONE)
                return
        await _send_last(send, b"".join(map(_event, self._shape.closing())) + DONE)

    def _note(self, batch: list[tuple[int, Event]]) -> tuple[Batch, ErrorInfo | None]:
        """Add the events before the first error to the outcome; they, and that error."""
        events: Batch = []
        add = self._shape.outcome.add
        for i, event in batch:
            if not isinstance(event, Ended):
                add(i, event)
                events.append((i, event))
            elif event.error is not None:
                return events, event.error
        return events, None

    async def _send_deltas(self, batch: Batch, write: Write) -> None:
        body = bytearray()
        for value in self._shape.deltas(batch):
            body += _event(value)
            if len(body) > PIECE_BYTES:
                await write(bytes(body))
                await asyncio.sleep(0)
                body.clear()
        if body:
            await write(bytes(body))


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _through(send: Send) -> Write:
    """The pieces of a body as ASGI messages."""

    async def write(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    return write


async def _send_last(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": False})
