"""The GPU's worker in a real runtime: scheduler, sockets, overlap, retraction, ranks; a stand-in computes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sapwood import Engine
from sapwood.srt import engine as engines
from sapwood.srt.launch import ENGINE_ROLES
from sapwood.srt.offline import OfflineRuntime
from tests.models import tiny_llama
from tests.process.launching import ROOT

SHARED = list(range(10, 110))
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}'
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    ([*SHARED, 5, 6, 7], {"temperature": 0}),
    ([*SHARED, 8, 9], {"temperature": 1.0, "sampling_seed": 4}),
    ([*SHARED[:70], 3, 4, 3, 4], {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "sampling_seed": 5}),
    (list(range(200, 290)), {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1}),
    ([30, 31, 32] * 9, {"temperature": 0}),
    ([44, 45], {"temperature": 1.0, "n": 3, "sampling_seed": 6}),
    ([51, 52, 53], {"temperature": 1.0, "json_schema": SCHEMA, "sampling_seed": 7, "ignore_eos": False}),
    (list(range(60, 90)), {"temperature": 1.0, "min_new_tokens": 9, "sampling_seed": 8, "ignore_eos": False}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        tiny_llama(tmp_path_factory.mktemp("m"), num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    )


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {**ENGINE_ROLES, "worker": "tests.gpu.device_worker"}
    monkeypatch.setattr(engines, "OfflineRuntime", functools.partial(OfflineRuntime, roles=roles))
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    monkeypatch.setenv("PYTHONPATH", path)


def start(model: str, **options: Any) -> Engine:
    settings = {"max_running_requests": 8, "chunked_prefill_size": 48, "log_level": "warning", **options}
    return Engine(model, dtype="float32", **settings)


class Near(float):
    """A logprob: the two workers' kernels round in their own ways."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 2e-3


def answers(engine: Engine, asked: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    """All at once; ids, their logprobs, and why each ended."""

    def ask(one: tuple[list[int], dict[str, Any]]) -> Any:
        ids, params = one
        sampling = {"max_new_tokens": 24, "ignore_eos": True, **params}
        given = engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
        told = []
        for choice in given if isinstance(given, list) else [given]:
            info = choice["meta_info"]
            logprobs = [(Near(entry[0]), entry[1]) for entry in info["output_token_logprobs"]]
            told.append((choice["output_ids"], logprobs, info["finish_reason"]["type"]))
        return told

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


@pytest.fixture(scope="module")
def expected(model: str) -> Iterator[list[Any]]:
    """What the CPU's worker says, one request at a time."""
    with start(model, max_total_tokens=2000, speculative_algorithm="none") as engine:
        yield [answers(engine, [one])[0] for one in ASKED]


@pytest.mark.usefixtures("on_a_device")
def test_answers_are_those_of_the_cpu(model: str, expected: list[Any]) -> None:
    """Cold, and again from the cache, when all graphs have been made in between."""
    with start(model, max_total_tokens=2000) as engine:
        assert answers(engine, ASKED) == expected
        assert answers(engine, ASKED) == expected
        assert [answers(engine, [one])[0] for one in ASKED] == expected


@pytest.mark.usefixtures("on_a_device")
def test_rows_that_were_retracted_go_on(model: str, expected: list[Any]) -> None:
    with start(model, max_total_tokens=330) as engine:
        assert answers(engine, ASKED * 2) == expected * 2
        assert engine.server_info()["state"]["retracted"] > 0


@pytest.mark.usefixtures("on_a_device")
def test_two_ranks_of_a_device(model: str, expected: list[Any]) -> None:
    """Their graphs have collectives in them."""
    with start(model, max_total_tokens=2000, tensor_parallel_size=2) as engine:
        assert answers(engine, ASKED) == expected
        assert answers(engine, ASKED) == expected
