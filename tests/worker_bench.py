"""The worker alone, driven step by step: what the tests of its promises share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.messages import RowStart, Step, StepResult
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.kv_pool import KvPool
from sapwood.srt.worker.loop import make_runner
from sapwood.srt.worker.runner import Runner
from tests.models import VOCAB, source_of

SLOTS = 700


@dataclass
class Bench:
    """A runner with its pool, driven row by row; keeps every logits row that was sampled from."""

    runner: Runner
    pool: KvPool
    number: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def spy(self) -> None:
        inner = self.runner._decoder.logits

        def record(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            out = inner(hidden, index)
            self.logits += [row.clone() for row in out]
            return out

        self.runner._decoder.logits = record  # type: ignore[method-assign]

    def step(self, parts: list[dict[str, Any]], admitted: list[RowStart] | None = None) -> StepResult:
        """Each part: row, start, ids, slots, samples."""
        step = Step(
            number=self.number,
            released=b"",
            admitted=admitted or [],
            rows=messages.pack([p["row"] for p in parts]),
            starts=messages.pack([p["start"] for p in parts]),
            counts=messages.pack([len(p["ids"]) for p in parts]),
            ids=messages.pack(np.concatenate([p["ids"] for p in parts])),
            slots=messages.pack(np.concatenate([p["slots"] for p in parts])),
            samples=messages.pack([p["samples"] for p in parts]),
        )
        self.number += 1
        return self.runner.run(step)


def row_start(row: int, prefix: list[int] = [], history: list[int] = [], **params: Any) -> RowStart:  # noqa: B006
    prompt_len, read_from = params.pop("prompt_len", 0), params.pop("read_from", -1)
    sampling, seed = SamplingParams(**params), params.get("seed", 0)
    return RowStart(
        row, messages.pack(prefix), sampling, seed, 0, prompt_len, messages.pack(history), read_from
    )


def make_bench(folder: Path, **options: Any) -> Bench:
    config = make(model_path=str(folder), max_total_tokens=SLOTS, max_running_requests=8, **options)
    runner, pool, _facts = make_runner(config, source_of(folder))
    bench = Bench(runner, pool)
    bench.spy()
    return bench


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def pool_bytes(bench: Bench, slots: list[int]) -> list[bytes]:
    return [t[slots].numpy().tobytes() for t in [*bench.pool.k, *bench.pool.v]]
