"""The worker on a GPU: one command, under five minutes, a table, and JSON.

    python -m bench.gpu [--json FILE] [--seconds 280] [--only PART,...] [--limit PART=SECONDS ...]
                        [--flashinfer-from DIR] [--no-flashinfer] [--dry-run]

A model of Llama 3.1 8B's shape with random weights in bf16, behind the worker's own DeviceRunner, which is
given Steps as the scheduler gives them. Decode is a share of the reading that was measured on the spot (bytes
of weights and of K and V that a step must read), prefill of the matmul rate. A part that fails, hangs or does
not fit the time is told as such, and the others go on in a new process. Kernels of FlashInfer that do not
compile are done without, and the table says so; without those of decode or of short prefills, or all of
FlashInfer, attention is torch's SDPA over gathered KV, with FlashInfer the baseline. What is compiled is
kept: call `--only kernels` before, with `--limit kernels=600 --seconds 700`, and nothing is cut.
`--flashinfer-from` is a folder that is put first on the path, for where only a part of the wheel can be
brought along. Needs torch, numpy, msgspec, llguidance and, for tests/gpu, pytest, hypothesis and the C++
kernels: `python setup.py build_ext --inplace` (g++, pybind11). docs/gpu.md says what FlashInfer needs to
compile.

`--dry-run` runs every part but the profile on a CPU that stands in for a GPU, with a tiny model of the same
architecture and the tests' double of FlashInfer: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.parts import NAMES, limits_of, needed
from bench.gpu.report import Report
from bench.gpu.watch import Crew

SECONDS = 280.0


class Bench:
    """One run: prints and writes what there is as it goes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._begin = args, time.monotonic()
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._report = Report(args.dry_run)
        options = ["--dry-run"] if args.dry_run else []
        options += ["--flashinfer-from", str(args.flashinfer_from.absolute())] if args.flashinfer_from else []
        options += [f"--limit={option}" for option in args.limit]
        self._crew = Crew(options, args.seconds, self._seen, "bench.gpu.child", limits_of(args.limit))
        self._crew.plain = "--no-flashinfer" if args.no_flashinfer else ""

    def run(self, names: list[str]) -> dict[str, Any]:
        if self._args.dry_run:
            print("Dry run on a CPU: no figure below says anything of a GPU.")
        print(f"{'part':<14}{'what':<50}{'figure':>18}  {'share or ratio':<18}goal")
        try:
            self._crew.run(names)
        finally:
            self._write(self.result())
        result = self.result()
        print(f"\nhardware: {result['hardware']}; attention: {result['backend']}")
        print(f"{result['seconds']} s of {self._args.seconds:.0f}; goals not met: {_goals(result)}")
        if lost := _lost(result):
            print(f"failed, or cut off: {', '.join(lost)}")
        return result

    def result(self) -> dict[str, Any]:
        """All that is known so far."""
        parts: dict[str, dict[str, Any]] = {
            name: {
                "status": outcome.status, "reason": outcome.reason, "seconds": outcome.seconds,
                "limit": outcome.limit, "rows": outcome.rows,
            }
            for name, outcome in self._crew.outcomes.items()
        }  # fmt: skip
        rows = [(name, row) for name, part in parts.items() for row in part["rows"]]
        about: dict[str, Any] = next((row for _name, row in rows if "hardware" in row), {})
        return {
            "hardware": about.get("hardware", "unknown"), "dry_run": self._args.dry_run, "date": self._date,
            "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]), "budget": self._args.seconds,
            "seconds": round(time.monotonic() - self._begin, 1), "versions": about.get("versions", {}),
            "backend": self._backend(parts), "no_flashinfer": self._crew.plain or None,
            "without": self._crew.without, "no_graphs": self._crew.no_graphs or None,
            "not_met": [f"{name}: {row['what']}" for name, row in rows if row.get("met") is False],
            "parts": parts,
        }  # fmt: skip

    def _backend(self, parts: dict[str, Any]) -> str:
        """What attention was computed with, and why not with FlashInfer if so."""
        facts = [row["facts"] for row in parts.get("model", {}).get("rows", []) if "facts" in row]
        used = facts[-1]["attention"] if facts else "unknown: no model was loaded"
        if self._crew.plain:
            used = f"{used}: torch SDPA over gathered KV; no FlashInfer ({self._crew.plain})"
        elif self._crew.without:
            used = f"{used}, but without {', '.join(self._crew.without)}"
        if self._crew.no_graphs:
            used = f"{used}; without graphs ({self._crew.no_graphs})"
        return str(used)

    def _seen(self, part: str, row: dict[str, Any] | None) -> None:
        if row is not None:
            line = self._report.take(part, row)
        else:
            outcome = self._crew.outcomes[part]
            line = self._report.over(part, outcome.status, outcome.reason, outcome.seconds)
        print(line, flush=True)
        self._write(self.result())

    def _write(self, result: dict[str, Any]) -> None:
        if file := self._args.json:
            whole = file.with_name(f"{file.name}.part")
            whole.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            os.replace(whole, file)


def _lost(result: dict[str, Any]) -> list[str]:
    """The parts that did not come to their end."""
    return [name for name, part in result["parts"].items() if part["status"] in ("failed", "cut")]


def _goals(result: dict[str, Any]) -> str:
    if result["dry_run"]:
        return "a dry run has none"
    return "; ".join(result["not_met"]) or "none"


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m bench.gpu"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of it (default: {SECONDS})")
    parser.add_argument("--only", default=",".join(NAMES), help=f"parts: {', '.join(NAMES)}")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="PART=SECONDS", help="another limit than its own"
    )
    parser.add_argument("--flashinfer-from", type=Path)
    parser.add_argument("--no-flashinfer", action="store_true", help="measure plain torch")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.only.split(",")) - set(NAMES)):
        parser.error(f"--only {unknown[0]}: parts are {', '.join(NAMES)}")
    try:
        limits_of(args.limit)
    except ValueError as e:
        parser.error(f"--limit {e}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    result = Bench(args).run(needed(args.only.split(",")))
    return 1 if _lost(result) else 0


def _end(number: int, _frame: object) -> None:
    """What runs is ended with this process, and the JSON says what did."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    raise SystemExit(main())
