"""Sapwood beside other servers: one client of the OpenAI API, the same prompts, in turns.

    python -m bench.serve run --target NAME=URL[,model=M][,pid=PID][,version=V][,fixed=HOW] --target ...
                              --text FILE... [--workload single,batch] [--repeats 3] [--seed 1]
                              [--tokenizer FILE | --model MODEL] [--reference NAME] [--wait-quiet SECONDS]
                              [--timeout 900] [--json FILE] [--markdown]
    python -m bench.serve report FILE... [--markdown]

The servers run already; `pid` is the root of a server's processes, whose CPU time and memory are measured.
Each workload of a repeat is given to all targets with the same prompts, one target after the other; their
order turns from repeat to repeat, and each repeat has prompts of its own. Ratios are the first target's over
the others'. Before that every target answers a few questions whose answers are known: one that is fast and
wrong is shown so. `--text` is JSON Lines or plain text to take English from.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.process_cost import Meter, wait_quiet
from bench.serve_metrics import costs, speeds
from bench.serve_report import ratios, report
from bench.serve_targets import (
    Checked,
    Target,
    check_answers,
    discover,
    parse_target,
    request,
    same_share,
    send,
)
from bench.sse_client import Answer, Exchange, ask
from bench.workloads import WORKLOADS, Conversation, Passages, Workload, build, sentences

COMPARED = ("batch",)
"""Workloads whose texts are compared with the reference's."""


def in_turn(targets: Sequence[Target], repeat: int) -> list[Target]:
    """The targets in the order of this repeat: each is first in its turn."""
    first = repeat % len(targets)
    return [*targets[first:], *targets[:first]]


async def _converse(
    target: Target,
    workload: Workload,
    talk: Conversation,
    gate: asyncio.Semaphore,
    got: list[Exchange | Answer],
) -> None:
    """One conversation to its end, or to its first failure. Answers that no later turn needs stay raw."""
    messages = [{"role": "system", "content": talk.system}] if talk.system else []
    async with gate:
        for number, text in enumerate(talk.turns, 1):
            messages.append({"role": "user", "content": text})
            path, body = request(target, workload.chat, messages if workload.chat else text, workload.output)
            try:
                exchange = await ask(target.url, path, body)
            except OSError as e:
                got.append(Answer(error=f"no connection: {e}"))
                return
            got.append(exchange)
            if number < len(talk.turns):
                answer = exchange.answer()
                if answer.error:
                    return
                messages.append({"role": "assistant", "content": answer.text})


async def run_workload(
    target: Target, workload: Workload, timeout: float
) -> tuple[list[list[Answer]], Meter]:
    """The answers of each conversation, and what the run cost. What `timeout` seconds cut off has none."""
    gate = asyncio.Semaphore(workload.at_once)
    got: list[list[Exchange | Answer]] = [[] for _ in workload.conversations]
    gc.collect()
    gc.disable()
    try:
        with Meter(target.pid) as meter:
            talks = zip(workload.conversations, got, strict=True)
            tasks = [asyncio.create_task(_converse(target, workload, t, gate, g)) for t, g in talks]
            ended, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await asyncio.gather(*ended)
    finally:
        gc.enable()
    return [[g if isinstance(g, Answer) else g.answer() for g in part] for part in got], meter


def run(coroutine: Any) -> Any:
    """asyncio.run, on uvloop where it is installed: it costs half as much."""
    factory = None
    if importlib.util.find_spec("uvloop"):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)


class Comparison:
    """The runs of all targets, and the file that grows with them."""

    def __init__(self, targets: list[Target], passages: Passages, args: argparse.Namespace) -> None:
        self._targets = targets
        self._passages = passages
        self._args = args
        self._checks = {t.name: Checked(0, 0, []) for t in targets}
        self._runs: list[dict[str, Any]] = []

    def run_all(self) -> dict[str, Any]:
        """Warm up and check each target, then all workloads in turns."""
        for target in self._targets:
            self._prepare(target)
        for repeat in range(self._args.repeats):
            for name in self._args.workload:
                self._one_workload(name, repeat)
                if self._args.json:
                    self._args.json.write_text(json.dumps(self.result(), indent=1))
        return self.result()

    def result(self) -> dict[str, Any]:
        shown = [{**dataclasses.asdict(t), "check": self._checks[t.name]._asdict()} for t in self._targets]
        result = {
            "bench": "serve",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": _machine(),
            "seed": self._args.seed,
            "repeats": self._args.repeats,
            "targets": shown,
            "runs": self._runs,
        }
        return {**result, "ratios": ratios(result)}

    def _prepare(self, target: Target) -> None:
        warm = run(send(target, False, "The weather today is", 8))
        if warm.error:
            raise SystemExit(f"{target.name}: the first request failed: {warm.error}")
        check = run(check_answers(target, self._args.timeout))
        self._checks[target.name] = check
        print(f"{target.name} {target.version}: {check.right} of {check.asked} questions right", flush=True)

    def _one_workload(self, name: str, repeat: int) -> None:
        workload = build(name, self._passages, self._args.seed, repeat)
        texts = {}
        rows = {}
        for order, target in enumerate(in_turn(self._targets, repeat)):
            quiet = not self._args.wait_quiet or wait_quiet(self._args.wait_quiet)
            answers, meter = run(run_workload(target, workload, self._args.timeout))
            wanted = 0 if target.fixed == "none" else workload.output
            row = speeds([a for part in answers for a in part], workload.requests, wanted, meter.wall)
            row = {
                "workload": name, "target": target.name, "repeat": repeat, "order": order, "quiet": quiet,
                **row, **costs(meter, row["output_tokens"]),
            }  # fmt: skip
            rows[target.name] = row
            texts[target.name] = ["".join(a.text for a in part) for part in answers]
            _progress(row)
        for target in self._targets:
            compared = name in COMPARED and target.name != self._args.reference
            rows[target.name]["same_text"] = (
                same_share(texts[target.name], texts[self._args.reference]) if compared else None
            )
            self._runs.append(rows[target.name])


def _progress(row: dict[str, Any]) -> None:
    ttft = row["ttft_p50_s"]
    print(
        f"{row['repeat'] + 1}  {row['workload']:14} {row['target']:14} {row['output_per_s']:7.1f} tok/s"
        f"  TTFT {1000 * ttft if ttft is not None else float('nan'):.0f} ms  {row['seconds']:.1f} s"
        f"  {row['failed']} failed{'' if row['quiet'] else '  NOT QUIET'}",
        flush=True,
    )


def _machine() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _tokenizer(args: argparse.Namespace) -> Any:
    from tokenizers import Tokenizer

    file = args.tokenizer
    if file is None:
        from sapwood.srt.config import make
        from sapwood.srt.loader.sources import resolve

        file = resolve(make(model_path=args.model)).tokenizer_file
    return Tokenizer.from_file(str(file))


def _workloads(given: str) -> list[str]:
    names = list(WORKLOADS) if given == "all" else given.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of all, {', '.join(WORKLOADS)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--target", action="append", required=True, metavar="NAME=URL[,key=value]...")
    runs.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    runs.add_argument("--workload", type=_workloads, default=list(WORKLOADS), help="names with commas; all")
    runs.add_argument("--repeats", type=int, default=3)
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: that of --model")
    runs.add_argument("--model", help="whose tokenizer counts the prompts; default: the packaged model")
    runs.add_argument(
        "--reference", help="the target whose texts others are compared with; default: the first"
    )
    runs.add_argument("--wait-quiet", type=float, default=0.0, metavar="SECONDS",
                      help="before each run wait up to so long for the machine to be idle")  # fmt: skip
    runs.add_argument("--timeout", type=float, default=900.0, help="seconds for one run of a workload")
    runs.add_argument("--json", type=Path)
    runs.add_argument("--markdown", action="store_true")
    reports = commands.add_parser("report")
    reports.add_argument("file", nargs="+", type=Path)
    reports.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    if args.command == "report":
        print("\n\n".join(report(json.loads(file.read_text()), args.markdown) for file in args.file))
        return 0
    try:
        targets = [discover(parse_target(given)) for given in args.target]
        passages = Passages(_tokenizer(args), sentences(args.text))
    except (ValueError, OSError) as e:
        raise SystemExit(f"bench.serve: {e}") from None
    names = [t.name for t in targets]
    args.reference = args.reference or names[0]
    if len(set(names)) < len(names) or args.reference not in names:
        raise SystemExit(
            f"bench.serve: targets {', '.join(names)} need different names, one of them --reference"
        )
    result = Comparison(targets, passages, args).run_all()
    print("\n" + report(result, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
