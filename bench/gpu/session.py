"""A loaded model behind the worker's DeviceRunner, given Steps as the scheduler gives them.

Slots are contiguous runs, as the scheduler hands them out: one for each row's context, then one for the rows
of each step. Contexts are not computed: the pool is filled with random K and V, and rows are admitted with
their slots as a cached prefix.
"""

from __future__ import annotations

import json
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.gpu.parts import CASCADE
from bench.gpu.place import NotHere, Place
from bench.gpu.shape import Sizes
from sapwood.srt import messages
from sapwood.srt.config import Config, make
from sapwood.srt.errors import BadRequest, ConfigError
from sapwood.srt.loader.sources import resolve
from sapwood.srt.messages import RowStart, Step, StepResult
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.parallel import Alone
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.attention.gathered import GatheredAttention
from sapwood.srt.worker.device.build import Site, make_device_runner
from sapwood.srt.worker.device.runner import DeviceRunner
from sapwood.srt.worker.grammars import Grammars
from sapwood.srt.worker.kv_pool import KvPool

WARM = 4
"""Steps before those that are timed."""
PATIENCE = 60.0
"""Seconds without any result after which a step counts as lost."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=2**20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Pace:
    """Median seconds from one result to the next, how many positions each row had then, on average, and
    between which seconds how many were."""

    step_s: float
    context: float
    spread: dict[str, Any]


def spread_of(seconds: npt.NDArray[Any]) -> dict[str, Any]:
    """What a row says beside a median."""
    lowest, highest = float(seconds.min()), float(seconds.max())
    return {"lowest_s": lowest, "highest_s": highest, "samples": len(seconds)}


class Session:
    """One model with its runner. `options` are the configuration's."""

    def __init__(self, place: Place, sizes: Sizes, **options: Any) -> None:
        self.place, self.sizes = place, sizes
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(sizes.config))
            self.runner, self.pool, self.facts = self._make(folder, options)
        self._parts = self.runner._parts
        self.spec = self._parts.decoder.spec
        if place.dry or CASCADE in place.without:
            self._set_cascades(None if CASCADE in place.without else 1)
        self._fill()
        place.wait()
        self.load_s = time.perf_counter() - begin
        self._number = 0
        self._seated: list[int] = []

    def _make(self, folder: str, options: dict[str, Any]) -> tuple[Any, KvPool, dict[str, str]]:
        sizes, flashinfer = self.sizes, self.place.flashinfer()
        settings: dict[str, Any] = {
            "model_path": folder, "load_format": "dummy", "skip_tokenizer_init": True,
            "context_length": sizes.context_length, "max_running_requests": max(sizes.captured),
            "chunked_prefill_size": max(*sizes.prefills, sizes.prefix + sizes.suffix),
            "speculative_num_draft_tokens": 1, "cuda_graph_max_bs": max(sizes.captured), **options,
        }  # fmt: skip
        site = Site(self.place.accelerator, Alone(), flashinfer, self.place.operations())

        def made(config: Config) -> tuple[Any, KvPool, dict[str, str]]:
            return make_device_runner(config, resolve(config), site, Grammars(_no_engine), 1)

        try:
            return made(make(max_total_tokens=sizes.slots, **settings))
        except ConfigError as e:
            if e.param != "max_total_tokens":
                raise
        # Out here: an exception keeps alive what was made before it. As many as fit: larger batches are then
        # left out.
        return made(make(**settings))

    def _set_cascades(self, worth: int | None) -> None:
        """For how many positions a level is made: what a tiny model shares is never worth one."""
        for lane in self._parts.lanes:
            if getattr(lane._attention, "_worth", None) is not None:
                lane._attention._worth, lane._attention._worth_uncaptured = worth, worth or 1

    def _fill(self) -> None:
        """Random K and V."""
        for kv in (*self.pool.k, *self.pool.v):
            if kv.dtype.itemsize > 1:
                kv.normal_()
                continue
            for piece in torch.split(kv, 1 << 16):
                piece.copy_(torch.randn(piece.shape, device=kv.device))

    @property
    def slot_bytes(self) -> int:
        """K and V of one position in all layers."""
        return sum(kv[0].nbytes for kv in (*self.pool.k, *self.pool.v))

    def capture(self, sizes: list[int], until: float) -> list[int]:
        """Make the graphs of these numbers of rows, the largest first, as an idle worker does, until that
        time at most: those that there are."""
        forward, lanes = self._parts.forward, self._parts.lanes
        if not forward._sizes:
            return []
        forward._sizes = sorted(sizes, reverse=True)
        while time.monotonic() < until and self.runner.idle():
            pass
        self.place.wait()
        forward._sizes = [size for size in forward._sizes if all(size in lane.captured for lane in lanes)]
        return sorted(forward._sizes)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, no step runs as a graph."""
        forward, lanes = self._parts.forward, self._parts.lanes
        sizes, graphs = forward._sizes, [(lane._graphs, lane._sorted) for lane in lanes]
        forward._sizes = []
        for lane in lanes:
            lane._graphs, lane._sorted = {}, []
        try:
            yield
        finally:
            forward._sizes = sizes
            for lane, kept in zip(lanes, graphs, strict=True):
                lane._graphs, lane._sorted = kept

    @contextmanager
    def plain_torch(self) -> Iterator[None]:
        """Inside, attention is SDPA over gathered KV, and the rest of a layer plain torch: what
        `Site(attention=None, ops=None)` makes, over the same weights and pool."""
        decoder, lanes = self._parts.decoder, self._parts.lanes
        ops, attentions = decoder.ops, [lane._attention for lane in lanes]
        with self.eager():
            decoder.ops = DeviceOps(self.place.device, ops.dtype)
            for lane in lanes:
                lane._attention = GatheredAttention(self.spec, self.pool, self.place.device)
            try:
                yield
            finally:
                decoder.ops = ops
                for lane, attention in zip(lanes, attentions, strict=True):
                    lane._attention = attention

    def holds(self, batch: int, context: int, shared: int = 0) -> bool:
        """Whether the pool has slots for such decode steps."""
        return shared + batch * (context - shared + WARM + self.sizes.steps + 2) <= self.pool.num_slots

    def decode(
        self, batch: int, context: int, *, ahead: int = 2, shared: int = 0, told: bool = True, steps: int = 0
    ) -> Pace:
        """Decode steps with at most `ahead` in flight. All rows have their first `shared` positions in the
        same slots, which the steps say if `told`. Raises NotHere if the pool is too small."""
        if not self.holds(batch, context, shared):
            raise NotHere(f"{self.pool.num_slots} slots do not hold {batch} rows of {context} tokens")
        steps = WARM + (steps or self.sizes.steps) + 1
        own = context - shared
        prefixes = [
            np.concatenate([np.arange(shared), shared + row * own + np.arange(own)]) for row in range(batch)
        ]
        stretch = [0, shared, batch, *range(batch)] if shared and told else []
        released, starts = self._admit(prefixes)
        first = shared + batch * own

        def made() -> Iterator[Step]:
            for i in range(steps):
                begins = i == 0
                yield self._step(
                    rows=np.arange(batch), starts=np.full(batch, context + i), counts=np.ones(batch),
                    ids=np.full(batch, 5 if begins else -1), slots=first + i * batch + np.arange(batch),
                    released=released if begins else [], admitted=starts if begins else [], shared=stretch,
                )  # fmt: skip

        _begun, ended = self.run(made(), ahead)
        took = np.diff(ended)[WARM:]
        return Pace(statistics.median(took), context + (WARM + steps) / 2, spread_of(took))

    def prefill(
        self, tokens: int, *, cached: int = 0, ahead: int, repeats: int
    ) -> tuple[list[float], list[float]]:
        """When each of so many prompts of `cached` + `tokens` was given, and when its first token was there:
        one step each, in two rows by turns."""
        random = np.random.default_rng(0)
        vocab = self.sizes.config["vocab_size"]
        released, _ = self._admit([])

        def made() -> Iterator[Step]:
            for i in range(repeats + 1):
                row, own = i % 2, cached + (i % 2) * tokens
                start = _row_start(row, np.arange(cached))
                gone = released if i == 0 else [row] if i > 1 else []
                yield self._step(
                    rows=[row], starts=[cached], counts=[tokens], ids=random.integers(3, vocab, tokens),
                    slots=own + np.arange(tokens), released=gone, admitted=[start], shared=[],
                )  # fmt: skip

        begun, ended = self.run(made(), ahead)
        self._seated = [0, 1][: repeats + 1]
        return begun[1:], ended[1:]

    def first_logits(self, batch: int, context: int) -> Tensor:
        """float32 [vocab] of row 0 of a decode step of so many rows."""
        decoder, kept = self._parts.decoder, list[Tensor]()
        logits = decoder.logits

        def keep(hidden: Tensor, index: Tensor) -> Tensor:
            out: Tensor = logits(hidden, index)
            kept.append(out[0].clone())
            return out

        decoder.logits = keep
        try:
            released, starts = self._admit([row * context + np.arange(context) for row in range(batch)])
            step = self._step(
                rows=np.arange(batch), starts=np.full(batch, context), counts=np.ones(batch),
                ids=np.full(batch, 5), slots=batch * context + np.arange(batch), released=released,
                admitted=starts, shared=[],
            )  # fmt: skip
            self.run([step], 1)
        finally:
            decoder.logits = logits
        self.place.wait()
        return kept[-1]

    def run(self, steps: Iterable[Step], ahead: int) -> tuple[list[float], list[float]]:
        """When each step was started, and when its result was there; as serving does it, the next step is
        started when fewer than `ahead` are in flight."""
        begun: list[float] = []
        ended: list[float] = []
        for step in steps:
            while len(begun) - len(ended) >= ahead:
                self._await(ended)
            begun.append(time.perf_counter())
            self._note(self.runner.start(step), ended)
        while len(ended) < len(begun):
            self._await(ended)
        return begun, ended

    def _await(self, ended: list[float]) -> None:
        if not select.select([self.runner.fileno()], [], [], PATIENCE)[0]:
            raise RuntimeError(f"a step has no result after {PATIENCE:.0f} s")
        self._note(self.runner.finished(), ended)

    def _note(self, results: list[StepResult], ended: list[float]) -> None:
        for result in results:
            if result.errors:
                raise RuntimeError(f"step {result.number}: {result.errors[0].error}")
            ended.append(time.perf_counter())

    def _admit(self, prefixes: list[npt.NDArray[Any]]) -> tuple[list[int], list[RowStart]]:
        """The rows that are given up, and those that begin with these slots."""
        released, self._seated = self._seated, list(range(len(prefixes)))
        return released, [_row_start(row, prefix) for row, prefix in enumerate(prefixes)]

    def _step(self, *, admitted: list[RowStart], **columns: Any) -> Step:
        self._number += 1
        packed = {name: messages.pack(values) for name, values in columns.items()}
        return Step(
            number=self._number, admitted=admitted, samples=messages.pack(np.ones(len(columns["rows"]))),
            **packed,
        )  # fmt: skip


@contextmanager
def before_warm_up(tell: Callable[[], None]) -> Iterator[None]:
    """Inside, `tell` is called when a model is loaded, before it is warmed up."""
    warm_up = DeviceRunner.warm_up

    def told(runner: DeviceRunner) -> None:
        tell()
        warm_up(runner)

    DeviceRunner.warm_up = told  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceRunner.warm_up = warm_up  # type: ignore[method-assign]


def _row_start(row: int, prefix: npt.NDArray[Any]) -> RowStart:
    return RowStart(row, messages.pack(prefix), PARAMS, 0, 0, len(prefix))


def _no_engine() -> Any:
    raise BadRequest("the bench has no grammars")
