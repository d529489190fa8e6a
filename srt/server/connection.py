"""One HTTP connection: uvicorn's, which here answers what is no request in JSON too, and waits for no one.

What a client may hold without asking for anything is bounded: a head (request line and headers) has 30 s and
64 KiB, and connections above the limit are turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sapwood.srt.errors import ErrorInfo, RequestTimeout, Unavailable
from sapwood.srt.server.reply import STATUS_HEADERS, WRITE, error_value

HEAD_SECONDS = 30.0
WRITE_SECONDS = 120.0
"""How long a reader of a stream may read nothing at all."""
LINGER_SECONDS = 1.0
"""How long what still comes is dropped after a refusal: closing at once could take the answer with it."""
SPARE_DESCRIPTORS = 256
MAX_CONNECTIONS = 16_384


class Connection(H11Protocol):
    """uvicorn's `limit_concurrency` bounds the connections here, and nothing else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        if self._most is not None and len(self.connections) > self._most:
            self._refuse(Unavailable(f"{self._most} connections are open, the most there may be").info())
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None and not self._refused:
            # Part of a head, or what is left of a body that nobody waits for any more.
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def handle_events(self) -> None:
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.response_started and cycle.scope["http_version"] == "1.1":
            scope = cast("dict[str, Any]", cycle.scope)  # which the application has not seen yet
            scope.setdefault("extensions", {})[WRITE] = _writer(cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is being handled."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        code = "headers_too_large" if status == 431 else "invalid_http"
        reason = str(error) if isinstance(error, h11.RemoteProtocolError) else msg
        self._refuse(ErrorInfo(status, "invalid_request_error", code, f"this is no HTTP request: {reason}"))

    def _too_slow(self) -> None:
        self._head_timer = None
        self._refuse(RequestTimeout(f"no request has arrived within {HEAD_SECONDS:g} s").info())

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ErrorInfo) -> None:
        """Answer, if no answer has begun, and close soon."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_value(error))
            headers = {
                **STATUS_HEADERS.get(error.status, {}),
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            response = h11.Response(
                status_code=error.status,
                headers=list(headers.items()),
                reason=HTTPStatus(error.status).phrase,
            )
            with contextlib.suppress(h11.LocalProtocolError):
                for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event))
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _writer(cycle: RequestResponseCycle) -> Callable[[bytes], Awaitable[None]]:
    """Writes a piece of a chunked body that has begun: what `cycle.send` does, in an eighth of the time.

    h11 chunks a body without a length for a client of HTTP/1.1, and keeps no account of its pieces.
    """
    transport, flow = cycle.transport, cycle.flow

    async def write(piece: bytes) -> None:
        if flow.write_paused and not cycle.disconnected:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await flow.drain()
            except TimeoutError:
                transport.abort()  # who keeps a connection open and reads nothing keeps others out
                return
        if not cycle.disconnected:
            transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    return write


def most_connections() -> int:
    """How many connections there may be, with room for the process's own files; raises the soft limit."""
    try:
        import resource
    except ImportError:
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - SPARE_DESCRIPTORS))
