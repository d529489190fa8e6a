"""The server process: HTTP on the launcher's socket, commands from the launcher, an orderly end.

loading ──Serve──► ready ──Drain──► draining ──all ended, or aborted at the deadline──► exit 0
   └─────────────────┴────Died, or the launcher is gone──► every stream gets its error ──► exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sapwood.srt import log
from sapwood.srt.client import Client
from sapwood.srt.errors import ConfigError, ProcessDied, Unavailable
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.metrics import Metrics
from sapwood.srt.orders import Boot, Died, Drain, Restart, Serve, Trouble
from sapwood.srt.server import app, formats, request_log, shared_prefixes, throughput
from sapwood.srt.server.connection import Connection, most_connections
from sapwood.srt.server.request_log import RequestLog
from sapwood.srt.server.service import Service

LISTEN_FD = "SAPWOOD_LISTEN_FD"
ABORT_SECONDS = 1.5
FLUSH_SECONDS = 1.5
ORPHAN_SECONDS = 2.0
TICK_SECONDS = 1.0
LINGER_SECONDS = 1.0
"""How long a server whose runtime has died still answers 503 before it ends."""


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Serve on the socket whose file descriptor is in SAPWOOD_LISTEN_FD until told to end."""
    log.set_up("server", boot.config.log_level, boot.config.log_format)
    throughput.logger.disabled = not boot.config.log_stats
    if boot.config.log_requests:
        # Asked for by name, whatever else is to be logged.
        request_log.logger.setLevel(logging.INFO)
    fd = os.environ.get(LISTEN_FD)
    if fd is None or not fd.isdecimal():
        raise ConfigError(f"{LISTEN_FD} must be the descriptor of a listening socket, got {fd!r}")
    listener = socket.socket(fileno=int(fd))
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(Server(boot, lifeline).run(listener))


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def listening(application: ASGIApp) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        application,
        # One parser with known bounds, whatever else is installed.
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=most_connections(),
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )


class Listener(uvicorn.Server):
    """uvicorn without signal handlers, and without its ten looks a second at whether it should exit: ends are
    told over the lifeline, to `leave`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Stop listening, and end when every response has been sent."""
        self.should_exit = True
        self._left.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which renews the Date header
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), TICK_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def flushed(self, timeout: float) -> bool:
        """Wait until every response in progress has been sent; False if one has not within `timeout`."""
        deadline = time.monotonic() + timeout
        while self.server_state.tasks:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True


class Server:
    """Everything that the process holds, on one asyncio loop."""

    def __init__(self, boot: Boot, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._metrics = Metrics()
        requests = RequestLog(self._metrics, enabled=boot.config.log_requests)
        self._client = Client(boot.config, boot.directory, requests)
        self._metrics.follow(lambda: self._client.latest_stats, lambda: self._client.grammar_stats)
        self._service = Service(boot.config, boot.source, self._client)
        self._service.requests = requests
        self._listener = Listener(listening(app.create(self._service, self._metrics)))
        self._ending: asyncio.Task[None] | None = None
        self._prefixes = shared_prefixes.read(self._service)
        self._listing: asyncio.Task[None] | None = None

    async def run(self, sock: socket.socket) -> None:
        """Serve until drained, or until the runtime has died."""
        self._loop = asyncio.get_running_loop()
        await self._client.start()
        serving = asyncio.create_task(self._listener.serve(sockets=[sock]))
        while not self._listener.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            await serving
            raise ConfigError("the server could not begin to listen")
        self._lifeline.on_orphan = self._orphaned
        threading.Thread(target=self._hear, name="commands", daemon=True).start()
        facts = await shared_prefixes.compute(self._service, self._prefixes)
        facts |= formats.facts(self._service.config, self._service.source)
        self._lifeline.ready(facts, self._service.max_request_tokens)
        reporting = asyncio.create_task(throughput.report(lambda: self._client.latest_stats))
        await serving
        reporting.cancel()
        await self._client.close()

    def _hear(self) -> None:
        """Runs in a thread of its own: hands the launcher's commands to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while True:
                self._loop.call_soon_threadsafe(self._obey, self._lifeline.commands.get())

    def _obey(self, command: Any) -> None:
        if isinstance(command, Serve):
            self._service.take(command)
            if self._service.state == "loading":
                self._service.state = "ready"
            elif self._prefixes:
                again = shared_prefixes.compute_again(self._service, self._prefixes)
                self._listing = asyncio.create_task(again)
        elif isinstance(command, Trouble):
            self._service.trouble = command.message
        elif isinstance(command, Restart):
            self._metrics.on_restart()
        elif isinstance(command, Died):
            self._fail(command.message)
            self._end(self._farewell(LINGER_SECONDS))
        elif isinstance(command, Drain):
            self._end(self._drain(command.seconds))

    def _fail(self, message: str) -> None:
        self._client.fail_all(ProcessDied(message).info())

    def _end(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to end; what came first is cut short by what comes later."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(work)
        return self._ending

    async def _drain(self, seconds: float) -> None:
        self._service.state = "draining"
        if not await self._client.idle(seconds):
            self._client.abort_all()
            if not await self._client.idle(ABORT_SECONDS):
                self._client.fail_all(Unavailable("the server is shutting down").info())
        self._listener.leave()

    async def _farewell(self, linger: float) -> None:
        await self._listener.flushed(FLUSH_SECONDS)
        await asyncio.sleep(linger)
        self._listener.leave()

    def _orphaned(self) -> None:
        """Runs in the lifeline's thread when the launcher is gone; the process exits when it returns."""
        told = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._say_farewell, told)
            told.wait(ORPHAN_SECONDS)

    def _say_farewell(self, told: threading.Event) -> None:
        self._fail("the server has been stopped: its launcher has ended")
        self._end(self._farewell(linger=0.05)).add_done_callback(lambda _task: told.set())
