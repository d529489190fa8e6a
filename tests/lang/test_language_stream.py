"""Streams: an output's text as it comes, by variable or whole, in threads and on loops."""

from __future__ import annotations

import asyncio

import pytest

import sapwood as sgl
from sapwood.lang.backends.echo import Echo


@sgl.function
def two(s: sgl.State) -> None:
    s += "Q: " + sgl.gen("a") + " | " + sgl.gen("b")


@sgl.function
async def two_async(s: sgl.AsyncState) -> None:
    s += "Q: " + sgl.gen("a") + " | " + sgl.gen("b")
    await s["b"]


def backend() -> Echo:
    return Echo(["one two", "three four five"])


WHOLE = ["Q: ", "one", " two", " | ", "three", " four", " five"]


def test_the_whole_text_comes_in_pieces() -> None:
    for program in (two, two_async):
        state = program.run(stream=True, backend=backend())
        assert list(state.text_iter()) == WHOLE
        assert state.text() == "".join(WHOLE)
        assert (state["a"], state["b"]) == ("one two", "three four five")


def test_a_variable_comes_in_pieces_and_may_be_asked_for_before_it_is_there() -> None:
    state = two.run(stream=True, backend=backend())
    assert list(state.text_iter("b")) == ["three", " four", " five"]
    assert list(state.text_iter("a")) == ["one", " two"]
    state = two.run(stream=True, backend=backend())
    assert state["b"] == "three four five"


def test_on_a_loop_they_come_too() -> None:
    async def read() -> None:
        state = two_async.stream(backend=backend())
        assert [piece async for piece in state.text_async_iter()] == WHOLE
        assert await state["a"] == "one two"
        state = two_async.stream(backend=backend())
        pairs = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
        assert [text for text, _ in pairs] == ["one", " two", ""]
        assert pairs[-1][1]["completion_tokens"] == 7
        threaded = two.run(stream=True, backend=backend())
        assert [piece async for piece in threaded.text_async_iter("b")] == ["three", " four", " five"]
        assert [piece async for piece in threaded.text_async_iter()] == WHOLE

    asyncio.run(read())


def test_several_readers_each_get_all_of_it() -> None:
    async def read() -> None:
        state = two_async.stream(backend=backend())

        async def one() -> list[str]:
            return [piece async for piece in state.text_async_iter()]

        assert await asyncio.gather(*(one() for _ in range(5))) == [WHOLE] * 5

    asyncio.run(read())


def test_a_variable_that_never_comes_is_a_key_error() -> None:
    state = two.run(stream=True, backend=backend())
    with pytest.raises(KeyError, match="missing"):
        list(state.text_iter("missing"))
    with pytest.raises(KeyError, match="missing"):
        state["missing"]


def test_an_error_of_the_program_ends_the_stream() -> None:
    @sgl.function
    def fails(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        assert s["a"] == "one two"
        raise ZeroDivisionError("here")

    state = fails.run(stream=True, backend=backend())
    pieces: list[str] = []
    with pytest.raises(ZeroDivisionError, match="here"):
        pieces.extend(state.text_iter())
    assert pieces == ["x", "one", " two"]
    assert isinstance(state.error(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        state["never"]


def test_an_async_stream_needs_a_loop() -> None:
    with pytest.raises(sgl.LangError, match=r"run\(stream=True\)"):
        two_async.stream(backend=backend())


def test_without_a_stream_the_text_comes_whole() -> None:
    state = two.run(backend=backend())
    assert list(state.text_iter()) == ["".join(WHOLE)]
    assert list(state.text_iter("a")) == ["one two"]


@pytest.mark.parametrize("name", [None, "a"])
def test_a_program_that_raises_while_a_request_is_pending_tells_its_readers_why(name: str | None) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "Facts:" + sgl.gen("a")
        raise KeyError("own")

    @sgl.function
    async def coroutine(s: sgl.AsyncState) -> None:
        s += "Facts:" + sgl.gen("a")
        raise KeyError("own")

    async def main() -> None:
        state = coroutine.stream(backend=Echo(delay=30))
        async for _ in state.text_async_iter(name):
            pass

    with pytest.raises(KeyError, match="own"):
        list(program.run(stream=True, backend=Echo(delay=30)).text_iter(name))
    with pytest.raises(KeyError, match="own"):
        asyncio.run(main())
