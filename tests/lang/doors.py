"""Runtimes that answer what a test has scripted, and note what they were asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


class ScriptedDoor:
    """A Door whose answers and streams are taken in order; an exception among them is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = 0

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((path, body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.asked.append((path, body))
        try:
            for event in self.answers.pop(0):
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed += 1

    @property
    def body(self) -> dict[str, Any]:
        """Of the last question."""
        return self.asked[-1][1]


@dataclass
class Request:
    """What a client has sent, and how to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def answer(self, value: Any, status: int = 200) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
        self.writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head)
        await self.writer.drain()

    async def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
        await self.writer.drain()

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def events(self, *values: Any, done: bool = True) -> None:
        """A whole stream of them."""
        await self.begin_stream()
        for value in values:
            await self.piece(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")
        if done:
            await self.piece(b"data: [DONE]\n\n")
        await self.end_stream()


Handler = Callable[[Request], Awaitable[None]]


@dataclass
class Web:
    """An HTTP/1.1 server on 127.0.0.1 in a thread of its own. `gone`: set when a client has left before its
    answer."""

    handler: Handler
    url: str = ""
    asked: list[Request] = field(default_factory=list)
    connections: int = 0
    gone: threading.Event = field(default_factory=threading.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while (request := await _read(reader, writer)) is not None:
                self.asked.append(request)
                await self.handler(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        except asyncio.CancelledError:
            pass  # by the end of the test, of which a streams' callback would complain
        finally:
            writer.close()

    async def wait_for_leave(self, request: Request) -> None:
        """Answers nothing until the client has closed its connection."""
        assert await request.reader.read(1) == b""
        self.gone.set()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    line = await reader.readline()
    if not line:
        return None
    method, path, _version = line.decode().split()
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.strip().lower()] = value.strip()
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(data) if data else None, writer, reader)


@contextlib.contextmanager
def web(handler: Handler | None = None) -> Iterator[Web]:
    """A server that answers by `handler`, which may be set later."""

    async def unset(request: Request) -> None:
        raise AssertionError("no handler")

    server = Web(handler or unset)
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=2048)

    listener = loop.run_until_complete(start())
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def stop() -> None:
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
