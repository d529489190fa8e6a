"""The scheduler without a model: simulated by the million of requests, and replayed.

    python -m bench.scheduler simulate [--requests 1000000] [--share 0.01] [--from 0] [--json FILE]
    python -m bench.scheduler simulate --seed N [--wide] [--keep 0,3,4] [--events N] [--log] [--shrink]
    python -m bench.scheduler record
    python -m bench.scheduler replay

`simulate` runs seeds of tests/simulation until so many requests have been served. A `--share` of them come
from small scenarios (tiny pools, many accidents), in which everything is checked after every message; the
others are wide (32 or 64 rows, hundreds waiting): there sums of slots, all that clients are told, every
answer, and at the end everything are checked. With `--seed` one is run; with `--log` its events are printed.
`record` writes the traces that tests/replay compares with: what has changed there must be meant.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sapwood import __version__
from tests.simulation import trace
from tests.simulation.runs import Outcome, Run, SimulationFailed, shrink

COLUMNS = (
    "seeds", "requests", "refused", "events", "steps", "tokens", "retracted", "drafted", "accepted",
    "seconds",
)  # fmt: skip
MAX_FAILURES = 20
"""After so many nothing more is to be learnt."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    simulate = commands.add_parser("simulate", help="run seeds")
    simulate.set_defaults(command=run_seeds)
    simulate.add_argument("--requests", type=int, default=20_000)
    simulate.add_argument("--share", type=float, default=0.1, help="of the requests, checked thoroughly")
    simulate.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    simulate.add_argument("--json", type=Path, help="also write the numbers here")
    simulate.add_argument("--seed", type=int, help="run this one only")
    simulate.add_argument("--wide", action="store_true", help="its wide scenario")
    simulate.add_argument("--keep", help="with these arrivals only")
    simulate.add_argument("--events", type=int, help="stop after so many")
    simulate.add_argument("--log", action="store_true", help="print every event")
    simulate.add_argument("--shrink", action="store_true", help="look for a smaller case that fails too")
    commands.add_parser("record", help="write traces anew").set_defaults(command=record)
    commands.add_parser("replay", help="compare with the traces").set_defaults(command=replay)
    args = parser.parse_args()
    sys.exit(args.command(args))


def run_seeds(args: argparse.Namespace) -> int:
    """One seed, or many; the exit code is 1 if something did not hold."""
    if args.seed is not None:
        return _run_one(args)
    began = time.perf_counter()
    totals = {"thorough": _Totals(), "wide": _Totals()}
    failures: list[SimulationFailed] = []
    while len(failures) < MAX_FAILURES:
        served = sum(total.requests for total in totals.values())
        if served >= args.requests:
            break
        thorough = totals["thorough"].requests < args.share * served or args.share >= 1
        total = totals["thorough" if thorough else "wide"]
        run = Run(args.first + total.seeds, wide=not thorough)
        try:
            total.add(run.go(thorough))
        except SimulationFailed as e:
            total.seeds += 1
            failures.append(e)
            print(f"\n{e}", flush=True)
        if sys.stdout.isatty():
            print(f"\r{served} requests", end="", flush=True)
    seconds = time.perf_counter() - began
    heads = "".join(f"{name:>10}" for name in COLUMNS)
    print(f"\r{'':10}{heads}")
    for name, total in totals.items():
        values = "".join(f"{getattr(total, column):>10.7g}" for column in COLUMNS)
        print(f"{name:10}{values}")
    worst = totals["thorough"].worst
    print(f"{len(failures)} seeds failed; {seconds:.1f} s; nearest to the bound on overtaking: {worst:.3f}")
    if args.json:
        args.json.write_text(json.dumps(_report(totals, failures, seconds), indent=1))
    return 1 if failures else 0


class _Totals:
    """Sums over runs."""

    def __init__(self) -> None:
        self.seeds = self.requests = self.refused = self.events = self.steps = self.tokens = 0
        self.retracted = self.drafted = self.accepted = 0
        self.seconds = self.worst = 0.0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        for name in COLUMNS[1:]:
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        self.worst = max(self.worst, outcome.worst)


def _report(totals: dict[str, _Totals], failures: list[SimulationFailed], seconds: float) -> dict[str, Any]:
    return {
        "versions": {
            "sapwood": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "requests": sum(total.requests for total in totals.values()),
        "events": sum(total.events for total in totals.values()),
        "seconds": seconds,
        "parts": {name: vars(total) for name, total in totals.items()},
        "failures": [{"command": failed.run.command, "error": failed.said} for failed in failures],
    }


def _run_one(args: argparse.Namespace) -> int:
    keep = tuple(map(int, args.keep.split(","))) if args.keep else None
    run = Run(args.seed, args.wide, keep)
    try:
        outcome = run.go(events=args.events, log=print if args.log else None)
    except SimulationFailed as e:
        print(f"{shrink(e) if args.shrink else e}")
        return 1
    print(outcome)
    return 0


def record(args: argparse.Namespace) -> int:
    """Write every workload's trace."""
    trace.FOLDER.mkdir(exist_ok=True)
    for name, scenario in trace.workloads().items():
        recorded, path = trace.record(scenario), trace.FOLDER / f"{name}.trace"
        trace.save(recorded, path)
        print(f"{path}: {len(recorded.turns)} turns, {path.stat().st_size} bytes")
    return 0


def replay(args: argparse.Namespace) -> int:
    """Say in what the scheduler differs from the traces."""
    differ = 0
    for path in sorted(trace.FOLDER.glob("*.trace")):
        found = trace.difference(trace.load(path))
        differ += found is not None
        print(f"{path.stem}: {'as recorded' if found is None else found}")
    if differ:
        print(f"If this is meant: {trace.RECORD}")
    return 1 if differ else 0


if __name__ == "__main__":
    main()
