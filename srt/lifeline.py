"""The socket pair between the launcher and each child: boot message, heartbeats, commands, and each
other's death. It is the one channel that works when all else has failed.

Run as `python -P -m sapwood.srt.lifeline ROLE MODULE FD`: reads the Boot message and calls MODULE's main.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from sapwood.srt import orders
from sapwood.srt.config import Device
from sapwood.srt.errors import RankLost, SapwoodError
from sapwood.srt.orders import Beat, Boot, Fatal, Ready

ROLES = {
    "server": "sapwood.srt.server.process",
    "tokenizer": "sapwood.srt.tokenizer.process",
    "grammar": "sapwood.srt.grammar.process",
    "scheduler": "sapwood.srt.scheduler.loop",
    "worker": "sapwood.srt.worker.loop",
}
"""Each module has `main(boot: Boot, lifeline: Lifeline) -> None`, which returns on a clean end."""

BEAT_SECONDS = 1.0
"""Or a quarter of the heartbeat timeout, if that is less."""
ORPHAN_SECONDS = 3.0
FATAL_EXIT = 3
PR_SET_PDEATHSIG = 1


class Wire:
    """Length-prefixed messages over one stream socket. `read` returns None at the other side's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def write(self, message: Any) -> bool:
        """False if the other side is gone."""
        frame = orders.encode(message)
        try:
            with self._lock:
                self._sock.sendall(struct.pack("<I", len(frame)) + frame)
        except OSError:
            return False
        return True

    def read(self) -> Any | None:
        try:
            head = self._reader.read(4)
            if len(head) < 4:
                return None
            return orders.decode(self._reader.read(struct.unpack("<I", head)[0]))
        except (OSError, ValueError):
            return None

    def hang_up(self) -> None:
        """End both directions: the other side, and a `read` that waits on this side, see the end at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; only once nobody reads or writes any more."""
        self._reader.close()
        self._sock.close()


class Lifeline:
    """A child's end. Beats from a thread of its own, so that a long computation never looks like death.

    When the launcher hangs up or is gone, `on_orphan` is called (a server ends its streams there) and the
    process exits, at the latest `ORPHAN_SECONDS` later. Commands from the launcher wait in `commands`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.set_inheritable(False)
        self._parent = os.getppid()
        self._orphaned = threading.Lock()
        self._wire = Wire(sock)
        boot = self._wire.read()
        if not isinstance(boot, Boot):
            raise SystemExit(FATAL_EXIT)
        self.boot = boot
        self.on_orphan: Callable[[], None] | None = None
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def ready(
        self,
        facts: dict[str, str] | None = None,
        max_request_tokens: int = 0,
        device: Device | None = None,
    ) -> None:
        """Tell that this process is loaded, and settle its memory as it is then."""
        settle()
        self._wire.write(Ready(facts or {}, max_request_tokens, device))

    def fatal(self, why: str | SapwoodError, expected: bool = False) -> None:
        """Tell why this process cannot go on (see `orders.Fatal`): a traceback, or an error of ours."""
        if isinstance(why, SapwoodError):
            said = Fatal(why.message, True, isinstance(why, RankLost), why.code, why.param)
        else:
            said = Fatal(why, expected)
        self._wire.write(said)

    def _beat(self) -> None:
        # The parent's id is watched too: a process forked off the launcher's would hold the socket open.
        pause = min(BEAT_SECONDS, self.boot.config.heartbeat_timeout / 4)
        while self._wire.write(Beat()) and os.getppid() == self._parent:
            time.sleep(pause)
        self._end()

    def _listen(self) -> None:
        while (message := self._wire.read()) is not None:
            self.commands.put(message)
        self._end()

    def _end(self) -> None:
        if not self._orphaned.acquire(blocking=False):
            return
        limit = threading.Timer(ORPHAN_SECONDS, os._exit, (1,))
        limit.daemon = True
        limit.start()
        try:
            if self.on_orphan is not None:
                self.on_orphan()
            shutil.rmtree(self.boot.directory, ignore_errors=True)
        finally:
            os._exit(1)


def settle() -> None:
    """What is loaded stays: the collector need not look at it again (torch's objects take it a quarter of a
    second, in the midst of a step), and what loading has freed goes back to the system."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)


def _die_with_launcher() -> None:
    """Have the kernel do it, where it can: then a process that is stopped, or computes with the GIL held,
    does not outlive its launcher either. (The launcher's thread, to be exact, which watches to the end.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def main(argv: list[str]) -> int:
    """Boot role `argv[0]`, which module `argv[1]` plays, over the socket with file descriptor `argv[2]`."""
    role, module, fd = argv[0], argv[1], int(argv[2])
    # Ends are told over the wire. A signal to every process of a service (systemd's default) must not
    # take the children from under a launcher that drains. (A handler, as SIG_IGN would outlive an exec.)
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGTERM, _ignore)
    faulthandler.enable()
    if role != "server":  # which first tells its clients
        _die_with_launcher()
    lifeline = Lifeline(socket.socket(fileno=fd))
    try:
        importlib.import_module(module).main(lifeline.boot, lifeline)
    except SapwoodError as e:
        lifeline.fatal(e)
        return FATAL_EXIT
    except Exception:
        lifeline.fatal(traceback.format_exc())
        return FATAL_EXIT
    return 0


if __name__ == "__main__":
    # Under its own name, so that roles which import this module get the same classes.
    from sapwood.srt import lifeline as itself

    status = itself.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
