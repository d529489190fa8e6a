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
READ_MESSAGES = 256
"""After so many a receive of the server ends: those who read what came run first."""


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
        self._socket = _bound(directory, role, index)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._watched: list[int] = []
        self.timed_out = False
        """Whether the last `receive` ended as its time was up, and not as there was something."""

    def watch(self, *descriptors: int | None) -> None:
        """Have `receive` return, with nothing, when one of these file descriptors too can be read, and no
        more when one of those before can (None: none)."""
        for descriptor in self._watched:
            self._poller.unregister(descriptor)
        self._watched = [descriptor for descriptor in descriptors if descriptor is not None]
        for descriptor in self._watched:
            self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Any]:
        """The messages that are here, waiting up to `timeout` seconds (None: for ever) for the first; what
        comes after READ_BYTES of them is left for the next call."""
        ready = self._poller.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        self.timed_out = not ready
        if not ready:
            return []
        return _waiting(self._socket, HIGH_WATER, HIGH_WATER)

    def close(self) -> None:
        self._socket.close()


class AsyncInbox:
    """An Inbox for the running asyncio loop.

    It waits for the socket's own file descriptor: zmq.asyncio's futures cost twice as much a frame.
    """

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        import asyncio  # which takes 4 MB, and only the server has a loop

        self._socket = _bound(directory, role, index)
        self._loop = asyncio.get_running_loop()
        self._signalled = asyncio.Event()
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._signalled.set)

    async def receive(self, most: int = 1) -> list[Any]:
        """The messages of the frames that are here, at most `most` of them, waiting for the first."""
        while True:
            # The descriptor tells of news only after all has been read: so look first, wait then.
            self._signalled.clear()
            if received := _waiting(self._socket, most, READ_MESSAGES):
                return received
            await self._signalled.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()


def _bound(directory: str, role: str, index: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address(directory, role, index))
    return socket


def _waiting(socket: zmq.Socket[bytes], frames: int, enough: int) -> list[Any]:
    """The messages of up to so many frames that have arrived. A frame that makes them READ_BYTES, or `enough`
    messages, is the last."""
    received: list[Any] = []
    size = 0
    for _ in range(frames):
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
        size += len(frame)
        received += messages.decode(frame)
        if size >= READ_BYTES or len(received) >= enough:
            break
    return received


class Outbox:
    """The PUSH end to one process's inbox."""

    def __init__(self, directory: str, role: str, index: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address(directory, role, index))

    def send(self, *batch: Any) -> bool:
        """Send messages as one frame. False, and nothing sent, if the peer's queue is full."""
        return self.send_frame(messages.encode(list(batch)))

    def send_frame(self, frame: bytes) -> bool:
        """Send a list of messages that is encoded already, as `send` does."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
