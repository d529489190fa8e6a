"""What a program writes is sent once, in order, and keeps its tokens; what it reads it waits for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang.backend import Fill, Generate, Ids, Score, Text, Turn
from sapwood.lang.backends.echo import BEGIN, END, Echo


def ords(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def ids(text: str) -> Ids:
    return Ids(ords(text), text)


def test_adjacent_text_is_one_part_of_one_request(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State, q: str) -> None:
        s += "Q: "
        s += q + "\n"
        s += "A:" + sgl.gen("a")

    assert program.run(q="why?")["a"] == "Q: why?\nA:"
    (call,) = echo.calls
    assert isinstance(call, Generate)
    assert call.segments == (Text("Q: why?\nA:"),)


def test_text_that_was_sent_is_sent_again_as_its_tokens(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> list[int]:
        s += "one" + sgl.gen("a", max_tokens=2)
        s += "two" + sgl.gen("b")
        return s.ids()

    state = program.run()
    assert echo.calls[1].segments == (ids("one"), ids("on"), Text("two"))
    assert state["b"] == "two"
    assert state.ret_value == state.ids() == list(ords("oneontwotwo"))
    assert state.text() == "oneontwotwo"


def test_special_text_and_ids_have_tokens_of_their_own(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "a" + sgl.special("<x>") + "b" + sgl.ids([7, 8]) + sgl.gen("o", max_tokens=1)
        s += sgl.gen("p")

    state = program.run()
    assert echo.calls[0].segments == (Text("a"), Text("<x>", special=True), Text("b"), Ids((7, 8), ""))
    assert echo.calls[1].segments[0] == Ids((*ords("a<x>b"), 7, 8), "a<x>b")
    assert state.text() == "a<x>bbb"


def test_messages_are_sent_as_messages_with_the_output_as_tokens(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.system("Be brief.")
        with s.user():
            s += "Hi"
            s += " there"
        s += sgl.assistant(sgl.gen("a", max_tokens=2))
        s.user("More")
        s += sgl.assistant_begin() + "So " + sgl.gen("b") + sgl.assistant_end()

    state = program.run()
    opened = (Turn("system", (Text("Be brief."),)), Turn("user", (Text("Hi there"),)))
    assert echo.calls[0].segments == (*opened, Turn("assistant", (), open=True))
    assert echo.calls[1].segments == (
        *opened,
        Turn("assistant", (ids("Hi"),)),
        Turn("user", (Text("More"),)),
        Turn("assistant", (Text("So "),), open=True),
    )
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "So So "},
    ]
    assert state.text() == "SYSTEM:Be brief.\nUSER:Hi there\nASSISTANT:Hi\nUSER:More\nASSISTANT:So So \n"
    assert state.ids()[:8] == [BEGIN, *ords("system\n")]
    assert state.ids()[-17:] == [BEGIN, *ords("assistant\nSo So ")]


def test_messages_that_do_not_fit_are_errors_where_they_are_added(echo: Echo) -> None:
    @sgl.function
    def nested(s: sgl.State) -> None:
        s += sgl.user_begin() + "x"
        s += sgl.system_begin()

    @sgl.function
    def other(s: sgl.State) -> None:
        s += sgl.user_begin() + sgl.assistant_end()

    @sgl.function
    def none(s: sgl.State) -> None:
        s += sgl.user_end()

    with pytest.raises(sgl.LangError, match="a message of system begins within one of user"):
        nested.run()
    with pytest.raises(sgl.LangError, match="a message of assistant ends, but the open one is of user"):
        other.run()
    with pytest.raises(sgl.LangError, match="a message of user ends, but no message is open"):
        none.run()
    assert echo.calls == []


def test_n_outputs_are_a_list_and_the_state_goes_on_with_the_first() -> None:
    backend = Echo([["x", "y", "z"], "end"])

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "p" + sgl.gen("a", n=3) + sgl.gen("b", n=1)

    state = program.run(backend=backend)
    assert state["a"] == ["x", "y", "z"]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("a")] == [1, 1, 1]
    assert state["b"] == "end"
    assert backend.calls[1].segments == (ids("p"), ids("x"))
    assert len(backend.calls) == 2


def test_select_is_one_request_and_goes_on_with_the_chosen_tokens() -> None:
    backend = Echo(lambda call: "no" if isinstance(call, Score) else None)

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "Is it? " + sgl.select("a", ["yes", "no"]) + sgl.gen("b")

    state = program.run(backend=backend)
    assert state["a"] == "no"
    assert state.get_meta_info("a")["normalized_prompt_logprobs"] == [-5.0, -0.5]
    call = backend.calls[0]
    assert isinstance(call, Score)
    assert call.choices == ("yes", "no")
    assert call.segments == (Text("Is it? "),)
    assert backend.calls[1].segments == (ids("Is it? "), ids("no"))
    assert len(backend.calls) == 2


def test_var_scope_keeps_what_is_added_within(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "before "
        with s.var_scope("part"):
            s += "in " + sgl.gen("a", max_tokens=3)
            assert "part" not in s
        s += "after"

    state = program.run()
    assert state["part"] == "in bef"
    assert state.text() == "before in befafter"


def test_variables_are_set_and_asked_for(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s["given"] = 3
        assert "given" in s
        assert "a" not in s
        s += "x" + sgl.gen("a")
        assert "a" in s
        assert s["a"] == "x"
        assert s["given"] == 3
        assert s.get_meta_info("given") is None
        s.set_var("given", "text")
        with pytest.raises(KeyError, match="missing"):
            s["missing"]

    state = program.run()
    assert state["given"] == "text"
    state["a"] = state["a"].upper()
    assert state["a"] == "X"
    assert state.get_var("a") == "X"


def test_a_variable_that_is_generated_twice_has_the_later_value() -> None:
    @sgl.function
    def program(s: sgl.State) -> list[Any]:
        s += sgl.gen("a")
        first = s["a"]
        s += sgl.gen("a")
        return [first, s["a"]]

    assert program.run(backend=Echo(["1", "2"])).ret_value == ["1", "2"]


@dataclass
class Point:
    x: int
    y: int


def test_a_schema_of_a_type_gives_back_a_value_of_it() -> None:
    backend = Echo(['{"x": 1, "y": 2}', '{"x": 1}', '{"x": 1, '])

    @sgl.function
    def program(s: sgl.State, schema: Any) -> None:
        s += "p" + sgl.gen("a", json_schema=schema)

    assert program.run(Point, backend=backend)["a"] == Point(1, 2)
    assert program.run({"type": "object"}, backend=backend)["a"] == '{"x": 1}'
    with pytest.raises(sgl.LangError, match="Point"):
        program.run(Point, backend=backend)


def test_separate_reasoning_has_a_variable_of_its_own() -> None:
    class Thinks(Echo):
        async def generate(self, call: Generate) -> Any:
            answer = await super().generate(call)
            assert call.reasoning
            answer.outputs[0].meta["reasoning_content"] = "hm"
            return answer

    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.user("q") + sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3"))

    state = program.run(backend=Thinks(["done"]))
    assert (state["a"], state["a_reasoning_content"]) == ("done", "hm")


def test_only_text_and_expressions_can_be_added(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += 5  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="not int"):
        program.run()


def test_async_programs_read_by_await(echo: Echo) -> None:
    @sgl.function
    async def program(s: sgl.AsyncState, q: str) -> int:
        async with s.user():
            s += q
        with s.assistant():
            s += sgl.gen("a")
        assert await s["a"] == q
        s["b"] = await s["a"] + "!"
        assert await s.messages() == [{"role": "user", "content": q}, {"role": "assistant", "content": q}]
        assert await s.text() == f"USER:{q}\nASSISTANT:{q}\n"
        assert (await s.get_meta_info("a"))["completion_tokens"] == len(q)
        assert await s.ids() == [BEGIN, *ords("user\n" + q), END, BEGIN, *ords("assistant\n" + q)]
        await s.sync()
        assert await s.error() is None
        with pytest.raises(KeyError):
            s["missing"]
        return len(q)

    for state in (asyncio.run(program.run_async("why")), program.run("why"), program.run(q="why")):
        assert (state["a"], state["b"], state.ret_value) == ("why", "why!", 3)
    assert all(not isinstance(call, Fill) for call in echo.calls)


def test_a_program_within_a_program_goes_on_in_its_state(echo: Echo) -> None:
    @sgl.function
    def ask(s: sgl.State, q: str, name: str = "a") -> str:
        s += q + sgl.gen(name)
        return str(s[name])

    @sgl.function
    def both(s: sgl.State) -> str:
        s += "start "
        return ask(s, "one ") + ask(s, "two", name="b")

    @sgl.function
    async def other(s: sgl.AsyncState) -> None:
        ask(s, "x")  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="ask goes on in a state of State, not of AsyncState"):
        other.run()
    state = both.run()
    assert state.ret_value == "start one two"
    assert state.text() == "start one start one twotwo"
    assert ask("x")["a"] == "x"


def test_a_finished_state_can_be_read_but_not_written(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    state = program.run()
    with pytest.raises(sgl.LangError, match="the program has ended"):
        state += "more"
    with pytest.raises(sgl.LangError, match="the program has ended"):
        state.fork(2)
    assert state.text() == "xx"
    assert list(state.text_iter()) == ["xx"]
    assert list(state.text_iter("a")) == ["x"]


def test_each_run_is_a_program_of_its_own_that_the_backend_hears_end(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a") + sgl.gen("b")

    @sgl.function
    def silent(s: sgl.State) -> None:
        s += "x"

    states = [program.run(), program.run()]
    programs = [call.program for call in echo.calls]
    assert programs[0] == programs[1] != programs[2] == programs[3]
    assert echo.ended == [programs[0], programs[2]]
    assert [state.report() for state in states] == [{"requests": 2}, {"requests": 2}]
    assert silent.run().report() is None
    assert len(echo.ended) == 2


def test_a_backend_that_does_not_hear_of_the_end_fails_no_run() -> None:
    class Deaf(Echo):
        async def end(self, program: str) -> None:
            raise sgl.RequestFailed("gone")

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    state = program.run(backend=Deaf())
    assert (state["a"], state.report()) == ("x", None)


def test_without_a_backend_nothing_runs() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        raise AssertionError

    with pytest.raises(sgl.LangError, match="no backend"):
        program.run()
    with pytest.raises(TypeError, match="got str"):
        program.run(backend="http://localhost")


def test_the_default_backend_is_asked_about_itself(echo: Echo) -> None:
    assert sgl.get_default_backend() is echo
    assert sgl.get_server_info() == {"backend": "echo"}
    sgl.flush_cache()
