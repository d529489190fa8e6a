"""ZeroMQ PUSH/PULL between processes: one inbox a process, sends that never block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from sapwood.srt import messages

HIGH_WATER = 10_000
"""Frames that may wait on one connection; beyond that a send is refused."""
FRAME_WEIGHT = 4096
"""A frame ends with the message that makes it this heavy (see `weight`): it is decoded as a whole, and what
comes behind it waits for that."""
READ_BYTES = 2**20
"""After so much a receive ends, for the same reason."""


def address(directory: str, role: str, index: int = 0) -> str:
    """Where the inbox of a process is."""
    return f"ipc://{Path(directory) / f'{role}-{index}'}"


def weight(message: Any) -> int:
    """How much a message holds: the (token, logprob) pairs in it; 1 if it has none."""
    values = getattr(message, "logprobs", None)
    if not values:
        return 1
    return sum(1 + len(v.top) + len(v.chosen) for v in (values.values() if type(values) is dict else values))


def frames(batch: Iterable[Any], most: int | None = None) -> Iterator[list[Any]]:
    """The messages in frames of at most `most`, which end once they weigh FRAME_WEIGHT."""
    frame: list[Any] = []
    weighed = 0
    for message in batch:
        frame.append(message)
        weighed += weight(message)
        if len(frame) == most or weighed >= FRAME_WEIGHT:
            yield frame
            frame, weighed = [], 0
    if frame:
        yield frame


class Inbox:
    """The PULL end: everything that others send to this process."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(directory, role, index))

    def receive(self, timeout: float | None) -> list[Any]:
        """The messages that are here, waiting up to `timeout` seconds (None: for ever) for the first; what
        comes after READ_BYTES of them is left for the next call."""
        received: list[Any] = []
        size = 0
        if self._socket.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999))) == 0:
            return received
        while size < READ_BYTES:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            size += len(frame)
            received += messages.decode(frame)
        return received

    def close(self) -> None:
        self._socket.close()


class AsyncInbox:
    """An Inbox for an asyncio loop."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        import zmq.asyncio  # asyncio takes 4 MB, and only the server has a loop

        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(directory, role, index))

    async def receive(self) -> list[Any]:
        """The messages of the next frame."""
        return messages.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class Outbox:
    """The PUSH end to one process's inbox."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address(directory, role, index))

    def send(self, *batch: Any) -> bool:
        """Send messages as one frame. False, and nothing sent, if the peer's queue is full."""
        try:
            self._socket.send(messages.encode(list(batch)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
