"""A process for work that may take for ever or all memory, which only the kernel can bound, as its parent
sees it: started with next to no environment, spoken to in frames, killed when it is too much (see
bounded_child.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import sapwood
from sapwood.srt import bounded_child
from sapwood.srt.errors import Unavailable

_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


class BoundedProcess:
    """A process that runs `module`, which answers within `seconds`; it ends with this object, at the latest.

    `what` it is for is told in errors. Raises Unavailable if the system has no process to give.
    """

    def __init__(self, module: str, what: str, seconds: float) -> None:
        self._socket, self._process = _start(module, what, seconds)
        self._end = weakref.finalize(self, _end, self._socket, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        """What can be read when it has an answer, or has ended."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Raises OSError if it is gone, TimeoutError if it does not read."""
        bounded_child.send(self._socket, frame)

    def read(self) -> bytes | None:
        """The next frame, None at its end; raises OSError, TimeoutError if there is none in time."""
        return bounded_child.read(self._socket)

    def exit_code(self) -> int | None:
        """As Popen.returncode, once it has hung up; None for one that goes on all the same."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return self._process.returncode

    def break_off(self) -> None:
        """Have a `read` in another thread see its end at once. (Its socket is that thread's to close.)"""
        self._process.kill()

    def kill(self) -> None:
        self._end()


def _start(module: str, what: str, seconds: float) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process and our end of its socket."""
    ours: socket.socket | None = None
    try:
        ours, theirs = socket.socketpair()
        ours.settimeout(seconds)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment(),
            )
    except OSError as e:
        if ours is not None:
            ours.close()
        raise no_process(what, e.strerror or type(e).__name__) from None
    return ours, process


def no_process(what: str, reason: str) -> Unavailable:
    return Unavailable(f"no process for {what} can be started now: {reason}")


def _end(sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
    sock.close()
    process.kill()
    process.wait()


def environment() -> dict[str, str]:
    """Only what Python needs: keys of the server may be in its environment. No library starts threads."""
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    root = str(Path(sapwood.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), root]))
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return env
