"""The device's runner, graphs and all, on a stand-in: it gives what the CPU's runner gives, step by step."""

from __future__ import annotations

import functools
import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.errors import ConfigError
from sapwood.srt.worker.device import runner as runner_module
from sapwood.srt.worker.device.pieces import pieces_of
from sapwood.srt.worker.sampler import Places
from tests.gpu.device_bench import (
    JSON,
    both,
    capture_all,
    chain,
    device_bench,
    outputs,
    rows_of_all_kinds,
    runner_of,
    step_of,
)
from tests.gpu.host_accelerator import HostAccelerator, HostEvent
from tests.gpu.package_double import package
from tests.models import tiny_llama
from tests.worker_bench import SLOTS, Bench, Stream, ids_of, make_bench, row_start, run_streams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=24
    )


@pytest.fixture(scope="module")
def host(folder: Path) -> Bench:
    return make_bench(folder, kv_cache_dtype="float32")


@pytest.fixture(params=["eager", "graphs", "graphs, late events", "gathered"])
def device(request: pytest.FixtureRequest, folder: Path) -> Bench:
    accelerator = HostAccelerator(late=3 if "late" in request.param else 0)
    attention = None if request.param == "gathered" else package()
    bench = device_bench(folder, accelerator, attention, disable_cuda_graph=request.param == "eager")
    assert bool(capture_all(bench)) == ("graphs" in request.param)
    return bench


def test_rows_of_all_kinds_side_by_side(host: Bench, device: Bench) -> None:
    both(host, device, rows_of_all_kinds)


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


def test_a_step_is_begun_before_the_one_before_is_read(folder: Path) -> None:
    plain = device_bench(folder, HostAccelerator(), package())
    late = device_bench(folder, HostAccelerator(late=2), package())
    capture_all(late)
    assert chain(late, 12, ahead=True) == chain(plain, 12, ahead=False)


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


def test_memory_that_does_not_do_is_told_with_what_to_change(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 9000000 needs .* GiB are left besides"):
        device_bench(folder, HostAccelerator(), package(), max_total_tokens=9_000_000)
    bench = device_bench(folder, HostAccelerator(), package(), max_total_tokens=None)
    assert bench.pool.num_slots > SLOTS
