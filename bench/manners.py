"""What a server costs that does nothing, and what it holds once its KV pool has been full.

    python -m bench.manners [--seconds 60] [--slots 16384] [--json FILE] [MODEL]

Starts `sapwood serve` twice, the first time with an empty cache folder (converted tokenizer, packed weights),
and prints for each process: CPU time and wake-ups a second with nothing to do, before and after a load, and
its proportional set size (shared pages counted once in all). The load is prompts of random ids, together a
tenth more than the pool, so that every slot is written and some are evicted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.process_cost import pss_bytes, tree
from sapwood import __version__
from sapwood.srt.config import make
from sapwood.srt.loader.sources import resolve
from tests.serving import Server, serve

PROMPT, OUTPUT, CONCURRENCY = 500, 12, 8
SETTLE_SECONDS = 2.0
COLUMNS = ("idle_ms_per_s", "wakes_per_s", "idle_after_ms_per_s", "pss_start_mb", "pss_full_mb")


def role_of(pid: int) -> str:
    """What a process of the server does."""
    argv = psutil.Process(pid).cmdline()
    if "sapwood.srt.lifeline" in argv:
        return argv[argv.index("sapwood.srt.lifeline") + 1]
    children = {"sapwood.srt.tokenizer.render_child": "templates", "sapwood.srt.grammar.child": "engine"}
    return next((role for module, role in children.items() if module in argv), "launcher")


def spent(pid: int) -> tuple[float, int]:
    """(CPU seconds to the nanosecond, context switches) of all threads of a process so far."""
    seconds, switches = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    switches += int(line.split()[1])
    return seconds, switches


def idle(pids: Sequence[int], seconds: float) -> dict[int, tuple[float, float]]:
    """For each process, while nothing is asked of it: (CPU ms a second, wake-ups a second)."""
    before, begin = {pid: spent(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    after, took = {pid: spent(pid) for pid in pids}, time.monotonic() - begin
    return {
        pid: ((after[pid][0] - before[pid][0]) / took * 1e3, (after[pid][1] - before[pid][1]) / took)
        for pid in pids
    }


def own_pss(pid: int) -> float:
    """The proportional set size in MB (10^6 bytes) of one process, without its children."""
    return (pss_bytes(pid) - sum(pss_bytes(child) for child in tree(pid)[1:])) / 1e6


def fill(server: Server, slots: int, vocab: int) -> None:
    """Ask for prompts that have nothing in common until the whole pool has been written."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, vocab) for _ in range(PROMPT)] for _ in range(slots * 11 // (10 * PROMPT) + 1)
    ]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(lambda ids: server.generate(ids, 600, max_new_tokens=OUTPUT), prompts))
    time.sleep(SETTLE_SECONDS)
    stats = httpx.get(server.url + "/server_info", timeout=20).json()["stats"]
    print(
        f"after {len(prompts)} prompts of {PROMPT} tokens {stats['slots_cached']} of {slots} slots are cached"
    )


def measure(server: Server, slots: int, vocab: int, seconds: float) -> list[dict[str, Any]]:
    """A row a process, in the order of their start."""
    httpx.get(server.url + "/health", timeout=5)
    time.sleep(SETTLE_SECONDS)
    pids = tree(server.launcher.pid)
    rows = {pid: dict[str, Any](process=role_of(pid), pss_start_mb=own_pss(pid)) for pid in pids}
    for pid, (cpu, wakes) in idle(pids, seconds).items():
        rows[pid] |= {"idle_ms_per_s": cpu, "wakes_per_s": wakes}
    fill(server, slots, vocab)
    for pid, (cpu, _) in idle(pids, seconds).items():
        rows[pid] |= {"idle_after_ms_per_s": cpu, "pss_full_mb": own_pss(pid)}
    return list(rows.values())


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"process": "all", **{name: sum(row[name] for row in rows) for name in COLUMNS}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each look at an idle server is")
    parser.add_argument("--slots", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = resolve(make(model_path=args.model))
    starts: list[float] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SAPWOOD_CACHE"] = str(Path(folder) / "cache")
        for last in (False, True):
            began = time.perf_counter()
            with serve(source.path, Path(folder), num_threads=None, max_total_tokens=args.slots) as server:
                starts.append(time.perf_counter() - began)
                if last:
                    facts = httpx.get(server.url + "/server_info", timeout=20).json()["facts"]
                    rows = measure(server, args.slots, source.vocab_size, args.seconds)
    rows.append(total(rows))
    print(f"ready after {starts[0]:.1f} s with an empty cache, {starts[1]:.1f} s the second time")
    for name in ("weights", "kernels", "kv pool"):
        print(f"{name}: {facts[name]}")
    print(f"{'':10}" + "".join(f"{name:>22}" for name in COLUMNS))
    for row in rows:
        print(f"{row['process']:10}" + "".join(f"{row[name]:>22.2f}" for name in COLUMNS))
    if args.json:
        found = {"first_start_s": starts[0], "second_start_s": starts[1], "facts": facts, "processes": rows}
        about = {"sapwood": __version__, "python": platform.python_version(), "seconds": args.seconds}
        args.json.write_text(json.dumps({"about": about, **found}, indent=1))


if __name__ == "__main__":
    main()
