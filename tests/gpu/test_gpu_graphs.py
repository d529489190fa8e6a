"""The graphs of the device's runner: when they are made, in which a step runs, and what they do without."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.messages import StepResult
from sapwood.srt.worker.device import forward as forward_module, runner as runner_module
from sapwood.srt.worker.device.accelerator import Cuda
from sapwood.srt.worker.device.forward import graph_sizes
from sapwood.srt.worker.device.lane import Given, Lane
from tests.gpu.device_bench import ROW_SLOTS, capture_all, chain, device_bench, runner_of
from tests.gpu.host_accelerator import HostAccelerator
from tests.gpu.package_double import package
from tests.gpu.stream_checks import StreamAccelerator
from tests.gpu.stream_order import COMPUTE
from tests.models import tiny_llama
from tests.worker_bench import SLOTS, ids_of, row_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=24
    )


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_module, "EAGER_STEPS", 5)


def test_a_decode_step_runs_in_the_next_larger_graph(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    assert graph_sizes(8) == [8, 4, 2, 1]
    assert capture_all(bench) == accelerator.captures == 8, "one at a time for each of both lanes"
    eager = device_bench(folder, HostAccelerator(), package(), disable_cuda_graph=True)
    assert chain(bench, 9, ahead=False) == chain(eager, 9, ahead=False)
    assert accelerator.replays == 8, "all but the prompts' step"


def test_what_pads_a_graph_touches_nobody(folder: Path) -> None:
    bench = device_bench(folder, HostAccelerator(), package())
    capture_all(bench)
    chain(bench, 9, ahead=False)
    used = {ROW_SLOTS * r + p for r in range(3) for p in range(6 + r + 8)}
    others = [slot for slot in range(SLOTS) if slot not in used]
    for layer in (*bench.pool.k, *bench.pool.v):
        assert not layer[others].any()


def test_one_graph_is_made_at_a_time(folder: Path) -> None:
    """Whoever comes meanwhile waits for it; the next step runs in what there is."""
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package(), max_running_requests=3)
    runner = runner_of(bench)
    made = []
    while runner.has_spare_work():
        before = accelerator.captures
        assert runner.idle()
        assert accelerator.captures == before + 1
        made.append([list(lane.captured) for lane in runner._parts.lanes])
        chain(bench, 3, ahead=False)
    assert made == [[[3], []], [[3], [3]], [[2, 3], [3]], [[2, 3]] * 2, [[1, 2, 3], [2, 3]], [[1, 2, 3]] * 2]
    assert not runner.idle()
    assert accelerator.replays == 11, "but for the prompts all, once both lanes have one"


@pytest.mark.usefixtures("_impatient")
def test_a_server_that_is_never_idle_gets_the_graphs_that_fit(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    chain(bench, 16, ahead=False)
    lanes = runner_of(bench)._parts.lanes
    assert [list(lane.captured) for lane in lanes] == [[4], [4]]
    assert accelerator.replays
    chain(bench, 16, ahead=False, rows=1)
    assert [list(lane.captured) for lane in lanes] == [[1, 4]] * 2, "a larger one does, but does not fit"


@pytest.mark.usefixtures("_impatient")
def test_the_time_that_a_graph_takes_to_make_is_no_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    capture, passed = accelerator.capture, [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed[0])
    monkeypatch.setattr(runner_module, "time", clock)

    def slow(run: Callable[[], object], stream: Any) -> Callable[[], None]:
        passed[0] += 3600
        return capture(run, stream)

    accelerator.capture = slow  # type: ignore[method-assign]
    results: list[StepResult] = []
    chain(bench, 16, ahead=False, results=results)
    assert accelerator.captures
    assert max(result.seconds for result in results) < 3600


def test_a_graph_for_which_there_is_no_memory_is_done_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    assert runner_of(bench).idle()

    def full(run: Callable[[], object], stream: Any) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    accelerator.capture = full  # type: ignore[method-assign]
    assert not runner_of(bench).idle()
    assert not runner_of(bench).has_spare_work()
    assert "no memory for a graph of 8 rows" in caplog.text
    eager = device_bench(folder, HostAccelerator(), package(), disable_cuda_graph=True)
    assert chain(bench, 9, ahead=False) == chain(eager, 9, ahead=False)
    assert accelerator.replays, "the one that there is goes on"


def test_other_errors_of_a_capture_and_those_of_several_ranks_are_told(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())

    def broken(run: Callable[[], object], stream: Any) -> Callable[[], None]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    accelerator.capture = broken  # type: ignore[method-assign]
    with pytest.raises(torch.AcceleratorError):
        runner_of(bench).idle()
    forward = runner_of(bench)._parts.forward
    forward._group = SimpleNamespace(size=2)

    def full(run: Callable[[], object], stream: Any) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    accelerator.capture = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        runner_of(bench).idle()


@pytest.mark.parametrize("length", [100, 127, 128])
def test_a_short_context_is_warmed_up_within_it(tmp_path: Path, length: int) -> None:
    folder = tiny_llama(tmp_path, max_position_embeddings=length)
    assert capture_all(device_bench(folder, HostAccelerator(), package())) == 8


def test_a_step_that_reads_more_than_a_graph_may_is_run_without(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package(), max_total_tokens=30)
    capture_all(bench)
    prefix = list(range(24))
    ids = ids_of(25, 2)
    bench.step([{"row": 7, "start": 0, "ids": ids[:24], "slots": prefix, "samples": 0}], [row_start(7)])
    starts = [row_start(r, prefix=prefix, temperature=0.0) for r in range(6)]
    parts = [{"row": r, "start": 24, "ids": ids[24:], "slots": [24 + r], "samples": 1} for r in range(6)]
    tokens = messages.unpack(bench.step(parts, starts).ids).tolist()
    assert accelerator.replays == 0
    assert len(set(tokens)) == 1


def test_what_is_run_beforehand_is_on_the_stream_of_the_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, streams = StreamAccelerator(), []
    warm_ups = Lane.warm_ups

    def told(self: Lane) -> Iterator[Given]:
        streams.append(accelerator._order.current)
        yield from warm_ups(self)
        streams.append(accelerator._order.current)

    monkeypatch.setattr(Lane, "warm_ups", told)
    with accelerator.watch:
        device_bench(folder, accelerator, package())
    assert streams == [COMPUTE] * 4


def test_what_is_small_need_not_wait_for_what_computes(folder: Path) -> None:
    class Streams(HostAccelerator):
        def stream(self, urgent: bool = False) -> Any:
            return "urgent" if urgent else "patient"

    parts = runner_of(device_bench(folder, Streams(), package()))._parts
    assert (parts.compute, parts.plan, parts.copy) == ("patient", "urgent", "urgent")


@pytest.mark.parametrize("urgent", [False, True])
def test_an_urgent_stream_of_a_gpu_goes_first(urgent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append(options))
    gpu().stream(urgent)
    assert made == [{"priority": -1 if urgent else 0}], "a lower number goes first"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_made(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def graph(*given: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    seen: list[bool] = []

    def broken() -> None:
        seen.append(gc.isenabled())
        raise ValueError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        gpu().capture(lambda: seen.append(gc.isenabled()), None)
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError):  # noqa: PT011
            gpu().capture(broken, None)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]


def gpu() -> Cuda:
    """One of which nothing is used that is not replaced."""
    made = Cuda.__new__(Cuda)
    made.device = torch.device("cuda", 0)
    made._graphs = None
    return made
