"""A process that the kernel bounds, as it sees itself: what bounded.py has started, with its own id.

It has a socket as standard input, over which frames come and go, and no other; nor has it the server's
environment, where keys may be.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(struct.pack("<I", len(frame)))
    sock.sendall(frame)


def read(sock: socket.socket) -> bytes | None:
    """The next frame; None at the other side's end."""
    head = _exactly(sock, 4)
    return None if head is None else _exactly(sock, struct.unpack("<I", head)[0])


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        count = sock.recv_into(view[have:])
        if not count:
            return None
        have += count
    return bytes(data)


def main(parent: int, serve: Callable[[socket.socket], None]) -> None:
    """Serve until process `parent`, at the other side, hangs up or ends."""
    if not ends_with(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit(resource.RLIMIT_CORE, 0)
    # It may hang up before it has had an answer.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(socket.socket(fileno=0))


def ends_with(parent: int) -> bool:
    """Have the kernel end this process with its parent (with the thread that has started it, to be exact),
    where it can, and also amid a computation. False if the parent has ended before that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def limit(what: int, value: int) -> None:
    """Bound this process (see `resource`), where the system does that."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (value, value))


@contextlib.contextmanager
def limited(cpu_seconds: float) -> Iterator[None]:
    """Kill this process, by SIGPROF, once it has computed for longer: no code in it can put that off."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def memory() -> tuple[int, int]:
    """(address space, resident) bytes now; 0 where the system does not say. (ru_maxrss would count the
    parent's too.)"""
    try:
        with open("/proc/self/statm", "rb") as file:
            total, resident = file.read().split()[:2]
    except OSError:
        return 0, 0
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()
