"""Server-sent events, however their bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sapwood.lang.backends.http import sse

STREAMS = [
    (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    (b"data: a\r\n\r\ndata:b\r\n\r\n", [b"a", b"b"]),
    (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    (b": comment\nevent: x\nid: 1\ndata: a\ndata: b\n\n\n\ndata: c", [b"a\nb", b"c"]),
    (b"", []),
    ("data: é\u2028\n\n".encode(), ["é\u2028".encode()]),
]


@pytest.mark.parametrize(("stream", "events"), STREAMS)
def test_events_are_the_same_however_the_bytes_come(stream: bytes, events: list[bytes]) -> None:
    async def cut(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]
            yield b""

    async def listed(size: int) -> list[bytes]:
        return [event async for event in sse(cut(size))]

    for size in range(1, len(stream) + 1):
        assert asyncio.run(listed(size)) == events, size
