"""What stands between a model and its clients costs: HTTP, ZeroMQ and three processes around an echo worker.

    python -m bench.stack [--streams 32] [--tokens 1024] [--intervals 1,8,16] [--steps-ms 0,5.3,10]
                         [--routes completions,chat] [--repeats 3] [--wait-quiet 60]
                         [--profile server,tokenizer,scheduler] [--json FILE] [MODEL]

Starts the real launcher, server, tokenizer and scheduler with a worker that computes nothing (`echo_worker`),
and asks for `--streams` streams at once from this process, which shares the machine's cores with them. With a
step time of 0 the worker answers at once: tokens per second, and what each process takes. With another
it answers one step every so many milliseconds, as a model would, and `delay` is how long after its step was
sent a piece of text had come (of a piece of several tokens: after the last one's). Only what came while all
streams ran is counted. `whole` asks for answers in one piece. `foreign` is the share of the machine that
others took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import pstats
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.echo_worker import PROFILES, STAMPS, Stamps, words
from bench.manners import role_of, spent
from bench.process_cost import machine_busy_seconds, tree, wait_quiet
from bench.sse_client import Exchange, ask
from sapwood import __version__
from sapwood.srt.config import ModelSource, make
from sapwood.srt.loader.sources import resolve
from tests.serving import free_port, ready

ROOT = Path(__file__).resolve().parent.parent
PROMPT = 32
ROLES = ("server", "tokenizer", "scheduler", "worker")
TOP = 18
QUIET = 0.05
"""Most of the machine that others may take while something is measured."""
COLUMNS = (
    "route", "interval", "step_ms", "tokens_per_s", "tokens_per_event", "delay_p50_ms", "delay_p99_ms",
    "delay_max_ms", "server_us", "tokenizer_us", "scheduler_us", "worker_us", "client_us", "foreign",
)  # fmt: skip


@dataclass
class Runtime:
    """A running server around the echo worker."""

    url: str
    pids: dict[str, int]
    stamps: Stamps
    profiles: Path
    source: ModelSource
    numbers: dict[str, int]
    """Each word's place in the worker's table."""


@contextlib.contextmanager
def running(source: ModelSource, folder: Path, profile: bool, **flags: Any) -> Iterator[Runtime]:
    """Start it, and end it afterwards."""
    assert source.tokenizer_file is not None
    stamps = Stamps.make(folder / "stamps")
    env = {**os.environ, STAMPS: str(folder / "stamps"), "PYTHONPATH": str(ROOT)}
    if profile:
        env[PROFILES] = str(folder)
    port = free_port()
    # The echo worker says the same words again and again, and verifies no draft.
    fixed = {"speculative_algorithm": "none", "log_level": "warning"}
    values = json.dumps({"model_path": source.path, "port": port, **fixed, **flags})
    argv = [sys.executable, "-P", "-m", "bench.echo_worker", values]
    with (folder / "serve.log").open("wb") as log:
        launcher = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        if not ready(url, launcher):
            raise SystemExit((folder / "serve.log").read_text())
        pids = {role_of(pid): pid for pid in tree(launcher.pid)}
        numbers = {word: i for i, word in enumerate(words(source.tokenizer_file))}
        yield Runtime(url, pids, stamps, folder, source, numbers)
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)


def bodies(
    route: str, streams: int, tokens: int, vocab: int, stream: bool
) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each request; no two prompts begin alike."""
    rng = random.Random(0)
    common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        common["stream_options"] = {"include_usage": True}
    if route == "chat":
        texts = [f"{i} " + " ".join(str(rng.random()) for _ in range(2)) for i in range(streams)]
        return [
            ("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]})
            for text in texts
        ]
    prompts = [[rng.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(streams)]
    return [("/v1/completions", {**common, "prompt": prompt}) for prompt in prompts]


def fire(url: str, requests: list[tuple[str, dict[str, Any]]]) -> list[Exchange]:
    """All of them at once; what came of each."""

    async def run() -> list[Exchange]:
        return await asyncio.gather(*(ask(url, path, body) for path, body in requests))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@dataclass
class Event:
    """A piece of text: when it came, and its words."""

    at: float
    words: list[str]


def events_of(exchange: Exchange, tokens: int) -> list[Event]:
    answer = exchange.answer()
    if answer.error is not None or answer.tokens != tokens:
        raise SystemExit(f"a request has failed: {answer.error or f'{answer.tokens} tokens of {tokens}'}")
    return [
        Event(exchange.sent + at, text.split()) for at, text in zip(answer.times, answer.texts, strict=True)
    ]


def measure(runtime: Runtime, route: str, streams: int, tokens: int, step_ms: float) -> dict[str, Any]:
    """One load; the row of the table."""
    whole = route.startswith("whole ")
    requests = bodies(route.removeprefix("whole "), streams, tokens, runtime.source.vocab_size, not whole)
    runtime.stamps.pace = step_ms / 1e3
    before = {role: spent(runtime.pids[role])[0] for role in ROLES}
    own, busy, begin = time.process_time(), machine_busy_seconds(), time.monotonic()
    exchanges = fire(runtime.url, requests)
    took, own = time.monotonic() - begin, time.process_time() - own
    busy = machine_busy_seconds() - busy
    cpu = {role: spent(runtime.pids[role])[0] - before[role] for role in ROLES}
    total = streams * tokens
    row: dict[str, Any] = {"route": route, "step_ms": step_ms}
    row |= {f"{role}_us": seconds / total * 1e6 for role, seconds in cpu.items()}
    row["client_us"] = own / total * 1e6
    row["foreign"] = max(0.0, busy - own - sum(cpu.values())) / (took * (os.cpu_count() or 1))
    if whole:
        check_whole(exchanges, tokens)
        return {**row, "tokens_per_s": total / took}
    return row | steady(runtime, [events_of(exchange, tokens) for exchange in exchanges])


def quietly(runtime: Runtime, route: str, args: argparse.Namespace, step_ms: float) -> dict[str, Any]:
    """`measure` while others leave the machine alone; the quietest try within `--wait-quiet` seconds."""
    end, rows = time.monotonic() + args.wait_quiet, []
    while True:
        wait_quiet(end - time.monotonic())
        rows.append(measure(runtime, route, args.streams, args.tokens, step_ms))
        if rows[-1]["foreign"] < QUIET or time.monotonic() > end:
            return min(rows, key=lambda row: row["foreign"])


def check_whole(exchanges: list[Exchange], tokens: int) -> None:
    for exchange in exchanges:
        body = json.loads(exchange.raw().partition(b"\r\n\r\n")[2])
        assert body["usage"]["completion_tokens"] == tokens, body
        assert len(body["choices"][0]["text"].split()) == tokens


def steady(runtime: Runtime, streams: list[list[Event]]) -> dict[str, float]:
    """Rates and delays of what came while all streams ran."""
    begin = max(events[0].at for events in streams)
    end = min(events[-1].at for events in streams)
    counted = [event for events in streams for event in events if begin < event.at <= end]
    if not counted:
        raise SystemExit("the streams did not run all at once: they need more --tokens")
    tokens = sum(len(event.words) for event in counted)
    sent = [runtime.stamps.sent(runtime.numbers[event.words[-1]], event.at) for event in counted]
    delays = np.array([event.at for event in counted]) - np.array(sent)
    return {
        "tokens_per_s": tokens / (end - begin),
        "tokens_per_event": tokens / len(counted),
        "delay_p50_ms": float(np.percentile(delays, 50)) * 1e3,
        "delay_p99_ms": float(np.percentile(delays, 99)) * 1e3,
        "delay_max_ms": float(delays.max()) * 1e3,
    }


def profile(runtime: Runtime, role: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Where a process spends its time at the last of the step times: per token, the dearest first."""
    pid, found = runtime.pids[role], runtime.profiles / f"{role}.{runtime.pids[role]}.prof"

    def write() -> None:
        found.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + 10
        while not found.exists() and time.monotonic() < end:
            time.sleep(0.01)

    write()
    measure(runtime, args.routes[0], args.streams, args.tokens, args.steps_ms[-1])
    write()
    total = args.streams * args.tokens
    rows = []
    stats: dict[Any, Any] = pstats.Stats(str(found)).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, within, _callers) in stats.items():
        where = name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"
        rows.append(
            {
                "function": where,
                "calls_per_token": calls / total,
                "own_us": own / total * 1e6,
                "cumulative_us": within / total * 1e6,
            }
        )
    return sorted(rows, key=lambda row: -row["own_us"])[:TOP]


def tell(row: dict[str, Any]) -> None:
    cells = []
    for name in COLUMNS:
        value = row.get(name, "")
        text = f"{value:.3f}" if isinstance(value, float) and value < 10 else value
        cells.append(f"{text:.0f}" if isinstance(text, float) else str(text))
    print(
        "  ".join(f"{cell:>{max(len(name), 9)}}" for name, cell in zip(COLUMNS, cells, strict=True)),
        flush=True,
    )


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the same load several times; delays and foreign load at their worst."""
    worst = ("delay_p99_ms", "delay_max_ms", "foreign")
    return {
        name: value
        if isinstance(value, str)
        else (max if name in worst else statistics.median)(row[name] for row in rows)
        for name, value in rows[0].items()
    }


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--intervals", type=numbers, default=[1, 8, 16])
    parser.add_argument("--steps-ms", type=numbers, default=[0, 5.3, 10])
    parser.add_argument("--routes", type=lambda text: text.split(","), default=["completions", "chat"])
    parser.add_argument("--whole", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="for each load, seconds")
    parser.add_argument("--profile", type=lambda text: text.split(","), default=[])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    source = resolve(make(model_path=args.model))
    rows: list[dict[str, Any]] = []
    profiles: dict[str, list[dict[str, Any]]] = {}
    routes = [*args.routes, *(["whole completions"] if args.whole else [])]
    print("  ".join(f"{name:>9}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for interval in map(int, args.intervals):
            flags = {"stream_interval": interval} if interval > 1 else {}
            with running(source, folder, False, **flags) as runtime:
                warm_up = bodies("completions", args.streams, 64, source.vocab_size, True)
                fire(runtime.url, warm_up)
                for route in routes:
                    for step_ms in args.steps_ms if not route.startswith("whole") else [0]:
                        again = [quietly(runtime, route, args, step_ms) for _ in range(args.repeats)]
                        rows.append({"interval": interval, **median(again)})
                        tell(rows[-1])
        if args.profile:
            with running(source, folder, True) as runtime:
                for role in args.profile:
                    profiles[role] = profile(runtime, role, args)
                    print(f"\n{role}, cProfile, microseconds a token:")
                    for row in profiles[role]:
                        print(
                            f"{row['own_us']:8.2f} own {row['cumulative_us']:8.2f} in all"
                            f" {row['calls_per_token']:6.2f} calls  {row['function']}"
                        )
    if args.json:
        about = {
            "sapwood": __version__, "python": platform.python_version(), "streams": args.streams,
            "tokens": args.tokens, "repeats": args.repeats, "cores": os.cpu_count(),
        }  # fmt: skip
        args.json.write_text(json.dumps({"about": about, "rows": rows, "profiles": profiles}, indent=1))


if __name__ == "__main__":
    main()
