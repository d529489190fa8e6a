"""What a batch runs of a program beforehand: as little as it can, and nothing that the items could notice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang import trace
from sapwood.lang.backend import Call, Fill, Generate, Text
from sapwood.lang.backends.echo import Echo


def filled(backend: Echo) -> list[Any]:
    return [call.segments for call in backend.calls if isinstance(call, Fill)]


def test_arguments_are_whole_when_the_items_run(echo: Echo) -> None:
    @sgl.function
    def pops(s: sgl.State, words: list[str], more: dict[str, list[str]]) -> None:
        while words:
            s += words.pop(0) + more["also"].pop()
        s += sgl.gen("a")

    items = [{"words": ["one ", word], "more": {"also": ["so ", "so "]}} for word in ("two ", "three ")]
    states = pops.run_batch(items)
    assert [state["a"] for state in states] == ["one so two so ", "one so three so "]
    assert filled(echo) == [(Text("one so"),)]

    @sgl.function
    def iterates(s: sgl.State, words: Iterator[str]) -> None:
        s += "Now "
        for word in words:
            s += word
        s += sgl.gen("a")

    states = iterates.run_batch([(iter(["a ", "b"]),), (iter(["a ", "c"]),)])
    assert [state["a"] for state in states] == ["Now a b", "Now a c"]


def test_bound_arguments_and_defaults_are_whole_too(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State, q: str, shots: list[str], marks: list[str] = ["?", "!"]) -> None:  # noqa: B006
        s += shots.pop() + q + marks.pop() + sgl.gen("a")

    shots = ["s ", "t "]
    states = program.bind(shots=shots).run_batch([("x",), ("y",)], num_threads=1)
    assert [state["a"] for state in states] == ["t x!", "s y?"]
    program.bind(shots=["kept "]).cache(q="z")
    kept = ["kept "]
    program.cache(shots=kept)
    assert kept == ["kept "]


@pytest.mark.parametrize("number", [2, 3, 50])
def test_only_two_items_are_run_beforehand_and_only_to_their_first_request(echo: Echo, number: int) -> None:
    first, later = [], []

    @sgl.function
    def program(s: sgl.State, i: int) -> None:
        first.append(i)
        s += f"Number {i}" + sgl.gen("a")
        later.append(i)
        s += sgl.gen("b")

    program.run_batch([(i,) for i in range(number)])
    assert first[:2] == [0, number - 1]
    assert sorted(first[2:]) == sorted(later) == list(range(number))
    assert filled(echo) == [(Text("Number"),)]


def test_no_second_item_is_run_when_the_first_shares_nothing(echo: Echo) -> None:
    begun = []

    @sgl.function
    def program(s: sgl.State, i: int) -> None:
        begun.append(i)
        s += sgl.gen("a")

    program.run_batch([(i,) for i in range(5)])
    assert begun[0] == 0
    assert sorted(begun[1:]) == [0, 1, 2, 3, 4]


def test_a_backend_that_computes_nothing_ahead_is_only_asked_what_it_can(echo: Echo) -> None:
    class Plain(Echo):
        def check(self, call: Call) -> None:
            super().check(call)
            if isinstance(call, Fill):
                raise sgl.Unsupported("no fill", "fill")

    begun = []

    @sgl.function
    def program(s: sgl.State, i: int) -> None:
        begun.append(i)
        s += "Now " + sgl.gen("a", regex="[0-9]")

    backend = Plain()
    program.run_batch([(i,) for i in range(5)], backend=backend)
    assert begun[0] == 0
    assert sorted(begun[1:]) == [0, 1, 2, 3, 4]
    assert filled(backend) == []
    begun.clear()
    with pytest.raises(sgl.Unsupported, match="regex is not supported"):
        program.run_batch([(i,) for i in range(5)], backend=Plain(unsupported=["regex"]))
    assert begun == [0]


def tracers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "sapwood-trace"}


def test_a_program_that_swallows_everything_is_left_behind_once(echo: Echo) -> None:
    echo._rule = lambda call: "7"

    @sgl.function
    def stubborn(s: sgl.State, q: str) -> int:
        while True:
            try:
                s += q + sgl.gen("a")
                return int(s["a"])
            except:  # noqa: E722
                pass

    before = tracers()
    for _ in range(3):
        states = stubborn.run_batch([("x",), ("y",)])
        assert [state.ret_value for state in states] == [7, 7]
    assert len(tracers() - before) == 1
    assert all(isinstance(call, (Generate, Fill)) for call in echo.calls)


@pytest.mark.parametrize(
    "step",
    [
        lambda s, x: s.fork(2),
        lambda s, x: s.text(),
        lambda s, x: len(x),
        lambda s, x: s["a"],
        lambda s, x: inner.run(backend=Echo()),
    ],
)
def test_whatever_is_tried_again_for_ever_the_trace_ends(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "UNWIND_SECONDS", 0.05)

    def program(s: sgl.State, x: str) -> None:
        s += "One two"
        while True:
            with contextlib.suppress(BaseException):
                step(s, x)

    assert trace.prefix_of(program, [{}]) in ((Text("One"),), (Text("One two"),))


@sgl.function
def inner(s: sgl.State) -> None:
    s += "x" + sgl.gen("a")


def test_an_async_program_that_swallows_everything_is_left_behind(echo: Echo) -> None:
    echo._rule = lambda call: "7"

    @sgl.function
    async def stubborn(s: sgl.AsyncState, q: str) -> int:
        while True:
            try:
                s += q + sgl.gen("a")
                return int(await s["a"])
            except:  # noqa: E722
                pass

    assert [state.ret_value for state in stubborn.run_batch([("x",), ("y",)])] == [7, 7]


def test_a_program_that_ends_the_process_does_so_in_its_own_run_only() -> None:
    def program(s: sgl.State) -> None:
        s += "One two"
        raise SystemExit(3)

    assert trace.prefix_of(program, [{}]) == (Text("One"),)


def test_arguments_are_copied_as_far_as_they_are_plain_data() -> None:
    class Word(str):
        __slots__ = ()

    seen: list[Any] = []

    def program(s: sgl.State, x: Any) -> None:
        seen.append(x)

    def known(value: Any) -> bool:
        assert trace.prefix_of(program, [{"x": value}]) == ()
        got = seen.pop()
        assert isinstance(got, trace.Unknown) or got == value
        return not isinstance(got, trace.Unknown)

    plain = ["x", b"x", 1, 0.5, True, None, [], (1, ["a"]), {"a": {1, 2}}, frozenset({1}), [[1]] * 50]
    assert [known(value) for value in plain] == [True] * len(plain)
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    others = [Word("x"), object(), iter("x"), [object()], {"a": len}, range(3), circle, deep, [0] * 10_001]
    assert [known(value) for value in others] == [False] * len(others)
    value = [["a"]]
    known(value)
    trace.prefix_of(lambda s, x: x[0].append("b"), [{"x": value}])
    assert value == [["a"]]
