"""What the worker reads of prompts: right against torch, and the same bits however it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.messages import RowRead, StepResult, TokenLogprob
from sapwood.srt.worker import reader
from tests.models import VOCAB, tiny
from tests.worker_bench import Bench, ids_of, make_bench, row_start

N = 150
IDS = ids_of(N, 21)
READ: dict[str, Any] = {"logprobs": 5, "logprob_start": 0, "logprob_ids": [7, 300, 7], "temperature": 0.0}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(params=["float32", "float16"])
def bench(request: pytest.FixtureRequest, folder: Path) -> Bench:
    return make_bench(folder, kv_cache_dtype=request.param)


def extend(
    bench: Bench,
    row: int,
    sizes: list[int],
    *,
    first_slot: int = 0,
    at: int = 0,
    samples: int = 1,
    **start: Any,
) -> list[StepResult]:
    """Run IDS from position `at` on through a row in chunks of these sizes."""
    given = {"history": IDS, "prompt_len": N, **start}
    results = []
    for i, size in enumerate(sizes):
        slots = range(first_slot + at, first_slot + at + size)
        part = {"row": row, "start": at, "ids": IDS[at : at + size], "slots": slots}
        at += size
        admitted = [row_start(row, **given)] if i == 0 else []
        results.append(bench.step([{**part, "samples": samples if at == N else 0}], admitted))
    return results


def told(results: list[StepResult], row: int = 0) -> dict[int, TokenLogprob]:
    values: dict[int, TokenLogprob] = {}
    for read in (read for result in results for read in result.reads if read.row == row):
        for i, value in enumerate(read.logprobs, read.start):
            assert i not in values
            values[i] = value
    return values


def chunks(size: int, total: int = N) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


def test_values_are_those_of_torch(bench: Bench) -> None:
    values = told(extend(bench, 0, [N], read_from=1, **READ))
    assert list(values) == list(range(1, N))
    whole = torch.stack(bench.logits[: N - 1]).double().log_softmax(-1)
    for i, value in values.items():
        reference = whole[i - 1]
        assert value.id == IDS[i]
        assert abs(value.logprob - float(reference[IDS[i]])) < 1e-4
        best = reference.topk(5)
        assert [token for token, _ in value.top] == best.indices.tolist()
        assert np.allclose(value.chosen, reference[[7, 300, 7]], atol=1e-4)


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_chunks_tell_the_same_bits(bench: Bench, size: int) -> None:
    whole = told(extend(bench, 0, [N], read_from=1, **READ))
    assert told(extend(bench, 1, chunks(size), first_slot=N, read_from=1, **READ), 1) == whole


@pytest.mark.parametrize("start", [1, 2, 64, 65, 100, N - 1])
def test_a_cached_prefix_and_a_resumed_row_tell_the_same_bits(bench: Bench, start: int) -> None:
    whole = told(extend(bench, 0, [N], read_from=1, **READ))
    prefix = list(range(start - 1))
    part = told(
        extend(bench, 1, [N - start + 1], first_slot=N, at=start - 1, prefix=prefix, read_from=start, **READ),
        1,
    )
    assert part == {i: whole[i] for i in range(start, N)}
    # More is computed than is still to be told: what was cached has been evicted.
    again = told(extend(bench, 2, [N], first_slot=2 * N, read_from=start, **READ), 2)
    assert again == part


def test_rows_of_one_step_do_not_see_each_other(bench: Bench) -> None:
    alone = told(extend(bench, 0, [N], read_from=1, **READ))
    parts = [
        {"row": row, "start": 0, "ids": IDS[:n], "slots": range(first, first + n), "samples": 0}
        for row, n, first in ((1, 40, 200), (2, N, 300), (3, 90, 500))
    ]
    given = {"history": IDS, "prompt_len": N}
    admitted = [
        row_start(1, **given, read_from=1, **READ),
        row_start(2, **given, read_from=1, **READ),
        row_start(3, **given, pooling="mean", max_tokens=0),
    ]
    together = bench.step(parts, admitted)
    assert told([together], 2) == alone
    assert told([together], 1) == {i: alone[i] for i in range(1, 41)}


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_pieces_do_not_show(bench: Bench, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = told(extend(bench, 0, [N], read_from=1, **READ))
    monkeypatch.setattr(reader, "PIECE_BYTES", rows * VOCAB * 4)
    buffers, before = bench.runner._decoder._buffers, len(bench.logits)
    buffers.clear()
    assert told(extend(bench, 1, [N], first_slot=N, read_from=1, **READ), 1) == whole
    assert len(bench.logits) - before == N
    assert buffers["logits"].shape[0] == min(rows, reader.PIECE_ROWS)


def test_values_of_output_and_prompt_are_of_one_kind(bench: Bench) -> None:
    """A token that is sampled and then sent as a prompt's is worth the same; `chosen` is what it would be."""
    params = {**READ, "logprob_start": N, "logit_bias": {9: 100.0}, "repetition_penalty": 1.3}
    (first,) = extend(bench, 0, [N], **params)
    value = first.logprobs[0]
    assert value.id == 9
    given = {"history": [*IDS, 9], "prompt_len": N + 1, "read_from": N}
    part = {"row": 1, "start": 0, "ids": [*IDS, 9], "slots": range(N, 2 * N + 1), "samples": 0}
    result = bench.step([part], [row_start(1, **given, **READ)])
    assert result.reads == [RowRead(1, N, [value])]
    asked = {**READ, "logprob_start": N, "logprob_ids": [token for token, _ in value.top] + [9]}
    (again,) = extend(bench, 2, [N], first_slot=400, **asked)
    assert again.logprobs[0].chosen == [v for _, v in value.top] + [value.logprob]


def test_the_last_hidden_state(bench: Bench) -> None:
    results = extend(bench, 0, [N], samples=0, pooling="last", max_tokens=0)
    (read,) = results[-1].reads
    state = np.frombuffer(read.pooled, dtype="<f4")
    hidden = bench.runner._forward._hidden[N - 1 : N]
    assert np.array_equal(state, bench.runner._decoder.normed(hidden, torch.tensor([0]))[0].numpy())
    for at, sizes in ((0, chunks(7)), (N - 1, [1]), (64, [N - 64])):
        prefix = list(range(at))
        start = {"at": at, "prefix": prefix, "pooling": "last", "max_tokens": 0}
        other = extend(bench, 1, sizes, first_slot=N, samples=0, **start)
        assert [r.reads for r in other[:-1]] == [[] for _ in other[:-1]]
        assert other[-1].reads == [RowRead(1, pooled=read.pooled)]


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_the_mean_hidden_state(bench: Bench, size: int) -> None:
    (whole,) = extend(bench, 0, [N], samples=0, pooling="mean", max_tokens=0)
    decoder = bench.runner._decoder
    states = decoder.normed(bench.runner._forward._hidden[:N], torch.arange(N)).double()
    (read,) = whole.reads
    mean = np.frombuffer(read.pooled, dtype="<f4")
    assert np.allclose(mean, states.mean(0).numpy(), atol=1e-6)
    parts = extend(bench, 1, chunks(size), first_slot=N, samples=0, pooling="mean", max_tokens=0)
    assert parts[-1].reads == [RowRead(1, pooled=read.pooled)]
    assert not bench.runner._tokens.reading


def test_what_is_no_number_fails_its_row_only(folder: Path) -> None:
    bench = make_bench(folder)
    inner = bench.runner._decoder.logits

    def broken(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = inner(hidden, index)
        out[index == 3] = float("nan")
        return out

    bench.runner._decoder.logits = broken  # type: ignore[method-assign]
    parts = [
        {"row": row, "start": 0, "ids": IDS[:10], "slots": range(first, first + 10), "samples": 0}
        for row, first in ((4, 0), (6, 10))
    ]
    given = {"history": IDS[:10], "prompt_len": 10, "read_from": 1, **READ}
    result = bench.step(parts, [row_start(4, **given), row_start(6, **given)])
    assert [(e.row, e.error.status) for e in result.errors] == [(4, 500)]
    assert [(read.row, len(read.logprobs)) for read in result.reads] == [(6, 9)]


def test_nothing_of_a_released_row_is_kept(bench: Bench) -> None:
    extend(bench, 0, [20], read_from=1, **READ)
    pool = bench.runner._tokens
    assert pool.reading
    assert pool.logprob_ids
    pool.release(messages.unpack(messages.pack([0])))
    assert not pool.reading
    assert not pool.logprob_ids
