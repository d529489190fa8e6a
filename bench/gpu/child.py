"""The process that measures: parts one after the other, each told in JSON lines to the process above.

It ends with the first part that fails: what a kernel has broken, nothing after it may rely on. What is there
no more than a reason, it goes on after.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.parts import least_of, limits_of, short, time_for
from bench.gpu.place import NotHere, Place, put_first
from bench.gpu.shape import DRY, FULL
from bench.gpu.watch import die_with_parent

Tell = Callable[[dict[str, Any]], None]


def functions() -> dict[str, Callable[[Any], None]]:
    from bench.gpu import compiling, found, measures, rates, suite

    return {
        "found": found.found, "kernels": compiling.kernels, "rates": rates.rates, "model": measures.model,
        "decode": measures.decode, "prefill": measures.prefill, "first_token": measures.first_token,
        "switches": measures.switches, "gaps": measures.idle_gaps, "cascade": measures.cascade,
        "baseline": measures.baseline, "tests": suite.tests, "fp8": measures.fp8,
        "deterministic": measures.deterministic,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--flashinfer-from", type=Path)
    args = parser.parse_args()
    die_with_parent()
    tell = _events()
    names = args.only.split(",")
    tell({"part": names[0], "event": "begin"})
    try:
        _run(args, names, tell)
    except Exception as e:  # the process's edge: the one above says that the part has failed, and why
        reason = str(e) if isinstance(e, NotHere) else f"{type(e).__name__}: {e}"
        tell({"event": "failed", "reason": short(reason)})
        if isinstance(e, NotHere):
            return 1
        raise
    tell({"event": "end"})
    return 0


def _run(args: argparse.Namespace, names: list[str], tell: Tell) -> None:
    from bench.gpu.here import Here

    until = time.monotonic() + args.seconds
    put_first(args.flashinfer_from)
    plain = "it is not used" if args.plain else ""
    place = Place(args.dry_run, plain, args.flashinfer_from, args.without)
    limits = limits_of(args.limit)
    here = Here(place, DRY if args.dry_run else FULL, lambda row: tell({"event": "row", "row": row}))
    here.graphs = not args.no_graphs
    known = functions()
    for number, name in enumerate(names):
        tell({"part": name, "event": "begin"})
        left = until - time.monotonic()
        if left < least_of(name):
            tell({"event": "skipped", "reason": f"no time is left for it ({left:.0f} s)"})
            continue
        here.until = time.monotonic() + time_for(name, left, names[number + 1 :], limits)
        try:
            known[name](here)
        except NotHere as e:
            tell({"event": "skipped", "reason": short(str(e))})
        else:
            tell({"event": "done"})


def _events() -> Tell:
    """Where events go; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    return tell


if __name__ == "__main__":
    raise SystemExit(main())
