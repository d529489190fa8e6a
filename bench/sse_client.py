"""A streaming HTTP/1.1 client that costs next to nothing per token: it shares the cores with the server.

While an answer runs, each piece is only kept with the time it came; chunks, events and JSON are taken apart
afterwards. One connection per request, since some servers drop a kept-alive one after a streamed answer.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Answer:
    """What a request got. Times are in seconds after it was sent; `times` are those of the pieces in `texts`.

    `tokens` and `prompt_tokens` are the server's counts if `counted`, else `tokens` is the number of pieces.
    """

    error: str | None = None
    text: str = ""
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: float = 0.0
    counted: bool = False
    tokens: int = 0
    prompt_tokens: int = 0
    cached: int | None = None

    @property
    def first(self) -> float:
        return self.times[0] if self.times else self.end


class Exchange(asyncio.Protocol):
    """One request and its answer as raw pieces."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._pieces: list[tuple[float, bytes]] = []
        self._length: int | None = None
        self._headers_seen = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = time.perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if not self._headers_seen:
            self._read_headers()
        if self._length is not None:
            self._length -= len(data)
            if self._length <= 0:
                self._finish()
        elif data.endswith(LAST_CHUNK) and is_whole(self.raw()):
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def answer(self) -> Answer:
        """Takes the answer apart; what came of an unfinished one counts as an error."""
        return read_answer(self._pieces, self.sent)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def raw(self) -> bytes:
        return b"".join(data for _, data in self._pieces)

    def _read_headers(self) -> None:
        raw = self.raw()
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return
        self._headers_seen = True
        length = _headers(raw[:end]).get("content-length")
        if length is not None and length.isdecimal():
            last = len(self._pieces[-1][1])  # data_received takes this piece off again
            self._length = int(length) + end + 4 - (len(raw) - last)


def request_bytes(url: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def ask(url: str, path: str, body: dict[str, Any]) -> Exchange:
    """Send one request and wait for the whole answer. Raises OSError if there is no connection."""
    where = urlsplit(url)
    exchange = Exchange(request_bytes(url, path, body))
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: exchange, where.hostname, where.port or 80)
        await exchange.done
    finally:
        exchange.close()
    return exchange


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each chunk's data from `at` on, the empty last one included, as far as there are bytes.

    Raises ValueError where a chunk has no size.
    """
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        begin, end = line + 2, line + 2 + size
        if end + 2 > len(raw):
            return
        yield begin, end
        if size == 0:
            return
        at = end + 2


def is_whole(raw: bytes) -> bool:
    """Does the last chunk of this chunked answer end it? A malformed one ends with its connection."""
    try:
        spans = list(_chunks(raw, raw.index(b"\r\n\r\n") + 4))
    except ValueError:
        return False
    return bool(spans) and spans[-1][0] == spans[-1][1]


def read_answer(pieces: list[tuple[float, bytes]], sent: float) -> Answer:
    """The answer in `pieces` of (time, bytes); every fault of the server's is its `error`."""
    raw = b"".join(data for _, data in pieces)
    answer = Answer(end=(pieces[-1][0] - sent) if pieces else 0.0)
    head = raw.find(b"\r\n\r\n")
    if head < 0:
        answer.error = "no answer: the connection was closed"
        return answer
    protocol, _, status = raw[: raw.index(b"\r\n")].decode("latin-1").partition(" ")
    status = status.partition(" ")[0]
    if not protocol.startswith("HTTP/") or not status.isdecimal():
        answer.error = "malformed status line"
        return answer
    headers = _headers(raw[:head])
    spans = [(head + 4, len(raw))]
    if headers.get("transfer-encoding", "").lower() == "chunked":
        try:
            spans = list(_chunks(raw, head + 4))
        except ValueError:
            answer.error = "malformed chunked answer"
            return answer
    if status != "200":
        body = b"".join(raw[begin:end] for begin, end in spans)
        answer.error = f"status {status}: {body[:300].decode(errors='replace')}"
        return answer
    ends, at = [], 0
    for _, data in pieces:
        at += len(data)
        ends.append(at)
    lines = ((pieces[bisect.bisect_left(ends, at)][0] - sent, line) for at, line in _lines(raw, spans))
    try:
        _read_events(answer, lines)
    except (ValueError, TypeError, AttributeError) as e:  # no JSON, or of another shape
        answer.error = f"malformed event: {e}"
    return answer


def _lines(raw: bytes, spans: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Each line of the body, and how many raw bytes must have come before it is whole."""
    rest = b""
    for begin, end in spans:
        at = begin
        while (newline := raw.find(b"\n", at, end)) >= 0:
            yield newline + 1, rest + raw[at:newline]
            rest, at = b"", newline + 1
        rest += raw[at:end]


def _read_events(answer: Answer, lines: Iterator[tuple[float, bytes]]) -> None:
    texts = answer.texts
    finished = False
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        event = json.loads(data)
        if event.get("error"):
            answer.error = str(event["error"])[:300]
            return
        _read_usage(answer, event)
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                texts.append(text)
                answer.times.append(at)
            if choice.get("finish_reason"):
                finished = True
            answer.end = at
    answer.text = "".join(texts)
    if not answer.counted:
        answer.tokens = len(texts)
    if not finished:
        answer.error = "the answer broke off"


def _read_usage(answer: Answer, event: dict[str, Any]) -> None:
    if usage := event.get("usage"):
        answer.counted = True
        answer.tokens = usage.get("completion_tokens") or 0
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            answer.cached = cached
    if answer.cached is None and (timings := event.get("timings")):  # llama.cpp's own count
        answer.cached = timings.get("cache_n")
