"""Whatever a step asks for, its work on the device's streams is in order; and what would put it out of order
is found."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.messages import RowStart, Step, StepResult
from sapwood.srt.worker.attention.flashinfer import FlashInferAttention
from sapwood.srt.worker.attention.wrappers import INT_WORKSPACE_BYTES, Room
from sapwood.srt.worker.device import forward as forward_module, runner as runner_module
from sapwood.srt.worker.device.columns import Int32s
from sapwood.srt.worker.device.lane import Lane
from sapwood.srt.worker.device.pieces import pieces_of
from sapwood.srt.worker.device.runner import DeviceRunner, Parts
from sapwood.srt.worker.device.transfer import Download
from tests.gpu.device_bench import JSON, ROW_SLOTS, capture_all, device_bench, runner_of
from tests.gpu.package_double import package
from tests.gpu.stream_checks import StreamAccelerator, StreamEvent
from tests.gpu.stream_order import COMPUTE, COPY, DEFAULT, PLAN, Stream
from tests.models import tiny_llama
from tests.worker_bench import Bench, ids_of, row_start

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=24
    )


class Ahead:
    """Rows that extend step by step: two steps are in flight, and none is read before it must be, if events
    are late. Drafts are taken to be wrong."""

    def __init__(self, bench: Bench) -> None:
        self.results: list[StepResult] = []
        self._bench = bench
        self._runner: DeviceRunner = runner_of(bench)
        self._positions: dict[int, int] = {}
        self._first = bench.number
        self.in_flight = 0
        """The most steps at a time."""

    def step(
        self,
        extended: Mapping[int, list[int]],
        admitted: Sequence[RowStart] = (),
        released: Sequence[int] = (),
        samples: Mapping[int, int] = {},
    ) -> None:
        """Each row by these ids: behind a -1, which is its last, they are drafts."""
        for start in admitted:
            self._positions[start.row] = len(messages.unpack(start.prefix))
        drafts = [len(ids) - 1 if ids[0] == -1 else 0 for ids in extended.values()]
        starts = [self._positions[row] for row in extended]
        sizes = [len(ids) for ids in extended.values()]
        places = zip(extended, starts, sizes, strict=True)
        slots = [ROW_SLOTS * row + np.arange(start, start + size) for row, start, size in places]
        step = Step(
            number=self._bench.number,
            released=messages.pack(released),
            admitted=list(admitted),
            rows=messages.pack(list(extended)),
            starts=messages.pack(starts),
            counts=messages.pack(sizes),
            ids=messages.pack([id for ids in extended.values() for id in ids]),
            slots=messages.pack(np.concatenate(slots)),
            samples=messages.pack([samples.get(row, 1) for row in extended]),
            drafts=messages.pack(drafts) if any(drafts) else b"",
        )
        self._bench.number += 1
        for row, size, wrong in zip(extended, sizes, drafts, strict=True):
            self._positions[row] += size - wrong
        self.results += self._runner.start(step)
        self.in_flight = max(self.in_flight, self._bench.number - self._first - len(self.results))

    def decode(self, rows: Sequence[int], steps: int) -> None:
        for _ in range(steps):
            self.step({row: [-1] for row in rows})

    def end(self) -> None:
        while len(self.results) < self._bench.number - self._first:
            self.results += self._runner.finished()


def work(bench: Bench) -> Ahead:
    """Steps with all that there is."""
    ahead, prompt = Ahead(bench), ids_of(30, 5)
    rows = [
        row_start(0, temperature=0.0),
        row_start(1, seed=3, logprobs=3, logprob_ids=[3, 9]),
        row_start(2, temperature=0.8, top_p=0.8, top_k=5, min_p=0.05, seed=4),
        row_start(3, history=ids_of(6, 3), prompt_len=6, **PENALTIES),
        row_start(4, temperature=0.0, min_tokens=4, logit_bias={2: 50.0}, stop_token_ids=[7]),
        row_start(5, seed=9),
        row_start(6, history=prompt, prompt_len=30, read_from=1, logprobs=2, logprob_ids=[3, 9]),
        row_start(7, history=prompt, prompt_len=30, pooling="mean"),
    ]
    drawn = range(6)
    prompts = {row: ids_of(6, row) for row in drawn}
    chunks = [dict.fromkeys((6, 7), part) for part in (prompt[:18], prompt[18:])]
    ahead.step(prompts | chunks[0], rows, samples={5: 4, 6: 0, 7: 0})
    ahead.step({row: [-1] for row in drawn} | chunks[1], samples={6: 0, 7: 0})
    ahead.decode(drawn, 3)
    ahead.step({row: [-1, 4, 4] if row < 2 else [-1] for row in drawn})
    penalised = [row_start(row, history=ids_of(6, row), prompt_len=6, **PENALTIES) for row in (2, 4, 5, 6, 7)]
    ahead.step({row: [-1] for row in (0, 1, 3)} | {2: ids_of(6, 2)}, penalised[:1], released=[2, 4])
    ahead.step(
        {row: [-1] for row in (0, 1, 2, 3)} | {row: ids_of(6, row) for row in (4, 5, 6, 7)},
        penalised[1:],
        [5, 6, 7],
    )
    ahead.decode(range(8), 2)
    again = row_start(3, prefix=list(range(5)), history=ids_of(6, 3), prompt_len=6, **PENALTIES)
    ahead.step({0: [-1], 1: [-1], 3: ids_of(1, 3)}, [again], released=[3, 4, 5, 6, 7])
    ahead.decode((0, 1, 3), 4)
    grammar = row_start(4, seed=4, temperature=1.0, grammar=bench.load(JSON))
    ahead.step({0: [-1], 1: [-1], 4: ids_of(9, 3)}, [grammar])
    ahead.decode((0, 1, 4), 3)
    ahead.decode((0, 1), 2)
    ahead.end()
    return ahead


KINDS = ["eager", "graphs", "graphs made meanwhile", "gathered", "small groups"]


@pytest.mark.parametrize(("kind", "late"), [*((kind, 50) for kind in KINDS), ("graphs made meanwhile", 3)])
def test_all_work_is_in_order(folder: Path, kind: str, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = StreamAccelerator(late)
    if kind == "graphs made meanwhile":
        monkeypatch.setattr(forward_module, "EAGER_STEPS", 1)
    if kind == "small groups":
        monkeypatch.setattr(runner_module, "pieces_of", functools.partial(pieces_of, most=3))
    with accelerator.watch:
        attention = None if kind == "gathered" else package()
        bench = device_bench(folder, accelerator, attention, disable_cuda_graph=kind == "eager")
        if kind == "graphs":
            capture_all(bench)
        ahead = work(bench)
    assert accelerator.watch.faults == []
    assert ahead.in_flight == 2
    results = ahead.results
    assert not [error for result in results for error in result.errors]
    for given in ("reads", "counts", "logprobs", "grammars"):
        assert any(getattr(result, given) for result in results), given
    assert accelerator.watch.streams == {DEFAULT, COMPUTE, PLAN, COPY}
    assert bool(accelerator.replays) == ("graphs" in kind)


def with_parts(monkeypatch: pytest.MonkeyPatch, change: Callable[[Parts], None]) -> None:
    init = DeviceRunner.__init__

    def other(self: DeviceRunner, parts: Parts) -> None:
        change(parts)
        init(self, parts)

    monkeypatch.setattr(DeviceRunner, "__init__", other)


def without_waits_of(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        wait = StreamEvent.wait

        def other(self: StreamEvent, stream: Stream) -> None:
            if stream.name != name:
                wait(self, stream)

        monkeypatch.setattr(StreamEvent, "wait", other)

    return mutate


def without_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamAccelerator, "synchronize", lambda self: None)


def admitting_on_the_plan_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = DeviceRunner._admit

    def other(self: DeviceRunner, step: Step) -> None:
        with self._parts.accelerator.using(self._parts.plan):
            admit(self, step)

    monkeypatch.setattr(DeviceRunner, "_admit", other)


def seating_on_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(parts: Parts) -> None:
        seat = parts.columns.seat

        def other(row: int, prefix: Int32s) -> None:
            with parts.accelerator.using(parts.compute):
                seat(row, prefix)

        parts.columns.seat = other  # type: ignore[method-assign]

    with_parts(monkeypatch, change)


def reading_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = DeviceRunner._finish

    def other(self: DeviceRunner) -> None:
        self._pending[0].done = SimpleNamespace(synchronize=lambda: None)
        finish(self)

    monkeypatch.setattr(DeviceRunner, "_finish", other)


def freeing_what_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = Download.fetch

    def other(self: Download) -> None:
        fetch(self)
        del self._packed

    monkeypatch.setattr(Download, "fetch", other)


def with_one_lane_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time as if it were free."""

    def change(parts: Parts) -> None:
        parts.lanes = [parts.lanes[0], copy.copy(parts.lanes[0])]

    with_parts(monkeypatch, change)


def with_lanes_that_are_never_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = DeviceRunner._launch

    def other(self: DeviceRunner, step: Step, lane: Lane, begun: float) -> None:
        launch(self, step, lane, begun)
        lane.busy = False

    monkeypatch.setattr(DeviceRunner, "_launch", other)


def planning_on_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    using = StreamAccelerator.using

    def other(self: StreamAccelerator, stream: Stream) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if stream.name == PLAN else using(self, stream)

    monkeypatch.setattr(StreamAccelerator, "using", other)


MUTATIONS = [
    (without_waits_of(COMPUTE), "race of plan (lane.py", "and compute"),
    (without_waits_of(COPY), "race of compute (transfer.py", "and copy"),
    (without_synchronize, "race of default", "and compute"),
    (admitting_on_the_plan_stream, "race of plan (columns.py", "and compute"),
    (seating_on_the_compute_stream, "race of compute (columns.py", "and plan (lane.py"),
    (reading_before_the_end, "race of copy (transfer.py", "and the host (transfer.py"),
    (freeing_what_is_fetched, "freed under copy (transfer.py", "made on compute"),
    (with_one_lane_for_both, "race of compute", "and plan (lane.py"),
    (with_lanes_that_are_never_busy, "race of plan (lane.py", "and the host (lane.py"),
    (planning_on_no_stream, "race of default (lane.py", "and compute"),
]


@pytest.mark.parametrize(
    ("mutate", "begin", "then"),
    MUTATIONS,
    ids=["compute does not wait", "copy does not wait", *(mutate.__name__ for mutate, *_ in MUTATIONS[2:])],
)
def test_what_is_out_of_order_is_found(
    folder: Path,
    mutate: Callable[[pytest.MonkeyPatch], None],
    begin: str,
    then: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    accelerator = StreamAccelerator(late=50)
    with accelerator.watch:
        work(device_bench(folder, accelerator))
    assert [fault for fault in accelerator.watch.faults if fault.startswith(begin) and then in fault]


def with_wrappers_of_both_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    init, made = FlashInferAttention.__init__, {}  # type: ignore[var-annotated]

    def other(self: FlashInferAttention, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._made = made

    monkeypatch.setattr(FlashInferAttention, "__init__", other)


def with_pinned_rooms_of_both_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for_graph, pinned = FlashInferAttention.for_graph, []  # type: ignore[var-annotated]

    def other(self: FlashInferAttention, rows: int, most: int) -> Any:
        if pinned and not self._rooms:
            size = (INT_WORKSPACE_BYTES,)
            ints = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in pinned]
            self._rooms = [Room(*both) for both in zip(ints, pinned, strict=True)]
        found = for_graph(self, rows, most)
        pinned[:] = [room.pinned for room in self._rooms]
        return found

    monkeypatch.setattr(FlashInferAttention, "for_graph", other)


@pytest.mark.parametrize(
    ("mutate", "graphs", "begin", "then"),
    [
        (with_wrappers_of_both_lanes, False, "race of compute (flashinfer.py", "and plan (wrappers.py"),
        (with_wrappers_of_both_lanes, False, "race of plan (wrappers.py", "and the host (wrappers.py"),
        (with_pinned_rooms_of_both_lanes, True, "race of plan (wrappers.py", "and the host (wrappers.py"),
    ],
    ids=["schedules on the device", "schedules on the host", "those of graphs"],
)
def test_a_schedule_that_is_still_needed_is_not_written_over(
    folder: Path,
    mutate: Callable[[pytest.MonkeyPatch], None],
    graphs: bool,
    begin: str,
    then: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    accelerator = StreamAccelerator(late=50)
    with accelerator.watch:
        bench = device_bench(folder, accelerator, package(), disable_cuda_graph=not graphs)
        if graphs:
            capture_all(bench)
        ahead = Ahead(bench)
        ahead.step({row: ids_of(6, row) for row in range(2)}, [row_start(row) for row in range(2)])
        ahead.decode(range(2), 6)
        ahead.end()
    assert [fault for fault in accelerator.watch.faults if fault.startswith(begin) and then in fault]


@pytest.mark.parametrize("waiting", ["nobody", "another thread", "the host", "its stream", "all"])
def test_memory_may_be_given_up_once_its_stream_comes_after_its_last_use(waiting: str) -> None:
    accelerator = StreamAccelerator()
    there, done = accelerator.event(), accelerator.event()
    first, second = accelerator.stream(), accelerator.stream()
    with accelerator.watch:
        with accelerator.using(first):
            made = torch.ones(4, device=accelerator.device)
            there.record(first)
        there.wait(second)
        with accelerator.using(second):
            made.sum()
            done.record(second)

        def in_a_thread() -> None:
            thread = threading.Thread(target=done.query)
            thread.start()
            thread.join()

        waits: dict[str, Callable[[], object]] = {
            "nobody": lambda: None,
            "another thread": in_a_thread,
            "the host": done.synchronize,
            "its stream": lambda: done.wait(first),
            "all": accelerator.synchronize,
        }
        waits[waiting]()
        del made
    assert bool(accelerator.watch.faults) == (waiting in ("nobody", "another thread"))
