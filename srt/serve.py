"""`sapwood serve`: the launcher with HTTP, from the listening socket to the exit code."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import sapwood
from sapwood.srt import log
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError, ProcessDied
from sapwood.srt.launch import Interrupted, Launcher
from sapwood.srt.lifeline import ROLES

BACKLOG = 2048


def serve(config: Config, resolve: Callable[[Config], ModelSource], roles: Mapping[str, str] = ROLES) -> int:
    """Serve the model that `resolve` finds until told to stop; returns the exit code.

    0 after a first SIGTERM or SIGINT: running requests get `drain_timeout` seconds, during start-up it ends
    at once. 143 or 130 after a second one, which cuts them off. 1 when a process dies (a worker with
    --restart-worker: too often), or the server does not end in time. 2 when a process refuses its flags
    or its model. Raises ConfigError and ModelError before anything is started.
    """
    log.set_up("launcher", config.log_level, config.log_format)
    began = time.monotonic()
    signals = _Signals(_raise)
    try:
        # The port first of all: whoever is second on it learns that at once.
        with signals.caught(), listen(config.host, config.port) as listener:
            source = resolve(config)
            chosen = _chosen(config, source, listener.getsockname()[1])
            _warn_if_open(config, listener.getsockname()[0])
            with Launcher(config, source, roles, listener) as launcher:
                signals.to = launcher.interrupt
                return _supervise(launcher, config, chosen, began)
    except Interrupted:
        return 0


def _supervise(launcher: Launcher, config: Config, chosen: dict[str, str], began: float) -> int:
    try:
        ready = launcher.start()
        _say(
            f"sapwood {sapwood.__version__} is ready after {time.monotonic() - began:.1f} s",
            *_table({**chosen, **ready.facts, "scheduling": _scheduling(config.on(ready.device))}),
        )
    except Interrupted:
        return 0
    except ProcessDied as e:
        _complain(e)
        return 2 if e.expected else 1
    try:
        return _watch(launcher, config)
    except ProcessDied as e:
        _complain(e)
        launcher.farewell(e.message)
        return 1


def _watch(launcher: Launcher, config: Config) -> int:
    try:
        launcher.watch()
    except Interrupted as first:
        _say(
            f"{signal.Signals(first.number).name}: finishing what runs, at most {config.drain_timeout:g} s; "
            "once more to stop at once"
        )
    try:
        return 0 if launcher.drain(config.drain_timeout) else 1
    except Interrupted as second:
        return 128 + second.number


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port` (0: any free one). Raises ConfigError."""
    try:
        family, kind, protocol, _name, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise ConfigError(f"--host {host!r} is no address to listen on: {e.strerror}", param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        # Two sockets may be bound to one port as long as neither listens.
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {e.strerror}; is another server running? "
            "(--port 0 takes a free one)",
            param="port",
        ) from None
    return listener


class _Signals:
    """SIGINT and SIGTERM go to `to`, which may be changed."""

    def __init__(self, to: Callable[[int], None]) -> None:
        self.to = to

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._handle) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.to(number)


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"


def _raise(number: int) -> None:
    raise Interrupted(number)


def _chosen(config: Config, source: ModelSource, port: int) -> dict[str, str]:
    """What is known without the processes."""
    name = config.served_model_name or source.name
    return {
        "listening": url(config.host, port),
        "model": f"{name} ({source.architecture}, {source.format}): {source.path}",
    }


def _warn_if_open(config: Config, address: str) -> None:
    if config.api_key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        with contextlib.suppress(OSError):
            print(
                f"sapwood: warning: whoever reaches {address} may use this server, as it has no --api-key "
                "(better set as SAPWOOD_API_KEY)",
                file=sys.stderr,
                flush=True,
            )


def _scheduling(config: Config) -> str:
    steps = f"steps of at most {config.chunk} tokens" if config.chunk > 0 else "steps of whole prompts"
    overlap = "one after another" if config.disable_overlap_schedule else "planned ahead"
    cache = "off" if config.disable_radix_cache else "on"
    return f"{config.schedule_policy}, {steps} and {config.rows} rows, {overlap}; prefix cache {cache}"


def _table(facts: dict[str, str]) -> list[str]:
    width = max(map(len, facts))
    return [f"  {name:<{width}}  {fact}" for name, fact in facts.items()]


def _complain(error: ProcessDied) -> None:
    with contextlib.suppress(OSError):
        lines = [f"sapwood: error: {error.message}", *([error.details.rstrip()] if error.details else [])]
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _say(*lines: str) -> None:
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # A reader that has gone away (`sapwood serve | head`) must not end the server, now or at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
