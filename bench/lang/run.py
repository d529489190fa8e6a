"""Programs in the front-end language: what they take, and what of it they reuse.

    python -m bench.lang.run --data FOLDER [--programs few_shot choices ...] [--llama-server PATH --gguf FILE]
                             [--repeats 3] [--count N] [--json FILE]

FOLDER has `gsm8k` and `mt_bench`. Each program runs on a server of its own, with an empty cache. Against it,
in the same run: (a) its very calls, one by one, through the openai client on the same server; (b) the program
with the radix cache off; (c) its calls on llama.cpp's server, as many at once as the program made. Outputs
are as long as the program's, in tokens. What its forward passes computed is compared with an offline count of
its calls: not one token may be computed that was computed before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from bench.lang.calls import LlamaCpp, Made, Recorder, count, one_by_one, replay_all, reused
from sapwood import RuntimeEndpoint, __version__
from sapwood.lang.backends import native
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import Server, free_port, serve

PROGRAMS = (
    "few_shot", "choices", "tree_of_thought", "skeleton_of_thought", "self_consistency", "judge", "react",
    "chat", "extraction",
)  # fmt: skip
AT_ONCE = 16


@contextlib.contextmanager
def llama_cpp(server: Path, gguf: Path, log: Path) -> Iterator[str]:
    """The address of a fresh llama.cpp server."""
    port = free_port()
    flags = ["-t", "2", "-tb", "2", "-np", str(AT_ONCE), "-c", "65536", "--cache-reuse", "256", "--no-webui"]
    argv = [str(server), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health").status_code == 200:
                    break
            time.sleep(0.1)
        else:
            raise SystemExit(f"llama.cpp's server does not start: {log.read_text()[-2000:]}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(module: ModuleType, url: str, args: argparse.Namespace) -> tuple[float, Recorder, str]:
    """Seconds that the program took for all its arguments, its calls, and how it did."""
    backend = Recorder(native.of(RuntimeEndpoint(url)))
    arguments = module.arguments(args.data, args.count or module.COUNT)
    began = time.perf_counter()
    states = module.program.run_batch(arguments, backend=backend, num_threads=AT_ONCE)
    seconds = time.perf_counter() - began
    return seconds, backend, module.right(args.data, states)


def used(reports: list[dict[str, Any]]) -> dict[str, int]:
    """What all of a batch's programs used."""
    names = {name for report in reports for name, value in report.items() if isinstance(value, int)}
    return {name: sum(report.get(name, 0) for report in reports) for name in sorted(names)}


def llama_seconds(made: list[Made], args: argparse.Namespace, folder: Path) -> float:
    with llama_cpp(args.llama_server, args.gguf, folder / "llama.log") as url:

        async def replay() -> float:
            client = LlamaCpp(url)
            began = time.perf_counter()
            await replay_all(made, client.send)
            return time.perf_counter() - began

        return asyncio.run(replay())


def one(module: ModuleType, server: Server, plain: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All that is to be told of one program."""
    times: dict[str, list[float]] = {"sapwood": [], "one by one": [], "cache off": []}
    found: dict[str, Any] = {}
    exact = True
    for _ in range(args.repeats):
        httpx.post(server.url + "/flush_cache").raise_for_status()
        seconds, recorder, told = run(module, server.url, args)
        times["sapwood"].append(seconds)
        counted, counts = count(recorder.made), used(recorder.reports)
        found = {"result": told, "calls": len(recorder.made), "used": counts, "counted": counted._asdict()}
        exact = exact and reused(counted, counts)
        httpx.post(server.url + "/flush_cache").raise_for_status()
        times["one by one"].append(timed(lambda made=recorder.made: one_by_one(made, server.url)))
        times["cache off"].append(run(module, plain.url, args)[0])
        if args.llama_server is not None:
            with tempfile.TemporaryDirectory() as name:
                seconds = llama_seconds(recorder.made, args, Path(name))
            times.setdefault("llama.cpp", []).append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: value / medians["sapwood"] for name, value in medians.items() if name != "sapwood"}
    return {"seconds": times, "ratios": ratios, "nothing twice": exact, **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.lang.run")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp; default: Sapwood's own file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, help="arguments of each program; default: as many as it says")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = resolve(make(model_path=args.model)).path
    args.gguf = args.gguf or Path(path)
    results: dict[str, Any] = {"sapwood": __version__}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(path, Path(name), num_threads=None))
        plain = stack.enter_context(serve(path, Path(name), num_threads=None, disable_radix_cache=True))
        for program in args.programs:
            module = importlib.import_module(f"bench.lang.{program}")
            results[program] = told = one(module, server, plain, args)
            ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in told["ratios"].items())
            seconds = statistics.median(told["seconds"]["sapwood"])
            print(f"{program:20} {seconds:6.1f} s  {ratios}  {told['result']}")
            print(f"{'':20} nothing twice: {told['nothing twice']}\n{'':20} used {told['used']}")
            print(f"{'':20} counted {told['counted']}")
            if args.json:
                known = json.loads(args.json.read_text()) if args.json.exists() else {}
                args.json.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
