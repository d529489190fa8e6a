"""The worker alone, driven step by step: what the tests of its promises share."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.messages import GrammarLoaded, LoadGrammar, RowStart, Step, StepResult, TokenLogprob
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.cpu import make_runner
from sapwood.srt.worker.grammars import Grammars, make_grammars
from sapwood.srt.worker.kv_pool import KvPool
from sapwood.srt.worker.runner import Runner
from tests.models import VOCAB, source_of

SLOTS = 700


@dataclass
class Bench:
    """A runner with its pool, driven row by row; keeps every logits row that was sampled from."""

    runner: Runner
    pool: KvPool
    grammars: Grammars
    number: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def spy(self) -> None:
        inner = self.runner._decoder.logits

        def record(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            out = inner(hidden, index)
            self.logits += [row.clone() for row in out]
            return out

        self.runner._decoder.logits = record  # type: ignore[method-assign]

    def step(
        self,
        parts: list[dict[str, Any]],
        admitted: list[RowStart] | None = None,
        released: Sequence[int] = (),
    ) -> StepResult:
        """Each part: row, start, ids, slots, samples, and how many of the ids are drafts, if any are."""
        drafts = [p.get("drafts", 0) for p in parts]
        step = Step(
            number=self.number,
            released=messages.pack(released),
            admitted=admitted or [],
            rows=messages.pack([p["row"] for p in parts]),
            starts=messages.pack([p["start"] for p in parts]),
            counts=messages.pack([len(p["ids"]) for p in parts]),
            ids=messages.pack(np.concatenate([p["ids"] for p in parts])),
            slots=messages.pack(np.concatenate([p["slots"] for p in parts])),
            samples=messages.pack([p["samples"] for p in parts]),
            drafts=messages.pack(drafts) if any(drafts) else b"",
        )
        self.number += 1
        return self.runner.run(step)

    def load(self, text: str) -> bytes:
        """The key of a grammar, once it is loaded."""
        key = text.encode()
        loaded = self.answer(text)
        assert loaded == GrammarLoaded(key)
        return key

    def answer(self, text: str) -> GrammarLoaded:
        """What is said of a grammar."""
        self.grammars.load(LoadGrammar(text.encode(), text))
        assert select.select([self.grammars], [], [], 60.0)[0]
        (loaded,) = self.grammars.finished()
        return loaded


def row_start(row: int, prefix: list[int] = [], history: list[int] = [], **params: Any) -> RowStart:  # noqa: B006
    prompt_len, read_from = params.pop("prompt_len", 0), params.pop("read_from", -1)
    grammar, choice = params.pop("grammar", b""), params.pop("choice", 0)
    sampling, seed = SamplingParams(**params), params.get("seed", 0)
    given, known = messages.pack(prefix), messages.pack(history)
    return RowStart(row, given, sampling, seed, choice, prompt_len, known, read_from, grammar)


def make_bench(folder: Path, **options: Any) -> Bench:
    config = make(model_path=str(folder), max_total_tokens=SLOTS, max_running_requests=8, **options)
    source = source_of(folder)
    grammars = make_grammars(source)
    runner, pool, _facts = make_runner(config, source, grammars)
    bench = Bench(runner, pool, grammars)
    bench.spy()
    return bench


@dataclass
class Stream:
    """One row's output, step by step; `propose` says what is proposed after the ids there are."""

    bench: Bench
    row: int
    prompt: list[int]
    params: dict[str, Any]
    propose: Callable[[list[int]], list[int]] = lambda output: []
    pooled: bool = True
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    begun: bool = False

    def start(self) -> RowStart:
        """For a row that begins, or begins again, with what it has."""
        ids = [*self.prompt, *self.output]
        return row_start(self.row, history=ids, prompt_len=len(self.prompt), **self.params)

    def part(self) -> dict[str, Any]:
        """What it extends by next: all of it at first, then its last token and what is proposed."""
        ids = [*self.prompt, *self.output]
        at = len(ids) - 1 if self.begun else 0
        drafts = self.propose(self.output) if self.begun else []
        new = [-1 if self.begun and self.pooled else ids[-1]] if self.begun else ids
        slots = range(self.row * 80 + at, self.row * 80 + at + len(new) + len(drafts))
        self.begun = True
        ids, count = [*new, *drafts], len(drafts)
        return {"row": self.row, "start": at, "ids": ids, "slots": slots, "samples": 1, "drafts": count}

    def take(self, result: StepResult, first: int, count: int) -> None:
        self.results.append(result)
        if any(error.row == self.row for error in result.errors):
            return
        self.output += messages.unpack(result.ids)[first : first + count].tolist()
        self.logprobs += [result.logprobs[i] for i in range(first, first + count) if i in result.logprobs]


def run_streams(streams: list[Stream], tokens: int, admitted: bool = False) -> None:
    """Run them side by side, in the steps of one bench, until each has so many tokens, failed or ended."""
    bench, going = streams[0].bench, list(streams)
    starts = [] if admitted else [stream.start() for stream in streams]
    while going:
        result = bench.step([stream.part() for stream in going], starts)
        counts = messages.unpack(result.counts).tolist() if result.counts else [1] * len(going)
        starts, first = [], 0
        for stream, count in zip(going, counts, strict=True):
            stream.take(result, first, count)
            first += count
        assert first * 4 == len(result.ids)
        over = {error.row for error in result.errors}
        over |= {row for row, state in result.grammars.items() if state.ended}
        going = [s for s in going if len(s.output) < tokens and s.row not in over]


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def pool_bytes(bench: Bench, slots: list[int]) -> list[bytes]:
    return [t[slots].numpy().tobytes() for t in [*bench.pool.k, *bench.pool.v]]
