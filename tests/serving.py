"""A real `sapwood serve` for tests: real processes, real sockets, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from sapwood.srt.config import option

START_SECONDS = 90.0


@dataclass
class Server:
    """A running server: `url`, its launcher, and where its output goes."""

    url: str
    launcher: subprocess.Popen[bytes]
    output: Path

    def post(self, path: str, body: Any, timeout: float = 60.0) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def generate(self, ids: list[int], timeout: float = 60.0, **params: Any) -> dict[str, Any]:
        """A native answer; the parameters are sampling parameters."""
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "ignore_eos": True, **params}}
        answer = self.post("/generate", body, timeout)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def state(self) -> dict[str, Any]:
        """The scheduler's counters."""
        state: dict[str, Any] = httpx.get(self.url + "/server_info", timeout=20).json()["state"]
        return state

    def children(self) -> dict[str, psutil.Process]:
        """The processes by role."""
        found = {}
        for child in psutil.Process(self.launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one that has just ended
                argv = child.cmdline()
                if "sapwood.srt.lifeline" in argv:
                    found[argv[argv.index("sapwood.srt.lifeline") + 1]] = child
        return found


@contextlib.contextmanager
def held(*processes: psutil.Process) -> Iterator[None]:
    """They are stopped meanwhile: what they are at is not over before the test has seen to it."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile; who asks for this very one may listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def command(model: Path | str | None, **flags: Any) -> list[str]:
    argv = [sys.executable, "-P", "-c", "from sapwood.srt.cli import main; raise SystemExit(main())", "serve"]
    if model is not None:
        argv.append(str(model))
    for name, value in flags.items():
        if value is not None:
            argv += [option(name)] if value is True else [option(name), str(value)]
    return argv


def ready(url: str, launcher: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and launcher.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def serve(model: Path | str | None, folder: Path, **flags: Any) -> Iterator[Server]:
    """Start a server and wait until it is ready; afterwards it must have left no process behind."""
    starting = contextlib.ExitStack()
    port = starting.enter_context(kept_port())
    output = folder / f"serve-{port}.log"
    with output.open("wb") as log:
        argv = command(model, port=port, **{"num_threads": 1, **flags})
        launcher = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder, env=os.environ)
    server = Server(f"http://127.0.0.1:{port}", launcher, output)
    family: list[psutil.Process] = []
    try:
        assert ready(server.url, launcher), output.read_text()
        starting.close()
        family = list(server.children().values())
        yield server
    finally:
        starting.close()
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
            raise
        finally:
            _gone, alive = psutil.wait_procs(family, timeout=10)
            for process in alive:
                process.kill()
    assert not alive, f"left behind: {alive}\n{output.read_text()}"


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream. httpx's own end at U+0085 and U+2028 too, which a random text may have."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode()


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON of each SSE event; "[DONE]" comes as that string."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
