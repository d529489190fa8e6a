"""The device's runner, behind the same bench as the CPU's: steps one by one, or two in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.srt import messages
from sapwood.srt.config import ModelSource, make
from sapwood.srt.messages import RowStart, Step, StepResult
from sapwood.srt.models.parallel import Alone
from sapwood.srt.worker.device.accelerator import Accelerator
from sapwood.srt.worker.device.build import Site, make_device_runner
from sapwood.srt.worker.device.runner import DeviceRunner
from sapwood.srt.worker.grammars import make_grammars
from tests.gpu.host_accelerator import HostAccelerator
from tests.models import source_of
from tests.worker_bench import SLOTS, Bench, Stream, ids_of, row_start, run_streams

SECONDS = 20.0
JSON = 'start: "{" /[a-z]{1,12}/ ":" /[0-9]{1,9}/ "}"'
ROW_SLOTS = 80
"""The slots of row r begin at r times so many."""
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.8, "seed": 4},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "min_tokens": 4, "logit_bias": {2: 50.0}, "stop_token_ids": [7]},
]


class OneByOne:
    """Runs a step and waits for its result; `spare` steps are begun before that of the first is asked for."""

    def __init__(self, inner: DeviceRunner) -> None:
        self.inner = inner
        self._decoder: Any = inner._parts.decoder

    def run(self, step: Step) -> StepResult:
        results = self.inner.start(step)
        deadline = time.monotonic() + SECONDS
        while not results:
            assert time.monotonic() < deadline, "a step has no result"
            results = self.inner.finished()
        (result,) = results
        return result


def device_bench(
    folder: Path,
    accelerator: Accelerator | None = None,
    attention: Any = None,
    ops: Any = None,
    **options: Any,
) -> Bench:
    """A bench over `folder`'s model, in float32, on the stand-in, unless told otherwise; `attention` and
    `ops`: FlashInfer, or what stands for it."""
    device = accelerator or HostAccelerator()
    defaults = {"max_running_requests": 8, "chunked_prefill_size": 256, "dtype": "float32"}
    settings = {"max_total_tokens": SLOTS, **defaults, **options}
    config = make(model_path=str(folder), **settings).on("cuda")
    source: ModelSource = source_of(folder)
    grammars = make_grammars(source)
    site = Site(device, Alone(), attention, ops)
    runner, pool, _facts = make_device_runner(config, source, site, grammars, 2)
    bench = Bench(OneByOne(runner), pool, grammars)  # type: ignore[arg-type]
    bench.spy()
    return bench


def runner_of(bench: Bench) -> Any:
    assert isinstance(bench.runner, OneByOne)
    return bench.runner.inner


def capture_all(bench: Bench) -> int:
    count = 0
    while runner_of(bench).idle():
        count += 1
    return count


def logits_of(bench: Bench) -> Tensor:
    """All that were sampled from, [lines, vocab]."""
    if isinstance(bench.runner, OneByOne):
        runner_of(bench)._parts.accelerator.synchronize()
    return torch.stack([line.cpu() for line in bench.logits])


def both(host: Bench, device: Bench, run: Callable[[Bench], Any], tolerance: float = 1e-4) -> Any:
    """What the device gives, which must be what the host gives; logits may differ in their last digits."""
    host.logits.clear()
    device.logits.clear()
    expected, found = run(host), run(device)
    assert found == expected
    ours, theirs = logits_of(device), logits_of(host)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < tolerance
    return found


def rows_of_all_kinds(bench: Bench) -> Any:
    streams = [Stream(bench, i, ids_of(11 + 7 * i, i), params) for i, params in enumerate(KINDS)]
    run_streams(streams, 12)
    return outputs(streams)


def outputs(streams: list[Stream]) -> list[Any]:
    told = [[(p.id, [i for i, _ in p.top]) for p in s.logprobs] for s in streams]
    return [[s.output for s in streams], told]


def chain(
    bench: Bench, tokens: int, ahead: bool, rows: int = 3, results: list[StepResult] | None = None
) -> list[list[int]]:
    """What `rows` rows decode, each step begun before the one before is read if `ahead`."""
    runner, number, taken = runner_of(bench), bench.number, 0
    prompts = [ids_of(6 + r, 20 + r) for r in range(rows)]
    results = [] if results is None else results
    for step in range(tokens):
        parts = [(p if step == 0 else [-1], 0 if step == 0 else len(p) + step - 1) for p in prompts]
        results += runner.start(
            step_of(number + step, [row_start(r, seed=r) for r in range(rows)] if step == 0 else [], parts)
        )
        while len(results) < (step if ahead else step + 1):
            results += runner.finished()
        taken = max(taken, step + 1 - len(results))
    while len(results) < tokens:
        results += runner.finished()
    assert taken == (1 if ahead else 0)
    bench.number += tokens
    assert [result.number for result in results] == list(range(number, number + tokens))
    ids = [messages.unpack(result.ids).tolist() for result in results]
    return [[step[row] for step in ids] for row in range(rows)]


def step_of(number: int, admitted: list[RowStart], parts: Sequence[tuple[list[int], int]]) -> Step:
    """Row i extends by these ids, the first of them at this position."""
    slots = [
        np.arange(ROW_SLOTS * r + start, ROW_SLOTS * r + start + len(ids))
        for r, (ids, start) in enumerate(parts)
    ]
    return Step(
        number=number,
        released=b"",
        admitted=admitted,
        rows=messages.pack(range(len(parts))),
        starts=messages.pack([start for _ids, start in parts]),
        counts=messages.pack([len(ids) for ids, _start in parts]),
        ids=messages.pack(np.concatenate([ids for ids, _start in parts])),
        slots=messages.pack(np.concatenate(slots)),
        samples=messages.pack([1] * len(parts)),
    )
