"""Drafts never change an answer: right, wrong or half right, a row draws what it draws without. With `==`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt import messages
from tests.models import IM_END, VOCAB, tiny_llama
from tests.worker_bench import Bench, Stream, ids_of, make_bench, row_start, run_streams

TOKENS = 24
PROMPT = ids_of(9, 41)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "one": {"temperature": 1.0, "seed": 5, "logprobs": 3},
    "two": {"temperature": 2.0, "seed": 6, "top_k": 50, "top_p": 0.9, "logprobs": 0, "logprob_ids": [7]},
    "penalties": {
        "temperature": 0.8, "seed": 7, "repetition_penalty": 1.4, "presence_penalty": 0.7,
        "frequency_penalty": 0.9, "logprobs": 1,
    },
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0},
    "biased": {"temperature": 1.0, "seed": 8, "logit_bias": {7: 6.0, 9: 6.5, 11: 6.0}, "min_p": 0.05},
    "min_tokens": {
        "temperature": 1.0, "seed": 9, "min_tokens": 10, "stop_token_ids": [9],
        "logit_bias": {IM_END: 5.0, 9: 6.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tiny_llama(tmp_path_factory.mktemp("model")))


def plain(bench: Bench, params: dict[str, Any], prompt: list[int] = PROMPT, tokens: int = TOKENS) -> Stream:
    stream = Stream(bench, 7, prompt, params)
    run_streams([stream], tokens)
    return stream


def proposals(right: list[int], length: int, kind: str) -> Callable[[list[int]], list[int]]:
    """Drafts for an output that is known to become `right`."""
    rng = random.Random(f"{length} {kind}")

    def propose(output: list[int]) -> list[int]:
        draft = right[len(output) : len(output) + length]
        if kind == "right":
            return draft
        if kind == "wrong":
            return [(token + 1) % VOCAB for token in draft]
        return [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in draft]

    return propose


def same(stream: Stream, reference: Stream) -> bool:
    return (stream.output[:TOKENS], stream.logprobs[:TOKENS]) == (reference.output, reference.logprobs)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", ["right", "wrong", "half"])
def test_drafts_change_nothing(bench: Bench, name: str, kind: str) -> None:
    params = SAMPLINGS[name]
    reference = plain(bench, params)
    longer = plain(bench, params, tokens=TOKENS + 10).output
    for length in range(1, 9):
        propose = proposals(longer, length, kind)
        stream = Stream(bench, 1, PROMPT, params, propose, pooled=length % 2 == 0)
        run_streams([stream], TOKENS)
        assert same(stream, reference), length
        steps = len(stream.results)
        if kind == "wrong":
            assert steps == TOKENS
        elif kind == "right" and IM_END not in longer:
            assert steps == 1 + -(-(TOKENS - 1) // (length + 1))


def test_rows_with_and_without_drafts_share_a_step(bench: Bench) -> None:
    """Each as if alone."""
    references: dict[str, Stream] = {}
    streams = []
    for i, (name, params) in enumerate(SAMPLINGS.items()):
        references[name] = plain(bench, params, ids_of(9, i))
        kind, length = ("right", "wrong", "half")[i % 3], (3 * i) % 8
        propose = proposals(references[name].output, length, kind)
        streams.append(Stream(bench, i, ids_of(9, i), params, propose))
    run_streams(streams, TOKENS)
    for stream, reference in zip(streams, references.values(), strict=True):
        assert same(stream, reference)


def test_a_fork_and_a_chunk_beside_drafts(bench: Bench) -> None:
    params, fork = SAMPLINGS["one"], {"temperature": 1.5, "seed": 3, "logprobs": 2}
    prompt = ids_of(12, 6)
    forking = {"row": 3, "start": 0, "ids": prompt, "slots": range(600, 612), "samples": 4}
    alone = bench.step([forking], [row_start(3, **fork)])
    right = plain(bench, params).output
    stream = Stream(bench, 1, PROMPT, params, proposals(right, 4, "right"))
    run_streams([stream], 1)
    parts = [
        stream.part(),
        {"row": 2, "start": 0, "ids": ids_of(20, 2), "slots": range(500, 520), "samples": 0},
        forking,
    ]
    result = bench.step(parts, [row_start(2), row_start(3, **fork)])
    assert messages.unpack(result.counts).tolist() == [5, 0, 4]
    assert messages.unpack(result.ids).tolist() == right[1:6] + messages.unpack(alone.ids).tolist()
    assert [result.logprobs[i] for i in range(5, 9)] == [alone.logprobs[i] for i in range(4)]
    stream.take(result, 0, 5)
    run_streams([stream], TOKENS, admitted=True)
    assert stream.output[:TOKENS] == right


def test_nothing_is_kept_behind_an_end(bench: Bench) -> None:
    """Even if it is what would be drawn there."""
    params = {"temperature": 0.0, "logit_bias": {IM_END: 90.0}}
    stream = Stream(bench, 1, PROMPT, params, lambda output: [IM_END] * 5)
    run_streams([stream], 2)
    assert stream.output == [IM_END] * 2
    assert messages.unpack(stream.results[-1].counts).tolist() == [1]


def test_counts_are_of_kept_tokens_only(bench: Bench) -> None:
    params = SAMPLINGS["penalties"]
    right = plain(bench, params).output
    stream = Stream(bench, 1, PROMPT, params, proposals(right, 6, "half"))
    run_streams([stream], TOKENS - 8)
    counts = bench.runner._tokens.changes[1].output_counts
    assert counts is not None
    assert counts.tolist() == [stream.output.count(token) for token in range(VOCAB)]


def test_logits_that_are_not_numbers_fail_when_they_are_next(tmp_path: Path) -> None:
    """A draft that is computed on the way to them is kept."""
    bench = make_bench(tiny_llama(tmp_path / "m"))
    params: dict[str, Any] = {"temperature": 0.0}
    right = plain(bench, params).output
    stream = Stream(bench, 1, PROMPT, params, lambda output: right[len(output) : len(output) + 4])
    run_streams([stream], 1)
    inner = bench.runner._decoder.logits

    def broken(hidden: Any, index: Any) -> Any:
        out = inner(hidden, index)
        out[min(2, len(out) - 1)] = float("nan")
        return out

    bench.runner._decoder.logits = broken  # type: ignore[method-assign]
    result = bench.step([stream.part()])
    assert messages.unpack(result.counts).tolist() == [2]
    assert (messages.unpack(result.ids).tolist(), result.errors) == (right[1:3], [])
    stream.take(result, 0, 2)
    stream.propose = lambda output: []
    assert [error.row for error in bench.step([stream.part()]).errors] == [1]
