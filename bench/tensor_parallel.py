"""One model in several processes: what it says beside one process, whether it is exact in itself, and whether
a lost rank is handled.

    python -m bench.tensor_parallel [--model PATH] [--text FILE ...] [--size 2] [--prompts 20]
                                    [--max-tokens 48] [--json FILE]

Prompts are the questions of JSON-lines files (`question`, or `turns`), or paragraphs of plain text; without
`--text` a few of our own. Greedy answers of `--size` ranks are compared with those of one process, token by
token: at the first difference the gap between the two most likely tokens there is shown (of one process), as
float sums in another order can only swap near ties. Then the ranks are compared with themselves, with `==`:
tokens and logprobs cold, with the prompt cached, side by side, and in other chunks. At last a rank is killed
while all prompts run, with `restart_worker`: each must end with one error, and be answered as before then.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

import sapwood
from bench.quality_data import read_rows
from sapwood import __version__
from sapwood.srt.errors import ProcessDied
from sapwood.srt.launch import ENGINE_ROLES

OWN = (
    "The capital of France is", "Once upon a time, there was a little", "def fibonacci(n):\n",
    "1, 1, 2, 3, 5,", "Water boils at", "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are", "Q: How many legs does a spider have?\nA:", "In 1969, the first",
    "To make a cup of tea, first", "The opposite of hot is", "SELECT name FROM users WHERE",
    "Roses are red, violets are", "The sun rises in", "import numpy as np\n\n", "My favourite book is",
    "The largest planet is", "A haiku about the sea:\n", "Translate to German: good morning\n",
    "Once you have finished, please",
)  # fmt: skip
LOAD_TOKENS = 250
"""Of each request that runs when a rank is killed: more than are computed until then, and all have room."""

WORKER = ENGINE_ROLES["worker"]
"""In the command line of its processes."""

Answer = list[dict[str, Any]]
"""The tokens of an answer, each with its id, its logprob and the two most likely."""


def prompts_of(files: Sequence[Path], count: int) -> list[str]:
    """The first `count` prompts; SystemExit if there are fewer."""
    found: list[str] = []
    for file in files:
        if file.suffix != ".jsonl":
            found += [part.strip() for part in file.read_text(encoding="utf-8").split("\n\n") if part.strip()]
            continue
        for row in read_rows(file):
            turns = row.get("turns")
            found.append(row["question"] if "question" in row else turns[0] if turns else row["text"])
    found = found or list(OWN)
    if len(found) < count:
        raise SystemExit(f"there are {len(found)} prompts, {count} are asked for")
    return found[:count]


class Model:
    """A running engine, asked greedily."""

    def __init__(self, model: str | None, size: int, max_tokens: int, **options: Any) -> None:
        given = {"context_length": 2048, "log_level": "warning", **options}
        self.engine = sapwood.Engine(model, tensor_parallel_size=size, **given)
        self._params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *ended: object) -> None:
        self.engine.shutdown()

    def ask(self, prompts: Sequence[str]) -> list[Answer]:
        """All prompts side by side."""
        answers = self.engine.generate(
            list(prompts), self._params, return_logprob=True, top_logprobs_num=2, progress=False
        )
        return [self._tokens(answer["meta_info"]) for answer in answers]

    def alone(self, prompts: Sequence[str], *, cold: bool) -> list[Answer]:
        found = []
        for prompt in prompts:
            if cold:
                self.engine.flush_cache()
            found += self.ask([prompt])
        return found

    def running(self) -> int:
        """Requests that run now."""
        count: int = self.engine.server_info()["state"]["running"]
        return count

    def _tokens(self, meta: dict[str, Any]) -> Answer:
        told = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        return [
            {"id": own[1], "logprob": own[0], "top": [[value[1], value[0]] for value in top]}
            for own, top in told
        ]


def compare(one: list[Answer], several: list[Answer]) -> list[dict[str, Any]]:
    """Per prompt the first token that differs, and how near a tie it was; None where none does."""
    rows = []
    for index, (left, right) in enumerate(zip(one, several, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a["id"] != b["id"]), None)
        upto = len(left) if at is None else at
        off = max(
            (abs(a["logprob"] - b["logprob"]) for a, b in zip(left[:upto], right, strict=False)), default=0
        )
        row: dict[str, Any] = {"prompt": index, "tokens": len(left), "differs_at": at, "logprob_off": off}
        if at is not None:
            (_, first), (_, second) = left[at]["top"]
            row |= {"gap": first - second, "one": left[at]["id"], "several": right[at]["id"]}
        rows.append(row)
    return rows


def ranks_of(parent: int) -> list[psutil.Process]:
    """The processes of the worker's ranks, in order, that are alive."""
    found = {}
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):  # it ends meanwhile
            argv = child.cmdline()
            if WORKER in argv:
                rank = argv[-1].removeprefix("rank=") if argv[-1].startswith("rank=") else "0"
                found[int(rank)] = child
    return [found[rank] for rank in sorted(found)]


def alive(processes: Sequence[psutil.Process]) -> int:
    """How many of them have not ended."""
    count = 0
    for process in processes:
        with suppress(psutil.Error):
            count += process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return count


def kill_under_load(model: Model, prompts: Sequence[str], size: int) -> dict[str, Any]:
    """What became of requests that ran when the last rank was killed, and of two of them after."""
    before = model.alone(prompts[:2], cold=True)
    ends: list[str] = []

    def one(prompt: str) -> None:
        try:
            model.engine.generate(
                prompt, {"temperature": 0, "max_new_tokens": LOAD_TOKENS, "ignore_eos": True}
            )
            ends.append("answered")
        except ProcessDied as e:
            ends.append(e.message)

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while (running := model.running()) < len(prompts) and time.monotonic() < deadline:
        time.sleep(0.02)
    old = ranks_of(os.getpid())
    if len(old) != size:
        raise SystemExit(f"there are {len(old)} processes of {size} ranks")
    begin = time.perf_counter()
    old[-1].kill()
    for thread in threads:
        thread.join(60)
    told = time.perf_counter() - begin
    after = model.alone(prompts[:2], cold=False)
    return {
        "running": running,
        "errors": len(ends) - ends.count("answered"),
        "answered": ends.count("answered"),
        "seconds_to_errors": round(told, 3),
        "seconds_to_answers": round(time.perf_counter() - begin, 3),
        "same_answers": after == before,
        "left_behind": alive(old),
        "error": ends[0],
    }


def show(rows: list[dict[str, Any]], prompts: Sequence[str], size: int) -> None:
    print(f"{'prompt':<44} {'tokens':>6}  first difference from one process ({size} ranks)")
    for row, prompt in zip(rows, prompts, strict=True):
        title = json.dumps(prompt[:40])
        at = row["differs_at"]
        what = "none" if at is None else f"at {at}, where the two most likely are {row['gap']:.2g} nats apart"
        print(f"{title:<44} {row['tokens']:>6}  {what}; logprobs differ by {row['logprob_off']:.1g}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    prompts = prompts_of(args.text, args.prompts)
    begin = time.time()
    with Model(args.model, 1, args.max_tokens) as model:
        one = model.alone(prompts, cold=True)
    runs: dict[str, list[Answer]] = {}
    with Model(args.model, args.size, args.max_tokens, restart_worker=True) as model:
        cold = model.alone(prompts, cold=True)
        runs["cached"] = model.alone(prompts, cold=False)
        runs["side by side"] = model.ask(prompts)
        killed = kill_under_load(model, prompts, args.size)
    with Model(args.model, args.size, args.max_tokens, chunked_prefill_size=16) as model:
        runs["chunks of 16, side by side"] = model.ask(prompts)
    rows = compare(one, cold)
    differ = {name: sum(a != b for a, b in zip(cold, got, strict=True)) for name, got in runs.items()}
    show(rows, prompts, args.size)
    for name, count in differ.items():
        print(f"{args.size} ranks, {name}: {count} of {len(prompts)} differ from alone and cold")
    print("a rank killed under load:", ", ".join(f"{name}: {value}" for name, value in killed.items()))
    if args.json:
        result = {"sapwood": __version__, "torch": torch.__version__, "size": args.size}
        result |= {"seconds": round(time.time() - begin), "rows": rows, "itself": differ, "killed": killed}
        args.json.write_text(json.dumps(result, indent=1))
    handled = killed["errors"] == killed["running"] == len(prompts) and killed["same_answers"]
    return 0 if handled and not killed["left_behind"] and not any(differ.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
