"""The device's runner, graphs and all, on a stand-in: it gives what the CPU's runner gives, step by step."""

from __future__ import annotations

import functools
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.errors import ConfigError
from sapwood.srt.messages import RowStart, Step, StepResult
from sapwood.srt.worker.device import runner as runner_module
from sapwood.srt.worker.device.forward import EAGER_STEPS, graph_sizes
from sapwood.srt.worker.device.pieces import pieces_of
from sapwood.srt.worker.sampler import Places
from tests.gpu.device_bench import OneByOne, device_bench
from tests.gpu.host_accelerator import HostAccelerator, HostEvent
from tests.gpu.package_double import package
from tests.models import tiny_llama
from tests.worker_bench import SLOTS, Bench, Stream, ids_of, make_bench, row_start, run_streams

JSON = 'start: "{" /[a-z]{1,12}/ ":" /[0-9]{1,9}/ "}"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=24
    )


@pytest.fixture(scope="module")
def host(folder: Path) -> Bench:
    return make_bench(folder, kv_cache_dtype="float32")


def runner_of(bench: Bench) -> Any:
    assert isinstance(bench.runner, OneByOne)
    return bench.runner.inner


def capture_all(bench: Bench) -> int:
    count = 0
    while runner_of(bench).idle():
        count += 1
    return count


@pytest.fixture(params=["eager", "graphs", "graphs, late events", "gathered"])
def device(request: pytest.FixtureRequest, folder: Path) -> Bench:
    accelerator = HostAccelerator(late=3 if "late" in request.param else 0)
    attention = None if request.param == "gathered" else package()
    bench = device_bench(folder, accelerator, attention, disable_cuda_graph=request.param == "eager")
    assert bool(capture_all(bench)) == ("graphs" in request.param)
    return bench


def both(host: Bench, device: Bench, run: Callable[[Bench], Any]) -> Any:
    """What the device gives, which must be what the host gives; logits may differ in their last digits."""
    host.logits.clear()
    device.logits.clear()
    expected, found = run(host), run(device)
    assert found == expected
    ours, theirs = torch.stack(device.logits), torch.stack(host.logits)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4
    return found


def outputs(streams: list[Stream]) -> list[Any]:
    told = [[(p.id, [i for i, _ in p.top]) for p in s.logprobs] for s in streams]
    return [[s.output for s in streams], told]


def test_rows_of_all_kinds_side_by_side(host: Bench, device: Bench) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "logprobs": 3},
        {"temperature": 0.8, "top_p": 0.8, "seed": 4},
        {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "min_tokens": 4, "logit_bias": {2: 50.0}, "stop_token_ids": [7]},
    ]

    def run(bench: Bench) -> Any:
        streams = [Stream(bench, i, ids_of(11 + 7 * i, i), p) for i, p in enumerate(params)]
        run_streams(streams, 12)
        return outputs(streams)

    both(host, device, run)


def test_chunks_and_cached_prefixes(host: Bench, device: Bench) -> None:
    def run(bench: Bench) -> Any:
        ids, given = ids_of(90, 1), []
        slots = np.random.default_rng(2).permutation(np.arange(100, 300))[:90].tolist()
        for at in range(0, 90, 40):
            end = min(90, at + 40)
            part = {
                "row": 1, "start": at, "ids": ids[at:end], "slots": slots[at:end], "samples": int(end == 90)
            }  # fmt: skip
            decode = {"row": 0, "start": at // 40, "ids": ids_of(1, at), "slots": [at // 40], "samples": 1}
            starts = [row_start(1, temperature=0.0), row_start(0, temperature=0.0)] if at == 0 else []
            given.append(messages.unpack(bench.step([part, decode], starts).ids).tolist())
        for matched in (1, 63, 89):
            part = {
                "row": 2, "start": matched, "ids": ids[matched:], "slots": range(300, 390 - matched),
                "samples": 1,
            }  # fmt: skip
            started = row_start(2, prefix=slots[:matched], temperature=0.0)
            given.append(messages.unpack(bench.step([part], [started]).ids).tolist())
        assert given[-1] == given[-2] == given[-3]
        return given

    both(host, device, run)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 8, "logprobs": 1}])
def test_drafts_right_and_wrong(host: Bench, device: Bench, params: dict[str, Any]) -> None:
    plain = Stream(host, 0, ids_of(9, 3), params)
    run_streams([plain], 16)

    def run(bench: Bench) -> Any:
        def right(output: list[int]) -> list[int]:
            return plain.output[len(output) : len(output) + 3]

        def half(output: list[int]) -> list[int]:
            proposed = right(output)
            return [*proposed[:1], *(5 for _ in proposed[1:])]

        streams = [
            Stream(bench, row, ids_of(9, 3), params, propose)
            for row, propose in enumerate((right, half, lambda output: [4, 4]))
        ]
        run_streams(streams, 12)
        assert all(s.output[:12] == plain.output[:12] for s in streams)
        assert len(streams[0].results) < 8
        return outputs(streams)

    both(host, device, run)


def test_forks(host: Bench, device: Bench) -> None:
    def run(bench: Bench) -> Any:
        part = {"row": 0, "start": 0, "ids": ids_of(10, 8), "slots": range(10), "samples": 4}
        return messages.unpack(bench.step([part], [row_start(0, seed=9)]).ids).tolist()

    assert len(set(both(host, device, run))) > 1


def test_grammars_hear_of_what_was_drawn(host: Bench, device: Bench) -> None:
    def run(bench: Bench) -> Any:
        key = bench.load(JSON)
        params = {"temperature": 1.0, "seed": 4, "grammar": key}
        streams = [Stream(bench, 0, ids_of(9, 3), params), Stream(bench, 1, ids_of(30, 4), {"seed": 1})]
        run_streams(streams, 20)
        states = [(s.complete, s.ended) for r in streams[0].results for s in r.grammars.values()]
        assert states[-1][0]
        return [*outputs(streams), states]

    both(host, device, run)


def test_prompts_are_read(host: Bench, device: Bench) -> None:
    def run(bench: Bench) -> Any:
        ids = ids_of(40, 5)
        starts = [
            row_start(0, history=ids, prompt_len=40, read_from=1, logprobs=2, logprob_ids=[3, 9]),
            row_start(1, history=ids, prompt_len=40, pooling="mean"),
            row_start(2, history=ids, prompt_len=40, pooling="last"),
        ]
        told: list[Any] = []
        for at, end in ((0, 25), (25, 40)):
            parts = [
                {
                    "row": row, "start": at, "ids": ids[at:end],
                    "slots": range(100 * row + at, 100 * row + end), "samples": 0,
                }
                for row in range(3)
            ]  # fmt: skip
            for read in bench.step(parts, starts if at == 0 else []).reads:
                values = np.frombuffer(read.pooled, np.float32)
                told.append(([v.id for v in read.logprobs], [[i for i, _ in v.top] for v in read.logprobs]))
                told.append([round(float(v), 3) for v in values])
                told.append([round(x, 3) for v in read.logprobs for x in (v.logprob, *v.chosen)])
        return told

    both(host, device, run)


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


def step_of(number: int, admitted: list[RowStart], parts: list[tuple[list[int], int]]) -> Step:
    slots = [np.arange(100 * r + start, 100 * r + start + len(ids)) for r, (ids, start) in enumerate(parts)]
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


def test_a_step_is_begun_before_the_one_before_is_read(folder: Path) -> None:
    plain = device_bench(folder, HostAccelerator(), package())
    late = device_bench(folder, HostAccelerator(late=2), package())
    capture_all(late)
    assert chain(late, 12, ahead=True) == chain(plain, 12, ahead=False)


def test_a_decode_step_runs_in_the_next_larger_graph(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    assert graph_sizes(8) == [8, 4, 2, 1]
    assert capture_all(bench) == 4
    assert accelerator.captures == 8, "one for each lane"
    eager = device_bench(folder, HostAccelerator(), package(), disable_cuda_graph=True)
    assert chain(bench, 9, ahead=False) == chain(eager, 9, ahead=False)
    assert accelerator.replays == 8, "all but the prompts' step"


def test_what_pads_a_graph_touches_nobody(folder: Path) -> None:
    bench = device_bench(folder, HostAccelerator(), package())
    capture_all(bench)
    chain(bench, 9, ahead=False)
    used = {100 * r + p for r in range(3) for p in range(6 + r + 8)}
    others = [slot for slot in range(SLOTS) if slot not in used]
    for layer in (*bench.pool.k, *bench.pool.v):
        assert not layer[others].any()


def test_a_server_that_is_never_idle_gets_the_graphs_that_fit(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    chain(bench, EAGER_STEPS + 4, ahead=False)
    lanes = runner_of(bench)._parts.lanes
    assert [list(lane.captured) for lane in lanes] == [[4], [4]]
    assert accelerator.replays
    chain(bench, EAGER_STEPS + 4, ahead=False, rows=1)
    assert list(lanes[0].captured) == [1, 4], "a larger one does, but it is not what fits"


def test_the_time_that_a_graph_takes_to_make_is_no_steps(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())
    capture = accelerator.capture

    def slow(run: Callable[[], object], stream: Any) -> Callable[[], None]:
        time.sleep(0.3)
        return capture(run, stream)

    accelerator.capture = slow  # type: ignore[method-assign]
    results: list[StepResult] = []
    chain(bench, EAGER_STEPS + 4, ahead=False, results=results)
    assert accelerator.captures
    assert max(result.seconds for result in results) < 0.3


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
    assert "no memory for a graph of 4 rows" in caplog.text
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


def test_a_device_that_fails_ends_the_worker_and_does_not_leave_it_asleep(folder: Path) -> None:
    accelerator = HostAccelerator()
    bench = device_bench(folder, accelerator, package())

    class Broken(HostEvent):
        failed = False

        def query(self) -> bool:
            if self.failed:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return False

        def synchronize(self) -> None:
            time.sleep(0.2)
            self.failed = True
            self.query()

    accelerator.event = lambda: Broken(0, 0.0)  # type: ignore[method-assign]
    runner = runner_of(bench)
    assert runner.start(step_of(0, [row_start(0)], [(ids_of(5, 1), 0)])) == []
    assert select.select([runner.fileno()], [], [], 10.0)[0]
    with pytest.raises(RuntimeError, match="device-side assert"):
        runner.finished()


def test_a_thread_that_cannot_wait_for_the_device_ends_the_worker(folder: Path) -> None:
    accelerator = HostAccelerator(seconds=0.05)

    def choose() -> None:
        raise OSError("invalid device ordinal")

    accelerator.choose = choose  # type: ignore[method-assign]
    runner = runner_of(device_bench(folder, accelerator, package()))
    assert select.select([runner.fileno()], [], [], 10.0)[0]
    with pytest.raises(OSError, match="invalid device"):
        runner.finished()


def test_lines_of_logits_are_drawn_from_in_groups(
    host: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "pieces_of", functools.partial(pieces_of, most=3))
    device = device_bench(folder, HostAccelerator(), package())
    plain = Stream(host, 0, ids_of(9, 3), {"temperature": 0.0})
    run_streams([plain], 16)

    def run(bench: Bench) -> Any:
        def right(output: list[int]) -> list[int]:
            return plain.output[len(output) : len(output) + 2]

        params: list[dict[str, Any]] = [
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 1.0, "seed": 2, "grammar": bench.load(JSON), "logprobs": 1},
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.3, "logprobs": 1},
        ]
        streams = [
            Stream(bench, row, ids_of(9, 3), one, right if row in (0, 2) else lambda output: [])
            for row, one in enumerate(params)
        ]
        run_streams(streams, 10)
        return outputs(streams)

    both(host, device, run)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_groups_of_places_are_whole_and_in_order(most: int) -> None:
    drafts = np.array([0, 2, 0, 4, 1, 0], np.int32)
    count, lines = np.arange(6, dtype=np.int32), int((drafts + 1).sum())
    masked = np.arange(lines, dtype=np.int32)
    masks = np.random.default_rng(1).integers(0, 2**31, (lines, 1)).astype(np.int32)
    places = Places(count, count + 1, count + 10, drafts, np.arange(7, dtype=np.int32), masks, masked)
    parts = pieces_of(places, most)
    assert [row for some, _ in parts for row in some.rows] == count.tolist()
    assert [line for _, span in parts for line in range(span.start, span.stop)] == list(range(lines))
    for some, span in parts:
        assert int(some.widths.sum()) == span.stop - span.start
        assert span.stop - span.start <= most or len(some.rows) == 1
        assert some.masks is not None
        assert some.masked is not None
        assert some.masks[some.masked, 0].tolist() == masks[masked[span], 0].tolist()
    assert np.concatenate([some.proposed for some, _ in parts]).tolist() == list(range(7))


@pytest.mark.parametrize("length", [100, 127, 128])
def test_a_short_context_is_warmed_up_within_it(tmp_path: Path, length: int) -> None:
    folder = tiny_llama(tmp_path, max_position_embeddings=length)
    assert capture_all(device_bench(folder, HostAccelerator(), package())) == 4


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


def test_memory_that_does_not_do_is_told_with_what_to_change(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 9000000 needs .* GiB are left besides"):
        device_bench(folder, HostAccelerator(), package(), max_total_tokens=9_000_000)
    bench = device_bench(folder, HostAccelerator(), package(), max_total_tokens=None)
    assert bench.pool.num_slots > SLOTS
