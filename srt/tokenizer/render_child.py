"""The process in which one chat template renders; the kernel bounds what it may use of time and memory.

Started by isolation.py as `python -P -m sapwood.srt.tokenizer.render_child PARENT`, with its process id and a
socket as standard input: reads a Setup and then Jobs, answers each. It gets neither the server's environment,
where keys may be, nor a socket but that one. It renders one chat after another: what keeps them apart is the
template's sandbox.
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
from collections.abc import Iterator
from typing import Any

import msgspec

from sapwood.srt.errors import BadRequest, ErrorInfo, ModelError, SapwoodError
from sapwood.srt.tokenizer.templates import ChatTemplate

MEMORY_BYTES = 512 * 2**20
KEEP_BYTES = 128 * 2**20
"""A process that holds more than this after a rendering ends, so that the memory goes back."""

_PR_SET_PDEATHSIG = 1


class Setup(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, str]
    cpu_seconds: float


class Job(msgspec.Struct, array_like=True):
    """The arguments of ChatTemplate.render."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final: bool
    kwargs: dict[str, Any]
    tools: list[dict[str, Any]] | None


class Result(msgspec.Struct, array_like=True):
    """`text` is UTF-8 (with surrogates, which the caller refuses). `last`: this process ends now."""

    text: bytes = b""
    error: ErrorInfo | None = None
    wants_parts: bool = False
    last: bool = False


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


def main(parent: int) -> None:
    """Serve until process `parent`, at the other side, hangs up or ends."""
    if not _ends_with(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # It may hang up before it has had an answer.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(socket.socket(fileno=0))


def _ends_with(parent: int) -> bool:
    """Have the kernel end this process with its parent (with the thread that has started it, to be exact),
    where it can, and also amid a rendering. False if the parent has ended before that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def _serve(sock: socket.socket) -> None:
    setup = read(sock)
    if setup is None:
        return
    decoded = msgspec.msgpack.decode(setup, type=Setup)
    template, result = _compile(decoded)
    send(sock, msgspec.msgpack.encode(result))
    if template is None:
        return
    while (frame := read(sock)) is not None:
        result = _render(template, frame, decoded.cpu_seconds)
        result.last = result.last or _held_bytes() > KEEP_BYTES
        send(sock, msgspec.msgpack.encode(result))
        if result.last:
            return


def _compile(setup: Setup) -> tuple[ChatTemplate | None, Result]:
    # Filters of constants run already here.
    with _limited(setup.cpu_seconds):
        try:
            template = ChatTemplate(setup.source, setup.variables)
        except ModelError as e:
            return None, Result(error=e.info())
        except MemoryError:
            return None, Result(error=_too_much().info())
    return template, Result(wants_parts=template.wants_parts)


def _render(template: ChatTemplate, frame: bytes, cpu_seconds: float) -> Result:
    with _limited(cpu_seconds):
        try:
            job = msgspec.msgpack.decode(frame, type=Job)
            text = template.render(
                job.messages, job.add_generation_prompt, job.continue_final, job.kwargs, job.tools
            )
            return Result(text.encode("utf-8", "surrogatepass"))
        except SapwoodError as e:
            return Result(error=e.info())
        except MemoryError:
            return Result(error=_too_much().info(), last=True)
        except Exception as e:
            error = BadRequest(f"the chat template fails on these messages: {type(e).__name__}")
            return Result(error=error.info())


@contextlib.contextmanager
def _limited(cpu_seconds: float) -> Iterator[None]:
    """Kill this process once it has computed for longer: no code in it can put that off."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_much() -> BadRequest:
    return BadRequest(
        f"the chat template needs more than {MEMORY_BYTES // 2**20} MiB on these messages", param="messages"
    )


def _held_bytes() -> int:
    """What is resident now; 0 where the system does not say. (ru_maxrss would count the parent's too.)"""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
