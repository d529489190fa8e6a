"""The launcher: starts the processes, watches them, ends them all when one dies or when it is told to.

    start ──all Ready──► watch ──a death──► Died to the server, 3 s, stop all (exit 1)
      │                    ├────a worker's death, with --restart-worker──► another worker, watch on
      │                    │    (of several ranks one's death is all's: the others are killed)
      │                    └────a signal──► Drain to the server, wait for its end, stop all (exit 0)
      └──a death or a signal──► stop all

`sapwood serve` (srt/serve.py) runs it in its main thread; the offline Engine has a thread for `watch`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from sapwood.srt import child
from sapwood.srt.child import Child
from sapwood.srt.config import Config, Device, ModelSource
from sapwood.srt.errors import ProcessDied
from sapwood.srt.lifeline import ROLES
from sapwood.srt.orders import Boot, Died, Drain, Ready, Restart, Serve, Trouble
from sapwood.srt.socket_folder import SocketFolder

POLL_SECONDS = 1.0
"""Between two looks at the heartbeats; an end, a message and a signal are seen at once."""
SILENT_SECONDS = 3.0
"""A process that is not heard for so long, or half the heartbeat timeout if that is less, is reported."""
MAX_RESTARTS = 3
RESTART_SECONDS = 60.0
"""So many workers are replaced within so long; one more death is the end."""
FAREWELL_SECONDS = 3.0
DRAIN_GRACE_SECONDS = 5.0
ORDER = ("worker", "grammar", "scheduler", "tokenizer", "server")
"""Slowest to load first."""
ENGINE_ROLES = {name: module for name, module in ROLES.items() if name != "server"}

logger = logging.getLogger("sapwood.launch")


class Interrupted(BaseException):
    """The launcher was told to stop (`Launcher.interrupt`). Like KeyboardInterrupt, no error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Launcher:
    """The processes of one runtime. A context manager: on leaving it, whatever happened, none is left.

    `roles` maps each role to its module; with a role "server", `listener` is the socket that it accepts on.
    `on_serve` hears when the cache has begun empty again.
    `start`, `watch`, `drain` and `farewell` belong to one thread; `interrupt` may be called from any thread
    and from a signal handler.
    """

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        roles: Mapping[str, str] = ROLES,
        listener: socket.socket | None = None,
        on_serve: Callable[[Serve], object] = lambda serve: None,
    ) -> None:
        self._config = config
        self._source = source
        self._roles = roles
        self._listener = listener
        self._on_serve = on_serve
        self._children: list[Child] = []
        # Signal handlers put into it too: SimpleQueue.put is reentrant.
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._pause = min(POLL_SECONDS, config.heartbeat_timeout / 5)
        self._patience = min(SILENT_SECONDS, config.heartbeat_timeout / 2)
        self._checked = time.monotonic()
        self._replaces = False
        """Whether a worker that dies now is replaced."""
        self._replaced: deque[float] = deque(maxlen=MAX_RESTARTS)
        """When that was last done."""
        self._workers = 1
        self._lost = ""
        """What has become of the worker that is being replaced."""
        self._begun: Ready | None = None
        """What the scheduler said when it last began; None before all have started."""
        self._trouble = ""
        """What the server was told last."""
        self._owner = os.getpid()
        self._folder: SocketFolder | None = None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Make the folder of the sockets, `directory`, which `close` removes. `start` does it if need be.

        Raises ConfigError.
        """
        self._folder = SocketFolder()

    @property
    def directory(self) -> str:
        """Of the sockets; empty before `prepare`."""
        return self._folder.path if self._folder else ""

    def start(self) -> Serve:
        """Start every process and wait until all are ready. Raises ProcessDied or Interrupted.

        The calling thread must live on: when it ends, so do the processes.
        """
        if not self.directory:
            self.prepare()
        # All at once, so that their imports overlap.
        for role in sorted(self._roles, key=ORDER.index):
            if role == "worker":
                self._spawn_worker(0)
            else:
                for index in range(self._config.tokenizer_workers if role == "tokenizer" else 1):
                    self._spawn(role, index)
        if self._listener is not None:
            # The server has its own copy: when it closes that one, the port is free.
            self._listener.close()
        self._run_until(lambda: all(c.ready is not None for c in self._children))
        self._replaces = self._config.restart_worker
        self._begun = self._scheduler_ready()
        serve = self._summary()
        if serve.device == "cuda":
            # All is sized for it: a worker that is replaced must not be one on the CPU, if the GPU has gone.
            self._config = self._config.only_on("cuda")
        self._tell("server", serve)
        return serve

    def _spawn_worker(self, index: int) -> None:
        """All of its ranks, which find each other as they start."""
        for rank in range(self._config.tensor_parallel_size):
            self._spawn("worker", index, rank)

    def _spawn(self, role: str, index: int, rank: int = 0) -> None:
        env = child.environment()
        fds = []
        if role == "server" and self._listener is not None:
            fds = [self._listener.fileno()]
            env["SAPWOOD_LISTEN_FD"] = str(fds[0])
        boot = Boot(self._config, self._source, self.directory, role, index, rank)
        module = self._roles[role]
        self._children.append(Child(boot, module, env, fds, lambda: self._events.put(None)))

    def _named(self, role: str) -> list[Child]:
        return [c for c in self._children if c.role == role]

    def _tell(self, role: str, order: Serve | Restart | Trouble) -> None:
        for c in self._named(role):
            c.send(order)

    def _summary(self) -> Serve:
        facts: dict[str, str] = {}
        limit = 0
        device: Device = "cpu"
        for c in self._children:
            ready = c.ready or Ready()
            facts |= ready.facts
            device = ready.device or device
            # The scheduler says it, and then the server, what shared prefixes leave.
            limit = ready.max_request_tokens or limit
        return Serve(limit, facts, device)

    def watch(self) -> None:
        """Watch until told to stop. Raises ProcessDied when a process ends, or is silent for too long, and
        Interrupted. With --restart-worker a worker is replaced instead, but not for ever."""
        self._run_until(lambda: False)

    def drain(self, seconds: float) -> bool:
        """Tell the server to admit nothing more and to end within `seconds`; True once it has, with code 0.

        Raises ProcessDied if another process dies meanwhile, and Interrupted.
        """
        self._replaces = False
        (server,) = self._named("server")
        server.send(Drain(seconds))
        self._children.remove(server)
        try:
            deadline = time.monotonic() + seconds + DRAIN_GRACE_SECONDS
            return self._run_until(server.ended, deadline) and server.exit_code() == 0
        finally:
            self._children.append(server)

    def farewell(self, message: str) -> None:
        """After a death: let the server end every request with an error, for at most 3 s."""
        for server in self._named("server"):
            if server.send(Died(message)):
                deadline = time.monotonic() + FAREWELL_SECONDS
                while not server.ended() and time.monotonic() < deadline:
                    time.sleep(0.02)

    def interrupt(self, number: int = 0) -> None:
        """Make the thread that starts, watches or drains raise Interrupted(number)."""
        self._events.put(number)

    def close(self) -> None:
        """End every process and remove the folder of the sockets. Does nothing in a fork of the launcher."""
        if os.getpid() != self._owner:
            return
        with contextlib.ExitStack() as stack:
            if self._folder is not None:
                stack.callback(self._folder.remove)
            if self._listener is not None:
                stack.callback(self._listener.close)
            children, self._children = self._children, []
            child.stop(children)

    def _run_until(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Look after the processes until `done()`; False if the deadline comes first."""
        while not done():
            wait = self._pause if deadline is None else min(self._pause, deadline - time.monotonic())
            if wait <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                number = self._events.get(timeout=wait)
                if number is not None:
                    raise Interrupted(number)
            self._check()
        return True

    def _check(self) -> None:
        # Whose end comes of another's is told of last: then that one is among them, however late it is seen.
        for c in sorted((c for c in self._children if c.ended()), key=Child.follows):
            # Several ranks of a worker may be dead, but it is replaced once.
            if c in self._children:
                self._lose(c, c.post_mortem())
        self._excuse()
        limit = self._config.heartbeat_timeout
        for c in list(self._children):
            if c in self._children and self._checked - c.heard > limit:
                c.kill()
                self._lose(
                    c, ProcessDied(f"{c.name} was killed: no heartbeat for {limit:g} s (--heartbeat-timeout)")
                )
        self._report_silence()
        self._welcome()
        self._tell_trouble()

    def _excuse(self) -> None:
        """Time for which this process itself was stopped or starved is nobody's silence: what the children
        said meanwhile is still unread."""
        now = time.monotonic()
        absent = now - self._checked - self._pause
        if absent > 0:
            for c in self._children:
                c.heard = min(now, c.heard + absent)
        self._checked = now

    def _report_silence(self) -> None:
        for c in self._children:
            silent = c.ready is not None and self._checked - c.heard > self._patience
            if silent and c.silent_since is None:
                c.silent_since = c.heard
                logger.warning(
                    "%s; it is killed after %g s (--heartbeat-timeout)",
                    self._silence(c),
                    self._config.heartbeat_timeout,
                )
            elif c.silent_since is not None and not silent:
                logger.warning("%s is heard again after %.1f s", c.name, c.heard - c.silent_since)
                c.silent_since = None

    def _silence(self, c: Child) -> str:
        return f"{c.name} has not been heard for {self._patience:g} s"

    def _tell_trouble(self) -> None:
        """Tell the server what is wrong at present, if that has changed."""
        silent = [self._silence(c) for c in self._children if c.silent_since is not None]
        trouble = "; ".join([self._lost, *silent] if self._lost else silent)
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell("server", Trouble(trouble))

    def _lose(self, c: Child, error: ProcessDied) -> None:
        """`c` has ended: begin to replace it, if it is a worker that is to be. Raises `error` if not."""
        # One that dies before it was ready would do so again and again.
        if not self._replaces or c.role != "worker" or c.ready is None:
            raise error
        now = time.monotonic()
        if len(self._replaced) == MAX_RESTARTS and now - self._replaced[0] < RESTART_SECONDS:
            raise ProcessDied(
                f"{error.message}; {MAX_RESTARTS} others had been replaced within {RESTART_SECONDS:g} s",
                details=error.details,
            )
        self._replaced.append(now)
        ranks = self._named("worker")
        self._children = [c for c in self._children if c not in ranks]
        for rank in ranks:
            # Not politely: whom the launcher hangs up on takes the folder of the sockets along.
            rank.kill()
        child.stop(ranks)
        details = f"\n{error.details.rstrip()}" if error.details else ""
        logger.error("%s; another one is being started (--restart-worker)%s", error.message, details)
        self._lost = f"{error.message}; another one is being started"
        for role in ("scheduler", "server"):
            self._tell(role, Restart(self._workers, error.message))
        self._spawn_worker(self._workers)
        self._workers += 1

    def _welcome(self) -> None:
        """Tell when the scheduler has begun anew, with another worker or of its own accord."""
        begun = self._scheduler_ready()
        if begun is self._begun or self._begun is None or any(c.ready is None for c in self._children):
            return
        self._begun = begun
        if self._lost:
            self._lost = ""
            logger.warning("%s is ready: requests are served again", self._named("worker")[0].name)
        serve = self._summary()
        self._tell("server", serve)
        self._on_serve(serve)

    def _scheduler_ready(self) -> Ready | None:
        return next((c.ready for c in self._named("scheduler")), None)
