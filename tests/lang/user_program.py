"""A program as a user of the package writes it, typed: test_language_types checks it by mypy, and runs it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, assert_type

import sapwood as sgl


@dataclass
class Point:
    """What an output may be."""

    x: int


@sgl.function
def ask(s: sgl.State, question: str, hops: int = 1) -> int:
    """A chat that branches."""
    s += sgl.system("Be brief.") + sgl.user(question)
    with s.assistant():
        s += "So: " + sgl.gen("answer", max_tokens=16, temperature=0.0, stop=["\n"]) + "."
    forks = s.fork(2)
    forks += lambda i: f"{i}" + sgl.gen("tip", json_schema=Point)
    for f in forks:
        assert_type(f, sgl.State)
        f += sgl.select("kind", choices=["a", "b"])
    forks.join()
    points: list[Point] = s["tip"]
    assert_type(s["answer"], Any)
    return hops + points[0].x


@sgl.function
async def ask_async(s: sgl.AsyncState, question: str) -> str:
    """The same for an event loop."""
    s += question + sgl.gen("answer", n=2, seed=1, logprobs=2)
    async with s.user():
        s += "more"
    async with s.fork(2) as forks:
        forks += [sgl.gen("a", regex="[0-9]+"), sgl.gen("b", choices=["x", "y"], temperature=0.5)]
    assert_type(await s.text(), str)
    assert_type(await s.ids(), list[int])
    answers: list[str] = await s["answer"]
    return answers[0]


@sgl.function
def outer(s: sgl.State) -> int:
    """A program that goes on with another one."""
    assert_type(ask(s, "inner", hops=2), int)
    return 1


async def main() -> None:
    """Ways to run one on a loop."""
    state = await ask_async.run_async("q", temperature=1.0)
    assert_type(state, sgl.State)
    assert_type(await ask_async("q"), sgl.State)
    print(state["answer"], state.ret_value, state.report())
    async for piece in ask_async.stream("q").text_async_iter("answer"):
        print(piece)


def said(call: Any) -> Any:
    """What Echo answers: a point, or the first choice."""
    several = getattr(getattr(call, "sampling", None), "n", None) or 1
    return ['{"x": 1}'] * several if hasattr(call, "sampling") else None


sgl.set_default_backend(sgl.Echo(said))
assert_type(ask.run(question="q", temperature=0.5), sgl.State)
assert_type(ask("q", hops=3), sgl.State)
assert_type(ask.run_batch([{"question": "q"}], num_threads=4, temperature=0.1), list[sgl.State])
assert_type(ask.run_batch([("q",)], generator_style=True), Iterator[sgl.State])
for one in ask.run_batch([{"question": "q"}], generator_style=True):
    print(one.text(), one.ids(), one.messages(), one.ret_value)
assert_type(ask.options(temperature=0).bind(question="q").run(), sgl.State)
assert_type(outer.run(), sgl.State)
for piece in ask.run("q", stream=True).text_iter("answer"):
    print(piece.upper())
asyncio.run(main())
