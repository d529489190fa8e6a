"""A chat template that refuses what programs begin with: nothing is computed ahead, and nothing fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import sapwood as sgl
from tests.models import CHATML, tiny_llama

LONELY = (
    "{% if messages | length == 1 and messages[0]['role'] == 'system' %}"
    "{{ raise_exception('a system message needs a question') }}{% endif %}" + CHATML
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sgl.Engine]:
    folder = tmp_path_factory.mktemp("lonely")
    (folder / "lonely.jinja").write_text(LONELY)
    options = {"num_threads": 1, "max_total_tokens": 4096, "log_level": "warning"}
    model = str(tiny_llama(folder / "model"))
    with sgl.Engine(model, chat_template=str(folder / "lonely.jinja"), **options) as engine:
        yield engine


@sgl.function
def ask(s: sgl.State, question: str) -> list[int]:
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=6, temperature=0))
    return s.ids()


@sgl.function
def branch(s: sgl.State, questions: int) -> Any:
    s += sgl.system("Be brief.")
    forks = s.fork(questions)
    forks += lambda i: sgl.user(f"Name {i}.") + sgl.assistant(sgl.gen("name", max_tokens=4, temperature=0))
    forks.join()
    return s["name"]


@sgl.function
async def branch_async(s: sgl.AsyncState, questions: int) -> Any:
    s += sgl.system("Be brief.")
    forks = s.fork(questions)
    forks += lambda i: sgl.user(f"Name {i}.") + sgl.assistant(sgl.gen("name", max_tokens=4, temperature=0))
    forks.join()
    return await s["name"]


def test_the_template_refuses_the_prefix(engine: sgl.Engine) -> None:
    with pytest.raises(sgl.LangError, match="needs a question"):
        ask.cache(backend=engine)


def test_items_of_a_batch_are_what_they_are_alone(engine: sgl.Engine) -> None:
    questions = [{"question": f"{word} is number {i}?"} for i in range(40) for word in ("Which", "What")]
    alone = [ask.run(**one, backend=engine) for one in questions]
    for threads in (1, 7, "auto"):
        states = ask.run_batch(questions, num_threads=threads, backend=engine)  # type: ignore[call-overload]
        assert [s.ret_value for s in states] == [s.ret_value for s in alone]
        assert [s["answer"] for s in states] == [s["answer"] for s in alone]


def test_branches_are_what_they_are_alone(engine: sgl.Engine) -> None:
    alone = branch.run(1, backend=engine).ret_value
    names = branch.run(30, backend=engine).ret_value
    assert names[:1] == alone
    assert branch.run(30, stream=True, backend=engine)["name"] == names
    states = branch.run_batch([(30,), (2,), (30,)], backend=engine)
    assert [state.ret_value for state in states] == [names, names[:2], names]

    async def many() -> list[Any]:
        runs = (branch_async.run_async(30, backend=engine) for _ in range(5))
        return [state.ret_value for state in await asyncio.gather(*runs)]

    assert asyncio.run(many()) == [names] * 5
    assert len(set(names)) > 1
