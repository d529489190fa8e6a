"""A thousand programs in one event loop, on a server whose worker computes nothing (`bench.echo_worker`).

    python -m bench.lang.concurrent [--programs 1000] [--turns 4] [--tokens 16] [--json FILE] [MODEL]

Each program takes turns: it generates, waits for the text, and forks in two at its end. Told are requests and
stream events per second, what this process takes of memory and CPU, and how many threads it had at most: none
belongs to a program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bench.stack import running
from sapwood import AsyncState, RuntimeEndpoint, __version__, function, gen
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve


@function
async def program(s: AsyncState, number: int, turns: int, tokens: int) -> None:
    s += f"Program {number} says: "
    for turn in range(turns):
        s += gen(f"turn {turn}", max_tokens=tokens, ignore_eos=True)
        s += "\nAnd then: "
        await s[f"turn {turn}"]
    branches = s.fork(2)
    for branch in branches:
        branch += gen("end", max_tokens=tokens, ignore_eos=True)
    for branch in branches:
        await branch["end"]


class Watch:
    """The most threads and memory that this process has had."""

    def __init__(self) -> None:
        self.threads = 0
        self.rss = 0
        self._process = psutil.Process()

    async def run(self) -> None:
        while True:
            self.threads = max(self.threads, threading.active_count())
            self.rss = max(self.rss, self._process.memory_info().rss)
            await asyncio.sleep(0.02)


async def together(url: str, args: argparse.Namespace) -> dict[str, Any]:
    backend = RuntimeEndpoint(url)
    watch = Watch()
    watcher = asyncio.create_task(watch.run())
    idle = psutil.Process().memory_info().rss
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(program.run_async(i, args.turns, args.tokens, backend=backend) for i in range(args.programs))
    )
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    requests = args.programs * (args.turns + 2)
    found = {
        "seconds": seconds,
        "requests_per_s": requests / seconds,
        "cpu_ms_per_request": 1000 * cpu / requests,
        "threads": watch.threads,
        "memory_mb": (watch.rss - idle) / 2**20,
    }
    watch.threads = 0
    began, cpu = time.perf_counter(), time.process_time()
    events = await asyncio.gather(*(streamed(i, backend, args) for i in range(args.programs)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    found["streamed"] = {
        "seconds": seconds,
        "events_per_s": sum(events) / seconds,
        "cpu_us_per_event": 1e6 * cpu / sum(events),
        "threads": watch.threads,
    }
    watcher.cancel()
    await backend.aclose()
    return found


async def streamed(number: int, backend: RuntimeEndpoint, args: argparse.Namespace) -> int:
    """How many pieces of text a program's stream has."""
    state = program.stream(number, args.turns, args.tokens, backend=backend)
    return len([piece async for piece in state.text_async_iter()])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.lang.concurrent")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    with tempfile.TemporaryDirectory() as name, running(source, Path(name), profile=False) as runtime:
        found = asyncio.run(together(runtime.url, args))
    print(json.dumps(found, indent=1))
    if args.json:
        given = {"programs": args.programs, "turns": args.turns, "tokens": args.tokens}
        args.json.write_text(json.dumps({"sapwood": __version__, **given, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
