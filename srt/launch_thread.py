"""A launcher in a thread of its own, for a Python program that goes on beside its runtime."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
from collections.abc import Callable, Mapping

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ProcessDied, Unavailable, at_start
from sapwood.srt.launch import Interrupted, Launcher
from sapwood.srt.orders import Serve

JOIN_SECONDS = 15.0


class LaunchThread:
    """Starts, watches and ends the processes of one runtime.

    `launch` returns once they are ready. In the thread, `on_serve` hears when the cache has begun empty
    again, and `on_death` of a death later on, after which none is left. `close` ends them, and so does the
    end of this program, whatever ended it. With a role "server", `listener` is the socket that it accepts on.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        roles: Mapping[str, str],
        on_death: Callable[[ProcessDied], object],
        listener: socket.socket | None = None,
        on_serve: Callable[[Serve], object] = lambda serve: None,
    ) -> None:
        self._owner = os.getpid()
        self._on_death = on_death
        self._ready: concurrent.futures.Future[Serve] = concurrent.futures.Future()
        self._launcher = Launcher(config, source, roles, listener, on_serve)
        self._launcher.prepare()
        self._thread = threading.Thread(target=self._watch, name="sapwood launcher", daemon=True)

    @property
    def directory(self) -> str:
        """The folder of the processes' sockets."""
        return self._launcher.directory

    def launch(self) -> Serve:
        """Start the processes. If one cannot start raises ConfigError or ModelError where that says what the
        user can mend, else ProcessDied; then call `close`."""
        self._thread.start()
        try:
            return self._ready.result()
        except ProcessDied as e:
            raise at_start(e) from None

    def close(self) -> None:
        """End the processes and the thread. Safe to repeat, in any thread; does nothing in a fork."""
        if os.getpid() != self._owner:
            return
        self._launcher.interrupt()
        # The collector may run a finalizer in any thread, this one among them.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        self._launcher.close()

    def _watch(self) -> None:
        """The one thread that starts, watches and ends the processes."""
        with self._launcher:
            try:
                self._ready.set_result(self._launcher.start())
                self._launcher.watch()
            except Interrupted:
                if not self._ready.done():
                    self._ready.set_exception(closed())
            except Exception as e:
                if not self._ready.done():
                    self._ready.set_exception(e)
                    return
                error = e if isinstance(e, ProcessDied) else ProcessDied(f"the launcher failed: {e!r}")
                self._on_death(error)
                self._launcher.farewell(error.message)


def closed() -> Unavailable:
    """The error of whatever comes after the end."""
    return Unavailable("the engine has been shut down", code="closed")
