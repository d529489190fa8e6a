"""What a step costs in the scheduler alone, to plan it and to take in its result; the worker does nothing.

    python -m bench.step_cost [--vllm PYTHON] [--json FILE]

`decode`: 256 and 1,024 rows that decode, by context length and by the size of the tree. `waiting`: rows that
decode and end, while 10,000 requests wait under `lpm`, per step, all included: the queue's upkeep as the tree
grows and shrinks, admissions, ends. `--vllm` is the Python of an environment with vLLM: its scheduler is
driven alone on the same mix (bench/vllm_scheduler.py). Microseconds; medians but where it says mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.srt import messages
from sapwood.srt.config import ModelSource, make
from sapwood.srt.messages import Step, StepResult, Submit
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler.loop import Scheduler, make_state

STEPS = 200


class Null:
    """The scheduler and a worker that answers at once."""

    def __init__(self, rows: int, slots: int, context: int, budget: int = 8192) -> None:
        config = make(
            random_seed=1,
            max_running_requests=rows,
            chunked_prefill_size=budget,
            max_queued_requests=1_000_000,
        )
        source = ModelSource(
            name="m", format="dummy", path="", files=[], architecture="LlamaForCausalLM", config={},
            vocab_size=2**31 - 1, context_length=context, eos_ids=[1], tokenizer_file=None,
            chat_template=None, template_vars={}, sampling_defaults={},
        )  # fmt: skip
        self.state = make_state(config, source, slots)
        self.scheduler = Scheduler(self.state, self._send)
        self._sent: list[Step] = []
        self._key = 1

    def _send(self, step: Step) -> bool:
        self._sent.append(step)
        return True

    def submit(self, ids: np.ndarray[Any, Any], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        self.scheduler.handle(Submit(self._key, 0, "r", messages.pack(ids), params, "", 0.0))
        self._key += 1

    def step(self) -> float:
        """One more step planned and one answered; seconds in the scheduler."""
        begin = time.thread_time()
        self.scheduler.advance()
        planned = time.thread_time() - begin
        if not self._sent:
            return planned
        step = self._sent.pop(0)
        drawn = int(messages.unpack(step.samples).sum())
        result = StepResult(step.number, messages.pack(np.full(drawn, 3)), {}, [], 0.001)
        begin = time.thread_time()
        self.scheduler.handle(result)
        self.state.outgoing.clear()
        return planned + time.thread_time() - begin


def decode(rows: int, context: int, nodes: int) -> float:
    """Microseconds of a step of `rows` decodes of `context` tokens each, in a tree of at least `nodes`."""
    rng = np.random.default_rng(0)
    longest = context + 3 * STEPS + 16
    null = Null(rows, rows * longest + 8 * nodes + 1000, longest)
    tree, pool = null.state.tree, null.state.pool
    for _ in range(nodes):
        ids = rng.integers(10, 2**30, 4, dtype=np.int32)
        tree.insert("", ids.tobytes(), pool.allocate(4))
    for _ in range(rows):
        null.submit(rng.integers(10, 2**30, context, dtype=np.int32), 2 * STEPS + 8)
    while int(null.state.rows.sampled.sum()) < rows:
        null.step()
    for _ in range(8):
        null.step()
    return statistics.median(null.step() for _ in range(STEPS)) * 1e6


def mix(waiting: int, seed: int = 0) -> list[tuple[np.ndarray[Any, Any], int]]:
    """Requests in 100 families: 512 shared tokens, 64 of their own, 32 to 96 out."""
    rng = np.random.default_rng(seed)
    families = rng.integers(10, 100_000, (100, 512), dtype=np.int32)
    return [
        (
            np.concatenate([families[rng.integers(100)], rng.integers(10, 100_000, 64, dtype=np.int32)]),
            int(rng.integers(32, 97)),
        )
        for _ in range(waiting)
    ]


def waiting(rows: int, waiting: int, steps: int) -> dict[str, float]:
    """Microseconds of a step while so many wait: more come as others are admitted."""
    null = Null(rows, 400_000, 1024, budget=2048)
    requests = mix(2 * waiting)
    begin = time.thread_time()
    for ids, out in requests[:waiting]:
        null.submit(ids, out)
    submit = (time.thread_time() - begin) / waiting
    more = iter(requests[waiting:])
    for _ in range(50):
        null.step()
    times = []
    for _ in range(steps):
        while len(null.state.waiting) < waiting and (new := next(more, None)) is not None:
            null.submit(*new)
        times.append(null.step())
    return {
        "mean": statistics.mean(times) * 1e6,
        "median": statistics.median(times) * 1e6,
        "p99": float(np.quantile(times, 0.99)) * 1e6,
        "submit": submit * 1e6,
        "left waiting": len(null.state.waiting),
    }


def vllm(python: Path, *arguments: str) -> dict[str, Any]:
    """What bench/vllm_scheduler.py prints."""
    script = Path(__file__).with_name("vllm_scheduler.py")
    done = subprocess.run([python, "-P", script, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"decode": [], "waiting": {}}
    for rows in (256, 1024):
        for context, nodes in ((128, 0), (2048, 0), (128, 100_000)):
            took = decode(rows, context, nodes)
            results["decode"].append({"rows": rows, "context": context, "nodes": nodes, "us": took})
            print(f"{rows:5} rows decode, context {context:5}, tree {nodes:7}: {took:8.0f} us", flush=True)
    results["waiting"] = waiting(256, 10_000, 2000)
    print(f"256 rows, 10,000 waiting: {results['waiting']}", flush=True)
    if args.vllm is not None:
        results["vllm"] = {
            "decode": [vllm(args.vllm, "decode", str(rows), "128") for rows in (256, 1024)],
            "waiting": vllm(args.vllm, "waiting", "256", "10000", "500"),
        }
        print(json.dumps(results["vllm"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
