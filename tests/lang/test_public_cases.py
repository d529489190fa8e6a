"""Failures that others' front ends have had: batches that do not vary, backends that lack a method."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import sapwood as sgl
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(None, tmp_path_factory.mktemp("public")) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(num_threads=1, log_level="warning") as engine:
        yield engine


@pytest.fixture(params=["server", "engine", "openai"])
def backend(request: pytest.FixtureRequest, server: Server, engine: sgl.Engine) -> Any:
    if request.param == "engine":
        return engine
    if request.param == "server":
        return sgl.RuntimeEndpoint(server.url)
    return sgl.OpenAI("default", server.url + "/v1", api_key="none", server="sapwood")


@sgl.function
def name(s: sgl.State, animal: str) -> None:
    s += "A good name for a " + animal + " is" + sgl.gen("name", max_tokens=6)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ITEM = {"animal": "cat"}


@pytest.mark.parametrize("threads", [1, "auto"])
def test_equal_items_of_a_batch_vary_as_single_runs_do(
    backend: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P40, sgl-project/sglang#6122."""
    monkeypatch.setattr(sys, "stderr", bar := Terminal())
    states = name.run_batch(
        [ITEM] * 20, temperature=1.0, num_threads=threads, progress_bar=True, backend=backend
    )
    assert bar.getvalue().endswith("20/20\n")
    batch = {state["name"] for state in states}
    alone = {name.run(**ITEM, temperature=1.0, backend=backend)["name"] for _ in range(20)}
    assert len(batch) >= 10
    assert len(alone) >= 10
    greedy = name.run_batch([ITEM] * 20, temperature=0, num_threads=threads, backend=backend)
    assert {state["name"] for state in greedy} == {name.run(**ITEM, temperature=0, backend=backend)["name"]}


@pytest.mark.parametrize("threads", [1, "auto"])
@pytest.mark.parametrize("generator_style", [False, True])
def test_batches_of_no_and_one_and_more_items_are_in_order(
    backend: Any, threads: Any, generator_style: Any
) -> None:
    """P40."""
    for animals in ([], ["dog"], ["dog", "cat", "horse", "fish", "cat"]):
        options: Any = {"temperature": 0, "backend": backend}
        states = name.run_batch(
            [{"animal": animal} for animal in animals],
            num_threads=threads,
            progress_bar=True,
            generator_style=generator_style,
            **options,
        )
        assert [s["name"] for s in states] == [name.run(animal, **options)["name"] for animal in animals]


@sgl.function
def chat(s: sgl.State, question: str) -> None:
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question)
    forks = s.fork(2)
    forks += lambda i: (
        sgl.user(f"In {i + 2} words.") + sgl.assistant(sgl.gen("answer", max_tokens=8, stop=["."]))
    )
    forks.join()


@sgl.function
def chosen(s: sgl.State) -> None:
    s += "The capital of France is" + sgl.select("city", [" London", " Paris"])
    s += ", a city with" + sgl.gen("more", max_tokens=6, n=2)


def test_every_backend_runs_a_program_in_every_way_with_the_same_result(backend: Any, server: Server) -> None:
    """P41, sgl-project/sglang#88."""
    reference = sgl.RuntimeEndpoint(server.url)
    questions = [{"question": f"What is the capital of {land}?"} for land in ("France", "Spain")]
    expected = [chat.run(**one, temperature=0, backend=reference)["answer"] for one in questions]
    options: Any = {"temperature": 0, "backend": backend}
    assert [chat.run(**one, **options)["answer"] for one in questions] == expected
    assert [chat.run(**one, stream=True, **options)["answer"] for one in questions] == expected
    assert [state["answer"] for state in chat.run_batch(questions, **options)] == expected
    assert [s["answer"] for s in chat.run_batch(questions, generator_style=True, **options)] == expected
    assert asyncio.run(chat.run_async(**questions[0], **options))["answer"] == expected[0]
    text = chosen.run(temperature=0, backend=reference).text()
    assert "is Paris, a city" in text
    assert {state.text() for state in chosen.run_batch([{}] * 2, **options)} == {text}
    assert "".join(chosen.run(stream=True, **options).text_iter()) == text
    chat.cache(backend=backend)


def test_what_a_backend_cannot_do_is_an_error_before_anything_starts(server: Server) -> None:
    """P41: nothing is sent, and no thread begins."""

    @sgl.function
    def number(s: sgl.State, question: str) -> None:
        s += question + " " + sgl.gen("number", regex="[0-9]+")

    @sgl.function
    def pick(s: sgl.State, question: str) -> None:
        s += question + " " + sgl.select("picked", ["a", "b"])

    plain = sgl.OpenAI("default", server.url + "/v1", api_key="none")
    name.run("cat", backend=plain)  # the background loop's thread is there from now on
    steps = server.state()["steps"]
    for program, field in ((number, "regex"), (pick, "choices")):
        runs: list[Any] = [
            lambda p=program: p.run("x", backend=plain),
            lambda p=program: p.run_batch([{"question": "x"}] * 3, backend=plain),
            lambda p=program: list(p.run_batch([("x",), ("y",)], generator_style=True, backend=plain)),
            lambda p=program: list(p.run("x", stream=True, backend=plain).text_iter()),
        ]
        for number_of_run, run in enumerate(runs):
            before = set(threading.enumerate())
            with pytest.raises(sgl.Unsupported) as caught:
                run()
            assert isinstance(caught.value, NotImplementedError)
            assert caught.value.field == field
            # A program that is streamed runs in a thread, whatever it does there.
            if number_of_run < 3:
                assert set(threading.enumerate()) <= before
    assert server.state()["steps"] == steps
