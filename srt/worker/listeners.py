"""The TCP listeners of this process that a library opened and keeps: shut to strangers once all have come."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # of Linux's packet filter: `ret 0`
_OPEN = "/proc/self/fd"


class _Program(ctypes.Structure):
    """Linux's `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def listening() -> set[int]:
    """The inodes of the TCP listeners that this process has; none where there is no /proc."""
    return {os.fstat(listener.fileno()).st_ino for listener in _listeners()}


def shut(but: Collection[int] = ()) -> int:
    """Have the kernel drop whatever comes to the TCP listeners that this process has, but to those with the
    inodes `but`: who connects from then on gets no answer. What is connected already goes on.

    How many were shut: none where the system has no such filter, or does not let this process set one.
    """
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = bytes(_Program(1, ctypes.addressof(instructions)))
    count = 0
    for listener in _listeners():
        if os.fstat(listener.fileno()).st_ino not in but:
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
                count += 1
    return count


def _listeners() -> Iterator[socket.socket]:
    """Duplicates of their descriptors, each closed when the next is asked for."""
    with suppress(OSError):
        for name in os.listdir(_OPEN):
            with suppress(OSError), _duplicate(int(name)) as found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if internet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """OSError for what is no socket."""
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        yield found
