"""The socket pair between the launcher and each child: boot message, heartbeats, commands, and each
other's death. It is the one channel that works when all else has failed.

Run as `python -P -m sapwood.srt.lifeline ROLE FD`: reads the Boot message and calls the role's main.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from sapwood.srt import messages
from sapwood.srt.errors import SapwoodError
from sapwood.srt.messages import Beat, Boot, Fatal, Ready

ROLES = {
    "server": "sapwood.srt.server.process",
    "tokenizer": "sapwood.srt.tokenizer.process",
    "scheduler": "sapwood.srt.scheduler.loop",
    "worker": "sapwood.srt.worker.loop",
}
"""Each module has `main(boot: Boot, lifeline: Lifeline) -> None`, which returns on a clean end."""

BEAT_SECONDS = 0.5
FATAL_EXIT = 3


class Wire:
    """Length-prefixed messages over one stream socket. `read` returns None at the other side's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def write(self, message: Any) -> bool:
        """False if the other side is gone."""
        frame = messages.encode([message])
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
            return messages.decode(self._reader.read(struct.unpack("<I", head)[0]))[0]
        except (OSError, ValueError):
            return None


class Lifeline:
    """A child's end. Beats from a thread of its own, so that a long computation never looks like death.

    When the launcher is gone, `on_orphan` is called (a server ends its streams there) and then the process
    exits at once. Commands from the launcher wait in `commands`, or go to `on_command` once it is set.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._wire = Wire(sock)
        boot = self._wire.read()
        if not isinstance(boot, Boot):
            raise SystemExit(FATAL_EXIT)
        self.boot = boot
        self.on_orphan: Callable[[], None] | None = None
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def ready(self, facts: dict[str, str] | None = None, max_request_tokens: int = 0) -> None:
        self._wire.write(Ready(facts or {}, max_request_tokens))

    def fatal(self, message: str) -> None:
        self._wire.write(Fatal(message))

    def _beat(self) -> None:
        while self._wire.write(Beat()):
            time.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        while (message := self._wire.read()) is not None:
            self.commands.put(message)
        if self.on_orphan is not None:
            self.on_orphan()
        os._exit(1)


def main(argv: list[str]) -> int:
    """Boot the role `argv[0]` over the socket with file descriptor `argv[1]`."""
    role, fd = argv[0], int(argv[1])
    lifeline = Lifeline(socket.socket(fileno=fd))
    try:
        importlib.import_module(ROLES[role]).main(lifeline.boot, lifeline)
    except SapwoodError as e:
        lifeline.fatal(e.message)
        return FATAL_EXIT
    except Exception:
        lifeline.fatal(f"{role} failed:\n{traceback.format_exc()}")
        return FATAL_EXIT
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
