"""ZeroMQ PUSH/PULL between processes: one inbox a process, sends that never block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from sapwood.srt import messages

HIGH_WATER = 10_000
"""Frames that may wait on one connection; beyond that a send is refused."""


def address(directory: str, role: str, index: int = 0) -> str:
    """Where the inbox of a process is."""
    return f"ipc://{Path(directory) / f'{role}-{index}'}"


class Inbox:
    """The PULL end: everything that others send to this process."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(directory, role, index))

    def receive(self, timeout: float | None) -> list[Any]:
        """Every message that is here, waiting up to `timeout` seconds (None: for ever) for the first."""
        received: list[Any] = []
        if self._socket.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999))) == 0:
            return received
        while True:
            try:
                received += messages.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return received

    def close(self) -> None:
        self._socket.close()


class AsyncInbox:
    """An Inbox for an asyncio loop."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
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
