"""The worker alone: one extend equals many decodes, and nothing reads another row. All with `==`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.errors import ConfigError
from sapwood.srt.worker import kv_pool
from tests.models import tiny_llama
from tests.worker_bench import SLOTS, Bench, ids_of, make_bench, pool_bytes, row_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=24
    )


@pytest.fixture(params=["float32", "float16"])
def bench(request: pytest.FixtureRequest, folder: Path) -> Bench:
    return make_bench(folder, kv_cache_dtype=request.param)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_one_extend_of_n_equals_n_decodes(bench: Bench, n: int) -> None:
    ids, whole, single = ids_of(n), list(range(n)), list(range(SLOTS - 1, SLOTS - 1 - n, -1))
    bench.step(
        [{"row": 0, "start": 0, "ids": ids, "slots": whole, "samples": 1}], [row_start(0, temperature=0.0)]
    )
    for i in range(n):
        admitted = [row_start(1, temperature=0.0)] if i == 0 else []
        bench.step(
            [{"row": 1, "start": i, "ids": ids[i : i + 1], "slots": single[i : i + 1], "samples": 1}],
            admitted,
        )
    assert torch.equal(bench.logits[0], bench.logits[-1])
    assert pool_bytes(bench, whole) == pool_bytes(bench, single)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunks_equal_the_whole(bench: Bench, chunk: int) -> None:
    n = 150
    ids, whole = ids_of(n, 1), list(range(n))
    slots = np.random.default_rng(2).permutation(np.arange(n, SLOTS))[:n].tolist()
    bench.step([{"row": 0, "start": 0, "ids": ids, "slots": whole, "samples": 1}], [row_start(0)])
    for at in range(0, n, chunk):
        end = min(n, at + chunk)
        part = {"row": 1, "start": at, "ids": ids[at:end], "slots": slots[at:end], "samples": int(end == n)}
        bench.step([part], [row_start(1)] if at == 0 else [])
    assert torch.equal(bench.logits[0], bench.logits[-1])
    assert pool_bytes(bench, whole) == pool_bytes(bench, slots)


def test_a_row_does_not_see_what_it_is_batched_with(bench: Bench) -> None:
    params = {"temperature": 1.0, "seed": 3, "logprobs": 5}
    ids = ids_of(90, 3)
    alone = bench.step(
        [{"row": 0, "start": 0, "ids": ids, "slots": range(90), "samples": 1}], [row_start(0, **params)]
    )
    parts = [
        {"row": 1, "start": 0, "ids": ids_of(40, 4), "slots": range(100, 140), "samples": 1},
        {"row": 2, "start": 0, "ids": ids, "slots": range(200, 290), "samples": 1},
        {"row": 3, "start": 0, "ids": ids_of(1, 5), "slots": range(300, 301), "samples": 1},
    ]
    batched = bench.step(parts, [row_start(1), row_start(2, **params), row_start(3)])
    assert messages.unpack(batched.ids)[1] == messages.unpack(alone.ids)[0]
    assert batched.logprobs[1] == alone.logprobs[0]


def test_a_cached_prefix_equals_a_computed_one(bench: Bench) -> None:
    ids = ids_of(130, 6)
    bench.step([{"row": 0, "start": 0, "ids": ids, "slots": range(130), "samples": 1}], [row_start(0)])
    for matched in (1, 63, 64, 100, 129):
        rest = ids[matched:]
        slots = range(300, 300 + len(rest))
        bench.step(
            [{"row": 1, "start": matched, "ids": rest, "slots": slots, "samples": 1}],
            [row_start(1, prefix=list(range(matched)))],
        )
        assert torch.equal(bench.logits[0], bench.logits[-1])


def test_the_next_input_is_the_last_sampled_token(bench: Bench) -> None:
    ids = ids_of(20, 7)
    start = row_start(0, temperature=0.0)
    first = bench.step([{"row": 0, "start": 0, "ids": ids, "slots": range(20), "samples": 1}], [start])
    pooled = bench.step([{"row": 0, "start": 20, "ids": [-1], "slots": [20], "samples": 1}])
    token = int(messages.unpack(first.ids)[0])
    given = bench.step(
        [{"row": 1, "start": 0, "ids": [*ids, token], "slots": range(50, 71), "samples": 1}],
        [row_start(1, temperature=0.0)],
    )
    assert pooled.ids == given.ids


def test_choices_of_a_fork_are_drawn_as_if_alone(bench: Bench) -> None:
    ids = ids_of(10, 8)
    forked = bench.step(
        [{"row": 0, "start": 0, "ids": ids, "slots": range(10), "samples": 4}], [row_start(0, seed=9)]
    )
    tokens = messages.unpack(forked.ids).tolist()
    assert len(set(tokens)) > 1
    for choice, token in enumerate(tokens):
        start = row_start(1, seed=9)
        start.choice = choice
        alone = bench.step(
            [{"row": 1, "start": 0, "ids": ids, "slots": range(20, 30), "samples": 1}], [start]
        )
        assert messages.unpack(alone.ids).tolist() == [token]


def test_penalties_count_as_the_formulas_say(bench: Bench) -> None:
    """Repetition over prompt and output (transformers), presence and frequency over output only (OpenAI)."""
    prompt, output = [5, 6, 5], [7, 7, 8]
    history = [*prompt, *output]
    knobs = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    start = row_start(0, history=history, prompt_len=3, temperature=0.0, logit_bias={9: 2.0}, **knobs)
    result = bench.step([{"row": 0, "start": 0, "ids": history, "slots": range(6), "samples": 1}], [start])
    raw = bench.logits[-1].double()
    for token in (5, 6, 7, 8):
        raw[token] = raw[token] / 1.3 if raw[token] > 0 else raw[token] * 1.3
    raw[7] -= 0.5 + 2 * 0.25
    raw[8] -= 0.5 + 0.25
    raw[9] += 2.0
    assert messages.unpack(result.ids).tolist() == [int(raw.argmax())]
    # The token just drawn is counted for the next one.
    special = bench.runner._tokens.changes[0]
    assert special.output_counts is not None
    assert special.output_counts.sum() == 4


def test_min_tokens_holds_back_every_end(bench: Bench) -> None:
    ids = ids_of(4, 9)
    start = row_start(
        0, prompt_len=4, temperature=0.0, min_tokens=2, stop_token_ids=[11], logit_bias={2: 90.0, 11: 95.0}
    )
    first = bench.step([{"row": 0, "start": 0, "ids": ids, "slots": range(4), "samples": 1}], [start])
    second = bench.step([{"row": 0, "start": 4, "ids": [-1], "slots": [4], "samples": 1}])
    third = bench.step([{"row": 0, "start": 5, "ids": [-1], "slots": [5], "samples": 1}])
    tokens = [int(messages.unpack(r.ids)[0]) for r in (first, second, third)]
    assert not {2, 11} & set(tokens[:2])
    assert tokens[2] == 11


def test_the_largest_min_tokens_is_no_overflow(bench: Bench) -> None:
    start = row_start(
        0, prompt_len=4, temperature=0.0, min_tokens=2**31 - 1, stop_token_ids=[11], logit_bias={11: 95.0}
    )
    row = {"row": 0, "start": 0, "ids": ids_of(4, 9), "slots": range(4), "samples": 1}
    first = bench.step([row], [start])
    second = bench.step([{"row": 0, "start": 4, "ids": [-1], "slots": [4], "samples": 1}])
    assert 11 not in [int(messages.unpack(r.ids)[0]) for r in (first, second)]


def test_logprobs_are_of_the_unchanged_distribution(bench: Bench) -> None:
    ids = ids_of(12, 10)
    start = row_start(0, temperature=0.0, logit_bias={9: 100.0}, logprobs=3)
    result = bench.step([{"row": 0, "start": 0, "ids": ids, "slots": range(12), "samples": 1}], [start])
    value = result.logprobs[0]
    reference = torch.log_softmax(bench.logits[-1].double(), -1)
    assert value.id == 9
    assert abs(value.logprob - float(reference[9])) < 1e-4
    best = reference.topk(3)
    assert [i for i, _ in value.top] == best.indices.tolist()
    assert all(abs(a - b) < 1e-4 for (_, a), b in zip(value.top, best.values.tolist(), strict=True))


def test_logits_that_are_not_numbers_fail_their_row_only(folder: Path) -> None:
    bench = make_bench(folder)
    inner = bench.runner._decoder.logits

    def broken(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = inner(hidden, index)
        out[0] = float("nan")
        return out

    bench.runner._decoder.logits = broken  # type: ignore[method-assign]
    parts = [
        {"row": 4, "start": 0, "ids": ids_of(3), "slots": range(3), "samples": 1},
        {"row": 6, "start": 0, "ids": ids_of(3), "slots": range(10, 13), "samples": 1},
    ]
    result = bench.step(parts, [row_start(4), row_start(6)])
    assert [e.row for e in result.errors] == [4]


def test_the_reference_attention_agrees(folder: Path) -> None:
    ids = ids_of(100, 11)
    part = {"row": 0, "start": 0, "ids": ids, "slots": range(100), "samples": 1}
    logits = []
    for backend in ("cpu", "reference"):
        bench = make_bench(folder, attention_backend=backend)
        bench.step([part], [row_start(0)])
        logits.append(bench.logits[-1])
    assert torch.allclose(logits[0], logits[1], atol=1e-4)


def test_the_pool_takes_the_share_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 1_000_000)
    assert kv_pool.choose_slots(make(), 100, 10)[0] == kv_pool.CONTEXTS_BY_DEFAULT * 100
    assert kv_pool.choose_slots(make(), 100_000, 10)[0] == 50_000
    assert kv_pool.choose_slots(make(mem_fraction_static=0.9), 100, 10)[0] == 90_000
    assert kv_pool.choose_slots(make(mem_fraction_static=0.1), 100_000, 10)[0] == 10_000
    assert kv_pool.choose_slots(make(mem_fraction_static=0.9), 100, 10, mapped=400_000)[0] == 54_000
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        kv_pool.choose_slots(make(mem_fraction_static=0.1), 100, 100_000)
    with pytest.raises(ConfigError, match="--max-total-tokens 70000 needs"):
        kv_pool.choose_slots(make(max_total_tokens=70_000), 100, 10, mapped=400_000)
    with pytest.raises(ConfigError, match="0 MiB of memory are free"):
        kv_pool.choose_slots(make(), 100, 10, mapped=2_000_000)


def test_what_is_free_is_told_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_memory", lambda: 6 * 2**20)
    two: dict[str, Any] = {"tensor_parallel_size": 2}
    assert kv_pool.choose_slots(make(**two), 10**9, 10)[1].endswith("50% of 3 MiB free for each of 2 ranks")
    assert kv_pool.choose_slots(make(), 10**9, 10)[1].endswith("50% of 6 MiB free")
    with pytest.raises(ConfigError, match="3 MiB are free for each of 2 ranks"):
        kv_pool.choose_slots(make(max_total_tokens=10**6, **two), 100, 10)
    with pytest.raises(ConfigError, match="3 MiB of memory are free for each of 2 ranks"):
        kv_pool.choose_slots(make(**two), 100, 10**9)
