"""Rank 0 samples, the others follow: the same rows and inputs on every rank, whatever a step has in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.loader.kept_weights import KeptWeights
from sapwood.srt.messages import Step, StepResult
from sapwood.srt.models.parallel import Group
from sapwood.srt.worker import cpu, kv_pool
from sapwood.srt.worker.cpu import load, make_follower, make_runner
from sapwood.srt.worker.grammars import make_grammars
from sapwood.srt.worker.runner import Runner
from sapwood.srt.worker.token_pool import TokenPool
from tests.models import CONFIG, random_tensors, save_weights, source_of, tiny_llama
from tests.ranks import ThreadRank, together
from tests.worker_bench import SLOTS, Bench, Stream, ids_of, row_start, run_streams

T = TypeVar("T")
TOKENS = 12
WIDE = {"intermediate_size": 200}
WORDS = "start: /[a-z ]{3,40}/"
STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "drawn": {"temperature": 1.0, "seed": 5, "logprobs": 3},
    "penalties": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.4, "frequency_penalty": 0.9},
    "biased": {"temperature": 1.0, "seed": 8, "logit_bias": {7: 6.0, 9: 6.5}, "min_tokens": 10},
    "read": {"temperature": 0.0, "logprobs": 1, "read_from": 1, "pooling": "mean"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), **WIDE)


class Leading:
    """The runner of rank 0, which gives its steps to the other ranks too."""

    def __init__(self, runner: Runner, rank: ThreadRank) -> None:
        self._runner, self._rank = runner, rank
        self._decoder = runner._decoder

    def run(self, step: Step) -> StepResult:
        self._rank._swap("step", step)
        return self._runner.run(step)


def drive(folder: Path, size: int, work: Callable[[Bench], T], **options: Any) -> tuple[T, list[TokenPool]]:
    """What `work` gives with a bench over so many ranks; and every rank's rows afterwards."""
    given = {"max_total_tokens": SLOTS, "tensor_parallel_size": size, "num_threads": 1, **options}
    config = make(model_path=str(folder), max_running_requests=8, **given)
    source = source_of(folder)

    def one(group: Group) -> tuple[Any, TokenPool]:
        assert isinstance(group, ThreadRank)
        if group.rank == 0:
            grammars = make_grammars(source)
            runner, pool, _facts = make_runner(config, source, grammars, group)
            leading: Any = Leading(runner, group)
            result = work(Bench(leading, pool, grammars))
            group._swap("step", None)
            return result, runner._tokens
        follower, _pool = make_follower(config, source, group)
        while (step := group._swap("step", None)[0]) is not None:
            follower.run(step)
        return None, follower._tokens

    (result, first), *others = together(size, one)
    return result, [first, *(pool for _none, pool in others)]


def mixed(bench: Bench) -> list[Any]:
    """Streams of every kind side by side, one of them with drafts; then forks."""
    every = [*STREAMS.values(), {"temperature": 1.0, "seed": 2, "grammar": bench.load(WORDS)}]
    streams = [
        Stream(bench, i, ids_of(9 + i, i), params, (lambda output: [5, 6, 7]) if i == 1 else _nothing)
        for i, params in enumerate(every)
    ]
    run_streams(streams, TOKENS)
    fork = {"row": 6, "start": 0, "ids": ids_of(12, 6), "slots": range(600, 612), "samples": 3}
    forked = bench.step([fork], [row_start(6, temperature=1.5, seed=3, logprobs=0)])
    then = bench.step([{**fork, "start": 12, "ids": [-1], "slots": [612], "samples": 1}])
    told = [[s.output, s.logprobs, [read for r in s.results for read in r.reads]] for s in streams]
    return [told, messages.unpack(forked.ids).tolist(), messages.unpack(then.ids).tolist()]


def _nothing(output: list[int]) -> list[int]:
    return []


def ids_in(told: list[Any]) -> list[Any]:
    streams, *rest = told
    return [[output for output, _logprobs, _reads in streams], *rest]


def test_every_rank_has_the_same_rows_and_inputs(folder: Path) -> None:
    """And they draw what one worker alone draws, as far as the models' floats agree."""
    alone, _pools = drive(folder, 1, mixed)
    told, (first, *others) = drive(folder, 2, mixed)
    assert ids_in(told) == ids_in(alone)
    assert len(others) == 1
    for (_, ours, reads), (_, theirs, theirs_reads) in zip(told[0], alone[0], strict=True):
        assert np.allclose([p.logprob for p in ours], [p.logprob for p in theirs], atol=1e-4)
        assert len(reads) == len(theirs_reads)
    assert any(reads for _ids, _logprobs, reads in told[0])
    for other in others:
        assert (other.slot_table == first.slot_table).all()
        assert other.last.tolist() == first.last.tolist()
        assert other.reading.keys() == first.reading.keys() == set()


def test_two_ranks_are_exact(folder: Path) -> None:
    """A row alone, beside others, in chunks, from a cached prefix, and with drafts: `==`."""
    params, prompt = STREAMS["drawn"], ids_of(40, 3)

    def ways(bench: Bench) -> list[Any]:
        alone = Stream(bench, 7, prompt, params)
        run_streams([alone], TOKENS)
        beside = Stream(bench, 1, prompt, params)
        run_streams([beside, Stream(bench, 2, ids_of(33, 4), STREAMS["penalties"])], TOKENS)
        right = lambda output: alone.output[len(output) : len(output) + 3]  # noqa: E731
        drafted = Stream(bench, 3, prompt, params, right)
        run_streams([drafted], TOKENS)
        # Row 7 left its prompt in slots 560 to 599: row 4 has half of it, and computes the rest in two parts.
        cached = Stream(bench, 4, prompt, params, begun=True)
        cached_slots = [*range(560, 580), *range(340, 360)]
        part = {"row": 4, "start": 20, "ids": prompt[20:29], "slots": cached_slots[20:29], "samples": 0}
        bench.step([part], [row_start(4, prefix=list(range(560, 580)), **params)])
        last = {"row": 4, "start": 29, "ids": prompt[29:], "slots": cached_slots[29:], "samples": 1}
        cached.take(bench.step([last]), 0, 1)
        run_streams([cached], TOKENS, admitted=True)
        assert len(drafted.results) < TOKENS
        return [[s.output[:TOKENS], s.logprobs[:TOKENS]] for s in (alone, beside, drafted, cached)]

    (alone, *others), _pools = drive(folder, 2, ways)
    assert len(alone[0]) == TOKENS
    for other in others:
        assert other == alone


def test_numbers_that_are_none_lead_no_rank_astray(tmp_path: Path) -> None:
    """Whatever the values, all ranks go the same way: the one row fails, and the other is answered."""
    folder = tiny_llama(tmp_path, weights=False, **WIDE)
    tensors = random_tensors({**CONFIG, **WIDE}, 0, torch.float32)
    tensors["model.embed_tokens.weight"][9] = float("nan")
    save_weights(folder, tensors)
    # The broken row is in everybody's logits: of the other row only hidden states are asked for.
    read = {"read_from": 1, "logprobs": 1, "pooling": "mean", "prompt_len": 3}

    def work(bench: Bench) -> list[Any]:
        bad = {"row": 0, "start": 0, "ids": [5, 9, 6], "slots": [0, 1, 2], "samples": 1}
        good = {"row": 1, "start": 0, "ids": [5, 7, 6], "slots": [3, 4, 5], "samples": 0}
        result = bench.step(
            [bad, good],
            [
                row_start(0, history=bad["ids"], **read),
                row_start(1, history=good["ids"], prompt_len=3, pooling="mean"),
            ],
        )
        after = bench.step([{"row": 2, "start": 0, "ids": [5], "slots": [9], "samples": 0}], [row_start(2)])
        return [sorted({e.row for e in result.errors}), [r.row for r in result.reads], after.errors]

    (failed, answered, after), (first, second) = drive(folder, 2, work)
    assert (failed, answered, after) == ([0], [1], [])
    assert first.last.tolist() == second.last.tolist()


def test_the_ranks_pools_share_the_memory_and_have_equally_many_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path, **WIDE, num_attention_heads=6, num_key_value_heads=3)
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 2**20)
    config = make(model_path=str(folder), tensor_parallel_size=2, mem_fraction_static=0.5, num_threads=1)
    source = source_of(folder)
    loaded = together(2, lambda group: load(config, source, group))
    heads = [each.decoder.spec.kv_heads for each in loaded]
    assert sorted(heads) == [1, 2]
    widest = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
    assert [each.pool.num_slots for each in loaded] == [2**19 // 2 // widest] * 2
    assert [each.pool.k[0].shape[1] for each in loaded] == heads


def test_no_rank_looks_at_the_free_memory_before_all_have_their_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first would count on what the last has yet to take."""
    loaded: list[int] = []
    seen: list[int] = []
    opened = cpu.open_weights
    monkeypatch.setattr(
        cpu, "open_weights", lambda *given, **more: (loaded.append(1), opened(*given, **more))[1]
    )
    monkeypatch.setattr(kv_pool, "free_memory", lambda: (seen.append(len(loaded)), 2**24)[1])
    config = make(model_path=str(folder), tensor_parallel_size=2, num_threads=1)
    source = source_of(folder)
    together(2, lambda group: load(config, source, group))
    assert seen == [2, 2]


def test_the_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.machine, "choose_threads", lambda: (7, "7 cores"))
    assert cpu.choose_threads(make(), 1) == (7, "7 cores")
    assert cpu.choose_threads(make(), 2) == (3, "7 cores, shared by 2 ranks")
    assert cpu.choose_threads(make(), 8)[0] == 1
    assert cpu.choose_threads(make(num_threads=5), 2) == (5, "as asked; chosen would be 3")


def test_what_is_released_is_forgotten_by_every_rank(folder: Path) -> None:
    """A row that was being read, and had a bias, when it was given up."""

    def work(bench: Bench) -> None:
        begun = {"row": 0, "start": 0, "ids": [5, 9, 6], "slots": [0, 1, 2], "samples": 0}
        start = row_start(
            0,
            history=ids_of(9, 1),
            prompt_len=9,
            read_from=1,
            logprobs=1,
            pooling="mean",
            logit_bias={7: 1.0},
        )
        bench.step([begun], [start])
        bench.step([{**begun, "row": 1, "slots": [3, 4, 5]}], [row_start(1)], released=[0])

    _none, pools = drive(folder, 2, work)
    assert len(pools) == 2
    for pool in pools:
        assert pool.reading == pool.changes == {}


def test_what_is_odd_about_the_weights_is_said_by_rank_0_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_llama(tmp_path, **WIDE)
    tensors = random_tensors({**CONFIG, **WIDE}, 0, torch.float32)
    save_weights(folder, {**tensors, "model.odd.weight": torch.zeros(3)})
    config = make(model_path=str(folder), tensor_parallel_size=2, num_threads=1, max_total_tokens=64)
    source = source_of(folder)
    together(2, lambda group: load(config, source, group))
    assert [r.levelname for r in caplog.records if "model.odd.weight" in r.getMessage()] == ["WARNING"]


def test_each_rank_keeps_its_own_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one worker alone its own, too; none is overwritten by another."""
    monkeypatch.setenv("SAPWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sapwood.srt.loader.kept_weights._SMALLEST", 0)
    folder = tiny_llama(tmp_path / "m", **WIDE, head_dim=32)
    given: dict[str, Any] = {"model_path": str(folder), "quantization": "w8", "num_threads": 1}
    source = source_of(folder)

    def weights(size: int) -> list[tuple[str, list[bytes]]]:
        config = make(tensor_parallel_size=size, max_total_tokens=64, **given)
        found = together(size, lambda group: load(config, source, group))
        return [
            (each.facts["weights"], [layer.qkv.data.numpy().tobytes() for layer in each.decoder.layers])
            for each in found
        ]

    first = {size: weights(size) for size in (2, 1)}
    assert len(list((tmp_path / "cache" / "weights").iterdir())) == 3
    for size in (1, 2):
        for (told, panels), (told_before, panels_before) in zip(weights(size), first[size], strict=True):
            assert "mapped" in told
            assert "mapped" not in told_before
            assert panels == panels_before
    assert KeptWeights(tmp_path / "cache" / "weights", source.files, "w8").is_found
