"""The device's runner on a GPU, with its own streams, events, pinned memory and graphs; and on the stand-in,
so that these tests are known to work but for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.srt.messages import StepResult
from sapwood.srt.models.decoder import Batch
from sapwood.srt.worker.device.accelerator import Accelerator, Cuda
from tests.gpu.backends import the_package
from tests.gpu.device_bench import (
    both,
    capture_all,
    chain,
    device_bench,
    logits_of,
    rows_of_all_kinds,
    runner_of,
    step_of,
)
from tests.gpu.host_accelerator import HostAccelerator
from tests.gpu.package_double import package
from tests.gpu.test_gpu_streams import work
from tests.models import tiny_llama
from tests.worker_bench import Bench, ids_of, make_bench, row_start

TOLERANCE = 1e-3
"""Of float32 logits, which a GPU sums in another order."""
SPREAD = 0.016
"""Of bfloat16's errors, in parts of the logits' own spread."""

SLEEP = 10_000_000
"""Clock ticks of a GPU: some milliseconds."""


@dataclass
class Place:
    on_gpu: bool

    @property
    def accelerator(self) -> Accelerator:
        return Cuda(0) if self.on_gpu else HostAccelerator(late=2)

    def plain(self, folder: Path) -> Bench:
        """In float32, without FlashInfer."""
        return device_bench(folder, self.accelerator)

    def full(self, folder: Path, **options: Any) -> Bench:
        """In bfloat16, with FlashInfer or its double for all that there is."""
        flashinfer = the_package() if self.on_gpu else package()
        return device_bench(folder, self.accelerator, flashinfer, flashinfer, dtype="bfloat16", **options)

    def slow_down(self, bench: Bench) -> None:
        """So that the device is never done with a step before the next one is begun."""
        decoder = runner_of(bench)._parts.decoder
        logits = decoder.logits

        def late(*given: Tensor) -> Any:
            torch.cuda._sleep(SLEEP)
            return logits(*given)

        if self.on_gpu:
            decoder.logits = late

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """What makes the host wait for the device is an error."""
        if not self.on_gpu:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@pytest.fixture(params=["host", "cuda"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return Place(request.param == "cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of a size for which bench.gpu has compiled FlashInfer's kernels when it comes to these tests."""
    heads: dict[str, Any] = {"head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 2}
    return tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=128, **heads)


def test_plain_torch_gives_what_the_cpu_gives(place: Place, folder: Path) -> None:
    host = make_bench(folder, kv_cache_dtype="float32")
    both(host, place.plain(folder), rows_of_all_kinds, TOLERANCE)


def test_steps_that_overlap_give_what_they_give_one_by_one(place: Place, folder: Path) -> None:
    bench = place.full(folder)
    assert capture_all(bench) == 8
    place.slow_down(bench)
    one_by_one = chain(bench, 24, ahead=False)
    for _ in range(3):
        assert chain(bench, 24, ahead=True) == one_by_one


def forced(bench: Bench, rows: int, steps: int) -> Tensor:
    """The logits of rows that are told what to go on with, whatever they sample: two steps are in flight."""
    runner, given = runner_of(bench), [ids_of(6 + row + steps, row) for row in range(rows)]
    bench.logits.clear()
    ends, results = [6 + row for row in range(rows)], list[StepResult]()
    for step in range(1 + steps):
        places = zip(given, ends, strict=True)
        parts = [(ids[end:][:1], end) if step else (ids[:end], 0) for ids, end in places]
        admitted = [] if step else [row_start(row, temperature=0.0) for row in range(rows)]
        results += runner.start(step_of(bench.number, admitted, parts))
        bench.number += 1
        ends = [end + bool(step) for end in ends]
    while len(results) < 1 + steps:
        results += runner.finished()
    return logits_of(bench)


def test_graphs_compute_what_they_were_captured_from(place: Place, folder: Path) -> None:
    """Again and again, in both lanes by turns, one size after another."""
    captured, eager = place.full(folder), place.full(folder, disable_cuda_graph=True)
    assert (capture_all(captured), capture_all(eager)) == (8, 0)
    for rows in (8, 3, 1, 2, 7, 4, 1):
        ours, theirs = forced(captured, rows, 6), forced(eager, rows, 6)
        errors, spread = ours - theirs, theirs.std()
        assert errors.std() < SPREAD * spread, rows
        assert errors.abs().max() < 10 * SPREAD * spread, rows


def test_graphs_are_used(place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what they compute would not be seen by the tests."""
    bench = place.full(folder)
    capture_all(bench)
    decoder, eager = runner_of(bench)._parts.decoder, []
    forward: Callable[..., Tensor] = decoder.forward

    def counted(batch: Batch, *given: Any) -> Tensor:
        eager.append(len(batch.ids))
        return forward(batch, *given)

    monkeypatch.setattr(decoder, "forward", counted)
    forced(bench, 3, 6)
    assert eager == [6 + 7 + 8], "the prompts' step alone"


@pytest.mark.parametrize("graphs", [True, False])
def test_no_step_waits_for_the_device(place: Place, folder: Path, graphs: bool) -> None:
    """Whatever it has in it."""
    bench = place.full(folder, disable_cuda_graph=not graphs)
    capture_all(bench)
    chain(bench, 4, ahead=False)
    with place.without_waiting():
        ahead = work(bench)
    assert not [error for result in ahead.results for error in result.errors]
