"""Sampling through the real scheduler and the real worker: what each parameter does, in every case alike."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.params import SamplingParams
from sapwood.srt.worker.cpu import make_runner
from tests.models import IM_END, source_of, tiny_llama
from tests.simulation import Client, World
from tests.worker_bench import ids_of

PROMPT = ids_of(40, 31)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "penalties": {**PENALTIES, "temperature": 0.9, "top_k": 40},
    "bias": {"logit_bias": {7: 5.0, 9: 4.5, IM_END: 3.0}, "min_tokens": 12, "stop_token_ids": [9]},
    "choices": {**PENALTIES, "n": 4, "top_p": 0.9},
    "everything": {
        **PENALTIES, "n": 4, "min_p": 0.01, "logit_bias": {7: 3.0, IM_END: 2.0}, "min_tokens": 8,
        "logprobs": 3, "logprob_start": 0, "logprob_ids": [7, 8],
    },
}  # fmt: skip


class RealWorld(World):
    """The simulation with a real model in the worker's place; `alter` changes what is known of the model."""

    def __init__(
        self, folder: Path, num_slots: int = 1000, *, alter: dict[str, Any] | None = None, **options: Any
    ) -> None:
        fixed = {"max_running_requests": 8, "num_threads": 1, "random_seed": 1}
        options = {"chunked_prefill_size": 16, **fixed, **options}
        config = make(model_path=str(folder), max_total_tokens=num_slots, **options)
        source = msgspec.structs.replace(source_of(folder), **(alter or {}))
        runner, _pool, _facts = make_runner(config, source)
        self.runner = runner
        self.begin(config, source, num_slots, runner.run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def told(client: Client) -> Any:
    """All that a client has seen but the cache's verdict."""
    done = {c: (d.n, d.reason, d.matched) for c, d in client.done.items()}
    return client.output, done, client.logprobs, client.reads


def alone(folder: Path, prompt: list[int], **params: Any) -> Client:
    """The request on an empty cache, in one chunk, with nobody beside it and no step ahead."""
    world = quiet_world(folder)
    world.state.tree.flush()
    key = world.submit(prompt, **params)
    world.run()
    world.idle()
    return world.clients[key]


@functools.cache
def quiet_world(folder: Path) -> RealWorld:
    return RealWorld(folder, chunked_prefill_size=-1, disable_overlap_schedule=True)


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """The model's logits after each of the ids, [n, vocab], float64."""
    world = RealWorld(folder, chunked_prefill_size=-1)
    decoder = world.runner._decoder
    inner, seen = world.runner._forward, []

    def forward(*arguments: Any) -> torch.Tensor:
        hidden = inner(*arguments)
        seen.append(decoder.logits(hidden, torch.arange(hidden.shape[0])).double())
        return hidden

    world.runner._forward = forward
    world.submit(ids, max_tokens=0)
    world.run()
    return seen[0]


def penalised(logits: torch.Tensor, prompt: list[int], output: list[int], p: SamplingParams) -> torch.Tensor:
    """Repetition over prompt and output as in transformers, the others over the output as OpenAI has them."""
    result = logits.clone()
    for token in set(prompt) | set(output):
        value = result[token]
        result[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
    for token in set(output):
        result[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for token, bias in p.logit_bias.items():
        result[token] += bias
    return result


@pytest.mark.parametrize(
    "knobs",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -0.5, "repetition_penalty": 0.8},
        {**PENALTIES, "logit_bias": {7: 2.0}},
    ],
)
@pytest.mark.parametrize("prompt", [[70, 70, 70, 70], PROMPT])
def test_greedy_steps_equal_the_formulas(folder: Path, prompt: list[int], knobs: dict[str, Any]) -> None:
    """P16: the prompt counts for repetition from the first step on, and for nothing else."""
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **knobs}
    output = alone(folder, prompt, **params).output[0]
    logits = logits_of(folder, [*prompt, *output])
    checked = SamplingParams(**params)
    for i, token in enumerate(output):
        expected = penalised(logits[len(prompt) + i - 1], prompt, output[:i], checked)
        assert token == int(expected.argmax()), i
    assert output != alone(folder, prompt, temperature=0.0, max_tokens=24, ignore_eos=True).output[0]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [5, 64])
def test_chunks_company_and_cache_change_nothing(folder: Path, name: str, chunk: int, overlap: bool) -> None:
    params = {"max_tokens": 20, **SAMPLINGS[name]}
    want = told(alone(folder, PROMPT, **params))
    world = RealWorld(folder, chunked_prefill_size=chunk, disable_overlap_schedule=not overlap)
    others = [world.submit(ids_of(10 + i, i), max_tokens=30, **PENALTIES) for i in range(3)]
    first = world.submit(PROMPT, **params)
    world.submit([*PROMPT[:30], *ids_of(5, 9)], max_tokens=5)
    world.run()
    second = world.submit(PROMPT, **params)
    world.run()
    assert told(world.clients[first]) == told(world.clients[second]) == want
    admitted = world.clients[second].admitted
    assert admitted is not None
    assert admitted.verdict.matched == (0 if "logprob_start" in params else len(PROMPT) - 1)
    assert all(world.clients[key].finished for key in others)
    world.idle()


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_changes_nothing(folder: Path, name: str, overlap: bool) -> None:
    """Counts are rebuilt from what was sampled: with a token that was in flight, without surplus ones."""
    params = {"max_tokens": 40, **SAMPLINGS[name], "ignore_eos": True, "stop_token_ids": []}
    prompts = [ids_of(12, i) for i in range(6)]
    world = RealWorld(folder, 110, chunked_prefill_size=8, disable_overlap_schedule=not overlap)
    keys = [world.submit(prompt, **params) for prompt in prompts]
    world.run()
    assert world.state.counters.retracted > 0
    for key, prompt in zip(keys, prompts, strict=True):
        assert told(world.clients[key]) == told(alone(folder, prompt, **params))
    world.idle()


@pytest.mark.parametrize("ends", [{"stop_token_ids": [7]}, {}])
def test_min_tokens_holds_every_end_back(folder: Path, ends: dict[str, Any]) -> None:
    """P17"""
    ending = ends.get("stop_token_ids", [IM_END])[0]
    asked = {"logit_bias": {ending: 50.0}, "temperature": 0.0, "max_tokens": 20, **ends}
    held = alone(folder, PROMPT, **asked, min_tokens=10)
    done = held.done[0]
    assert (done.n, done.reason, done.matched) == (11, "stop", ending)
    assert ending not in held.output[0][:10]
    assert alone(folder, PROMPT, **asked).done[0].n == 1


def test_min_tokens_that_hold_back_all_there_is_end_in_an_error(folder: Path) -> None:
    every = list(range(256))
    asked = {"stop_token_ids": every, "min_tokens": 3, "temperature": 0.0}
    alter = {"eos_ids": list(range(256, 331))}
    world = RealWorld(folder, alter=alter)
    key = world.submit(PROMPT, **asked)
    world.run()
    done = world.clients[key].done[0]
    assert done.reason == "error"
    assert done.error is not None
    assert "held back" in done.error.message
    world.idle()


@pytest.mark.parametrize("eos", [11, 13])
def test_each_eos_of_a_list_ends_and_is_ignored_on_demand(folder: Path, eos: int) -> None:
    """P18"""
    for ignore, n, reason in ((True, 20, "length"), (False, 1, "stop")):
        world = RealWorld(folder, alter={"eos_ids": [11, 13]})
        bias = {"logit_bias": {eos: 80.0}, "temperature": 0.0}
        key = world.submit(PROMPT, max_tokens=20, ignore_eos=ignore, **bias)
        world.run()
        done = world.clients[key].done[0]
        assert (done.n, done.reason) == (n, reason)


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"logit_bias": {7: 100.0}}, {"min_tokens": 5}]
)
def test_logprobs_are_finite_and_of_the_whole_distribution(folder: Path, narrow: dict[str, Any]) -> None:
    """P20: filters, biases and bans do not show in them."""
    asked = {"logprobs": 20, "logprob_start": 0, "temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    client = alone(folder, PROMPT, **asked, **narrow)
    values = [*client.reads.values(), *client.logprobs[0]]
    assert len(values) == len(PROMPT) - 1 + 6
    for value in values:
        assert np.isfinite([value.logprob, *(v for _, v in value.top)]).all()
        assert len(value.top) == 20
        assert sum(np.exp(v) for _, v in value.top) <= 1.0 + 1e-6
    plain = logits_of(folder, [*PROMPT, *client.output[0]]).log_softmax(-1)
    every = [*client.reads.items(), *enumerate(client.logprobs[0], len(PROMPT))]
    for i, value in every:
        assert abs(value.logprob - float(plain[i - 1, value.id])) < 1e-4


def test_choices_and_seeds(folder: Path) -> None:
    """P15: complete, not all equal when drawn, all equal when greedy; a seed gives them again."""
    drawn = alone(folder, PROMPT, n=4, seed=3, max_tokens=12, ignore_eos=True)
    assert [len(drawn.output[c]) for c in range(4)] == [12] * 4
    assert len({tuple(output) for output in drawn.output.values()}) == 4
    assert alone(folder, PROMPT, n=4, seed=3, max_tokens=12, ignore_eos=True).output == drawn.output
    assert alone(folder, PROMPT, n=4, seed=4, max_tokens=12, ignore_eos=True).output != drawn.output
    greedy = alone(folder, PROMPT, n=3, temperature=0.0, max_tokens=12).output
    assert greedy[0] == greedy[1] == greedy[2]


def test_ids_beyond_the_tokenizer_may_be_sampled(tmp_path: Path) -> None:
    """P49: a head wider than the tokenizer is served; such ids are text of no length (see the tokenizer)."""
    wide = tiny_llama(tmp_path / "wide", vocab_size=395)
    bias = {"logit_bias": dict.fromkeys(range(331, 395), 30.0)}
    asked = {**bias, "temperature": 2.0, "max_tokens": 12, "logprobs": 20, "logprob_ids": [394]}
    client = alone(wide, PROMPT, **asked)
    assert client.done[0].n == 12
    assert all(331 <= token < 395 for token in client.output[0])
    assert all(len(value.top) == 20 and len(value.chosen) == 1 for value in client.logprobs[0])


def test_max_tokens_0_samples_nothing(folder: Path) -> None:
    world = RealWorld(folder)
    key = world.submit(PROMPT, max_tokens=0, n=3, logprobs=5, logprob_start=0, **PENALTIES)
    world.run()
    client = world.clients[key]
    assert client.output == {0: [], 1: [], 2: []}
    assert client.reads == alone(folder, PROMPT, max_tokens=1, logprobs=5, logprob_start=0).reads
    assert all(not messages.unpack(step.samples).any() for step in world.steps)
