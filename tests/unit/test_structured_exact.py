"""Grammars and drafts through the real scheduler and worker: nothing changes an answer. With `==`."""

from __future__ import annotations

import functools
import select
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.config import make
from sapwood.srt.messages import DropGrammars, Grammar, GrammarLoaded, LoadGrammar
from sapwood.srt.worker.cpu import make_runner
from sapwood.srt.worker.grammars import Grammars, make_grammars
from tests.models import source_of, tiny_llama, tiny_tokenizer
from tests.simulation import Client, World
from tests.unit.test_worker_grammar import ANSWER, PERSON, SHAPE, WORDS
from tests.worker_bench import ids_of

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (PERSON, {"temperature": 0.0}),
    (PERSON, {"temperature": 1.0, "n": 3, "logprobs": 2}),
    (WORDS, {"temperature": 2.0, "frequency_penalty": 0.5}),
    (ANSWER, {"temperature": 1.5, "n": 4}),
    ("", {"temperature": 0.0, "ignore_eos": True}),
    (WORDS, {"temperature": 1.0, "min_tokens": 10, "ignore_eos": True}),
]


class _Loader:
    """The half of a worker that grammars are sent to."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def load(self, message: LoadGrammar) -> GrammarLoaded:
        self._grammars.load(message)
        assert select.select([self._grammars], [], [], 60.0)[0]
        (loaded,) = self._grammars.finished()
        return loaded

    def drop(self, message: DropGrammars) -> None:
        self._grammars.drop(message.keys)


class StructuredWorld(World):
    """The simulation with a real model, and its engine for grammars, in the worker's place."""

    def __init__(self, folder: Path, num_slots: int = 1000, **options: Any) -> None:
        fixed = {"max_running_requests": 8, "num_threads": 1, "random_seed": 1, "chunked_prefill_size": 16}
        config = make(model_path=str(folder), max_total_tokens=num_slots, **{**fixed, **options})
        source = source_of(folder)
        grammars = make_grammars(source)
        runner, _pool, _facts = make_runner(config, source, grammars)
        self.worker: Any = _Loader(grammars)
        self.begin(config, source, num_slots, runner.run)

    def answers(self, together: bool) -> list[Any]:
        keys = []
        for i, (text, params) in enumerate(REQUESTS):
            grammar = Grammar(text.encode()[:16], text) if text else None
            params = {"max_tokens": 40, "seed": i, **params}
            keys.append(self.submit(ids_of(20, i), grammar=grammar, **params))
            if not together:
                self.run()
        self.run()
        self.idle()
        return [told(self.clients[key]) for key in keys]


def told(client: Client) -> Any:
    ends = {choice: (done.n, done.reason, done.matched) for choice, done in client.done.items()}
    return client.output, ends, client.logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@functools.cache
def reference(folder: Path) -> list[Any]:
    """One after the other, in one chunk, no step ahead, without drafts."""
    options = {"speculative_algorithm": "none", "disable_overlap_schedule": True, "chunked_prefill_size": -1}
    return StructuredWorld(folder, **options).answers(together=False)


@pytest.mark.parametrize("algorithm", ["none", "auto", "ngram", "radix"])
@pytest.mark.parametrize("num_slots", [1000, 130])
def test_answers_are_the_same(folder: Path, algorithm: str, num_slots: int) -> None:
    """Side by side, on a cold cache and on a warm one; with few slots, retracted in the middle."""
    world = StructuredWorld(folder, num_slots, speculative_algorithm=algorithm)
    assert world.answers(together=True) == reference(folder)
    assert world.answers(together=True) == reference(folder)
    counters = world.state.counters
    assert (counters.retracted > 0) == (num_slots == 130)
    if num_slots == 1000:
        assert (counters.accepted_tokens > 0) == (algorithm != "none")


def test_the_answers_are_what_was_asked_for(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    for (grammar, _params), (output, ends, _logprobs) in zip(REQUESTS, reference(folder), strict=True):
        for choice, (_n, reason, _matched) in ends.items():
            text = tokenizer.decode(list(output[choice]))
            if grammar == PERSON:
                assert (SHAPE.fullmatch(text) is not None, reason) == (True, "stop")
            elif grammar == ANSWER:
                assert text in ("yes", "no", "not at all")
