"""`serve` in a process of its own, with small roles out of tests/process/roles."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import sapwood

ROLES_FOLDER = Path(__file__).parent / "roles"
ROOT = Path(sapwood.__file__).resolve().parent.parent
IDLE = {
    "server": "role_server", "tokenizer": "role_idle", "grammar": "role_idle", "scheduler": "role_idle",
    "worker": "role_idle",
}  # fmt: skip
PATIENCE = 20.0
FAR = 3600.0
"""Seconds that no test waits."""


def eventually(holds: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Serving:
    """`serve` in a process of its own; every process that it starts carries its mark.

    One that is `eventful` has all its own limits FAR away: what it does in time it does because of an event.
    """

    def __init__(
        self, where: Path, *, roles: dict[str, str], env: dict[str, str], more: dict[str, Any]
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._where = where
        self.temporary = where / "t"
        self.temporary.mkdir(exist_ok=True)
        config = {"port": 0, "drain_timeout": 5.0, **more.pop("config", {})}
        if more.pop("eventful", False):
            config |= {"drain_timeout": FAR, "heartbeat_timeout": FAR}
            more["far"] = FAR
        given = json.dumps({"config": config, "roles": {**IDLE, **roles}, **more})
        path = os.pathsep.join([str(ROLES_FOLDER), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, str(ROLES_FOLDER / "launch_driver.py"), given],
            cwd=where,
            env={**os.environ, **env, "PYTHONPATH": path, "MARK": self.mark, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.output += line

    def prints(self, text: str) -> bool:
        eventually(lambda: text in self.output or self.process.poll() is not None)
        if self.process.poll() is not None:
            self._reader.join(PATIENCE)  # its last words may be still unread
        return text in self.output

    def ready(self) -> Serving:
        assert self.prints("scheduling "), self.output
        return self

    @property
    def port(self) -> int:
        return int(self.output.partition("listening")[2].split()[0].rpartition(":")[2])

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def pid(self, role: str) -> int:
        (found,) = [p.pid for p in self.alive() if p.cmdline()[4:5] == [role]]
        return found

    def go(self) -> None:
        """What the roles wait for that `wait_for_go`."""
        (self._where / "go").touch()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile the launcher sees nothing."""
        launcher = psutil.Process(self.process.pid)
        launcher.suspend()
        try:
            assert eventually(lambda: launcher.status() == psutil.STATUS_STOPPED)
            yield
        finally:
            launcher.resume()

    def connect(self) -> Telling:
        return Telling(self.port)

    def exit_code(self, seconds: float = PATIENCE) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def nothing_left(self, seconds: float = 0.0) -> bool:
        return eventually(lambda: not self.alive(), seconds) and not list(self.temporary.iterdir())


class Telling:
    """A connection to role_server: the lines that it is told."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._lines = self._socket.makefile()

    def line(self) -> dict[str, Any]:
        text = self._lines.readline()
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
