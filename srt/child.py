"""One child process as its launcher sees it: spawned, heard over its wire, ended for certain."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import sapwood
from sapwood.srt.errors import ProcessDied
from sapwood.srt.lifeline import Wire
from sapwood.srt.orders import Beat, Boot, Fatal, Ready

STOP_SECONDS = 2.0
KILL_SECONDS = 5.0


class Child:
    """A process that plays one role. `wake` is called, from any thread, after each thing that it says."""

    def __init__(
        self, boot: Boot, module: str, env: dict[str, str], fds: Sequence[int], wake: Callable[[], None]
    ) -> None:
        self.role = boot.role
        self.name = boot.name
        self.ready: Ready | None = None
        self.gone = False
        self.heard = time.monotonic()
        self.silent_since: float | None = None
        """When it was last heard, while its silence is reported (the launcher's to say)."""
        self._fatal: Fatal | None = None
        self._wake = wake
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "sapwood.srt.lifeline",
            boot.role,
            module,
            str(theirs.fileno()),
            # Only for those who look at the system's list of processes.
            *([f"rank={boot.rank}"] if boot.rank else []),
        ]
        try:
            # A session of its own: Ctrl-C reaches the launcher alone, which ends the others in order.
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._wire = Wire(ours)
        self._wire.write(boot)
        self._listener = threading.Thread(target=self._listen, name=f"hear {self.name}", daemon=True)
        self._listener.start()

    def send(self, message: Any) -> bool:
        """False if the child is gone."""
        return self._wire.write(message)

    def _listen(self) -> None:
        while (message := self._wire.read()) is not None:
            self.heard = time.monotonic()
            if isinstance(message, Beat):
                continue
            if isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, Fatal):
                self._fatal = message
            self._wake()
        self.gone = True
        self._wake()

    def ended(self) -> bool:
        """Whether the process has exited, or has closed its wire, which it only does when exiting."""
        return self.gone or self.process.poll() is not None

    def follows(self) -> bool:
        """Whether it said, once `ended`, that another process had ended before it."""
        self._listener.join(1.0)
        return self._fatal is not None and self._fatal.follows

    def exit_code(self) -> int | None:
        """The exit code once `ended`; None for what closed its wire and goes on all the same."""
        self._wait(1.0)
        return self.process.returncode

    def post_mortem(self) -> ProcessDied:
        """Why it is dead, in words, once `ended`. What still holds on after closing its wire is killed."""
        self._listener.join(1.0)
        if not self._wait(1.0):
            self.kill()
        how = _exit(self.process.returncode)
        said = self._fatal
        if said is None:
            return ProcessDied(f"{self.name} died: {how}")
        if not said.expected:
            return ProcessDied(f"{self.name} died: {how}", details=said.message)
        if self.ready is None:
            return ProcessDied(said.message, expected=True, code=said.code, param=said.param)
        return ProcessDied(f"{self.name} died: {said.message}")

    def kill(self) -> None:
        """SIGKILL, to whatever it may have started too, and wait for the end."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._wait(KILL_SECONDS)

    def _wait(self, seconds: float) -> bool:
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def ask_to_stop(self) -> None:
        """Hang up, which a booted child takes as its end, and SIGTERM for one that is still starting."""
        self._wire.hang_up()
        if self.process.poll() is None:
            self.process.terminate()

    def reap(self, seconds: float) -> None:
        """Wait for the end, at most `seconds`, then kill."""
        if not self._wait(seconds):
            self.kill()
        self._listener.join(1.0)
        self._wire.close()


def stop(children: Sequence[Child], seconds: float = STOP_SECONDS) -> None:
    """End all of them: politely, and by SIGKILL after `seconds`. None is left when this returns."""
    for child in children:
        child.ask_to_stop()
    deadline = time.monotonic() + seconds
    for child in children:
        child.reap(deadline - time.monotonic())


def environment() -> dict[str, str]:
    """The environment of a child: finds sapwood where this process found it.

    No library starts threads of its own; the worker's kernels have theirs.
    """
    env = dict(os.environ)
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env["TOKENIZERS_PARALLELISM"] = "false"
    root = Path(sapwood.__file__).resolve().parent.parent
    if not _installed(root):
        # Last: a repository's root also holds folders named kernels and lang.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(root)]))
    return env


def _installed(root: Path) -> bool:
    """Whether any Python of this prefix finds the sapwood that lies in `root`, wherever it runs."""
    try:
        found = importlib.metadata.distribution("sapwood")
    except importlib.metadata.PackageNotFoundError:
        return False
    if Path(str(found.locate_file("sapwood"))).resolve().parent == root:
        return "site-packages" in root.parts or "dist-packages" in root.parts
    origin = msgspec.json.decode(found.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    return bool(editable) and origin.get("url") == root.as_uri()


def _exit(code: int | None) -> str:
    if code is None:
        return "does not end even by SIGKILL"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else "unknown"
    hint = "; the system may be out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"
