"""Echo: what users test their programs with, so its answers and its records are exact."""

from __future__ import annotations

import asyncio

import pytest

import sapwood as sgl
from sapwood.lang.backend import Fill, Generate, Ids, Sampling, Score, Text, Turn
from sapwood.lang.backends.echo import BEGIN, END, Echo, ids_of


def test_tokens_are_characters_and_messages_have_borders() -> None:
    segments = (Text("é"), Ids((7,), "x"), Turn("user", (Text("hi"),)), Turn("bot", (), open=True))
    user, bot = (tuple(map(ord, text)) for text in ("user\nhi", "bot\n"))
    assert ids_of(segments) == (233, 7, BEGIN, *user, END, BEGIN, *bot)


def test_the_ids_of_a_state_begin_with_those_of_the_state_before() -> None:
    before = (Turn("user", (Text("a"),)), Turn("assistant", (Text("b"),), open=True))
    after = (Turn("user", (Text("a"),)), Turn("assistant", (Text("b"), Text("c"))), Text("d"))
    assert ids_of(after)[: len(ids_of(before))] == ids_of(before)


def test_it_says_the_last_text_what_it_is_told_or_what_a_rule_says() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.user("hello") + sgl.assistant(sgl.gen("a"))
        s += sgl.user("you") + sgl.assistant("I " + sgl.gen("b"))

    async def later(call: Generate) -> str:
        await asyncio.sleep(0)
        return f"{len(call.segments)}"

    for answers, values in ((None, ("hello", "I ")), (["x", "y"], ("x", "y")), (later, ("2", "4"))):
        state = program.run(backend=Echo(answers))
        assert (state["a"], state["b"]) == values
    with pytest.raises(sgl.LangError, match="Echo has no answer left for call 2"):
        program.run(backend=Echo(["x"]))


def test_stops_and_length_cut_the_answer() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.gen("a", stop=["wor", "x"]) + sgl.gen("b", max_tokens=4) + sgl.gen("c", max_tokens=0)

    state = program.run(backend=Echo(lambda call: "hello world"))
    assert (state["a"], state["b"], state["c"]) == ("hello ", "hell", "")
    reasons = [state.get_meta_info(name)["finish_reason"]["type"] for name in "abc"]
    assert reasons == ["stop", "length", "length"]
    assert state.get_meta_info("b")["prompt_tokens"] == 6


def test_the_number_of_outputs_must_be_that_of_n() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.gen("a", n=2)

    assert program.run(backend=Echo(["x"]))["a"] == ["x", "x"]
    with pytest.raises(sgl.LangError, match="told 3 outputs, and n is 2"):
        program.run(backend=Echo([["x", "y", "z"]]))


def test_it_chooses_what_it_is_told_to() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.select("a", ["x", "yy"])
        s += sgl.select("b", ["x", "yy"], choices_method=sgl.unconditional_likelihood_normalized)

    state = program.run(backend=Echo(["yy", None]))
    assert (state["a"], state["b"]) == ("yy", "x")
    with pytest.raises(sgl.LangError, match="to choose 'z', which is none of"):
        program.run(backend=Echo(["z"]))


def test_it_keeps_what_happened() -> None:
    backend = Echo(delay=0.01, unsupported=["seed"])

    async def ask() -> None:
        calls = [
            Generate(segments=(Text("a"),), program="p"),
            Score(segments=(), choices=("x",), program="p"),
            Fill(segments=(), program="q"),
        ]
        generate, score, fill = calls
        asked = [backend.generate(generate), backend.score(score), backend.fill(fill)]  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert backend.calls == calls
        assert backend.done == calls[:2]
        assert backend.cancelled == calls[2:]
        assert (backend.running, backend.most) == (0, 3)
        assert await backend.end("p") == {"requests": 2}
        assert backend.ended == ["p"]
        await backend.flush_cache()
        await backend.aclose()

    asyncio.run(ask())
    backend.check(Generate(segments=()))
    with pytest.raises(sgl.Unsupported, match="seed is not supported"):
        backend.check(Generate(segments=(), sampling=Sampling(seed=1)))


def test_a_stream_is_the_answer_in_words() -> None:
    async def read() -> None:
        call = Generate(segments=(Text("a"),), sampling=Sampling(n=2))
        pieces = [piece async for piece in Echo([["one  two", ""]]).stream(call)]
        assert [(piece.choice, piece.text) for piece in pieces] == [
            (0, "one"), (0, " "), (0, " two"), (0, ""), (1, ""),
        ]  # fmt: skip
        whole = await Echo([["one  two", ""]]).generate(call)
        assert [piece.output for piece in pieces if piece.output] == whole.outputs
        assert pieces[-1].input_ids == whole.input_ids == (97,)

    asyncio.run(read())
