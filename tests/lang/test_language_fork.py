"""Branches share what was before them, run side by side, and come together in their order."""

from __future__ import annotations

import asyncio

import pytest

import sapwood as sgl
from sapwood.lang.backend import Call, Fill, Generate, Ids, Text, Turn
from sapwood.lang.backends.echo import Echo


def ids(text: str) -> Ids:
    return Ids(tuple(map(ord, text)), text)


def generated(echo: Echo) -> list[Generate]:
    return [call for call in echo.calls if isinstance(call, Generate)]


def test_a_fork_computes_what_is_pending_once_and_the_branches_go_on_with_its_tokens(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "Tips: "
        forks = s.fork(3)
        for i, f in enumerate(forks):
            f += f"{i} " + sgl.gen("tip", max_tokens=1)
        forks.join()

    state = program.run()
    fill, *calls = echo.calls
    assert isinstance(fill, Fill)
    assert fill.segments == (Text("Tips: "),)
    assert [call.segments for call in calls] == [(ids("Tips: "), Text(f"{i} ")) for i in range(3)]
    assert state["tip"] == ["0", "1", "2"]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("tip")] == [1, 1, 1]
    assert state.text() == "Tips: "


def test_a_fork_right_after_an_answer_needs_no_request(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        for f in s.fork(2):
            f += "y" + sgl.gen("b")
        with s.fork(2) as forks:
            forks += sgl.gen("c")

    state = program.run()
    assert len(generated(echo)) == len(echo.calls) == 5
    assert echo.calls[1].segments == (ids("x"), ids("x"), Text("y"))
    assert state["c"] == ["x", "x"]
    assert "b" not in state


def test_a_single_branch_needs_no_request_and_seals_what_is_pending(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        with s.copy() as c:
            c += "y" + sgl.gen("a") + sgl.gen("b")
        s += "z" + sgl.gen("d")

    state = program.run()
    assert len(echo.calls) == 3
    # What is from before the fork stays text in the branch: its tokens are the same every time.
    assert {call.segments for call in echo.calls} == {
        (Text("x"), Text("y")),
        (Text("x"), Text("y"), ids("y")),
        (Text("x"), Text("z")),
    }
    assert (state["a"], state["b"], state["d"]) == (["y"], ["y"], "z")


def test_branches_run_at_the_same_time() -> None:
    async def together() -> None:
        gate = asyncio.Event()

        async def answer(call: Call) -> str:
            if backend.running == 4:
                gate.set()
            await asyncio.wait_for(gate.wait(), 20)
            return "x"

        backend = Echo(answer)

        @sgl.function
        async def program(s: sgl.AsyncState) -> list[str]:
            forks = s.fork(4)
            forks += lambda i: f"{i}" + sgl.gen("a")
            forks.join()
            return list(await s["a"])

        state = await program.run_async(backend=backend)
        assert state.ret_value == state["a"] == ["x"] * 4
        assert backend.most == 4

    asyncio.run(together())


def test_forks_are_added_to_by_function_by_list_and_alike(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        forks = s.fork(2)
        forks += "a"
        forks += ["b", "c"]
        forks += lambda i: str(i)
        forks += sgl.gen("o")
        assert forks["o"] == ["ab0", "ac1"]
        assert [f.text() for f in forks] == ["ab0ab0", "ac1ac1"]
        assert forks[1]["o"] == "ac1"
        forks[0] += "!"
        assert len(forks) == 2
        with pytest.raises(ValueError, match="2 branches need as many items, got 1"):
            forks += ["x"]

    program.run()


def test_branches_know_the_variables_from_before_the_fork(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        forks = s.fork(2)
        for i, f in enumerate(forks):
            assert f["a"] == "x"
            f["own"] = i
        forks[1]["other"] = 5
        forks.join()
        assert s["own"] == [0, 1]
        assert s["other"] == [5]
        assert s["a"] == "x"

    program.run()


def test_each_join_gathers_what_its_own_branches_have_set(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> list[object]:
        seen: list[object] = []
        s["best"] = "none yet"
        for turn in range(2):
            branches = s.fork(2)
            branches += lambda i, turn=turn: f"{turn}{i}" + sgl.gen("a")
            branches[1]["best"] = turn
            branches.join()
            seen += [s["a"], s["best"]]
        return seen

    assert program.run().ret_value == [["00", "01"], [0], ["10", "11"], [1]]


def test_joined_text_is_appended_with_its_tokens(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "Points:"
        forks = s.fork(2)
        forks += lambda i: f" {i}" + sgl.gen("p", max_tokens=2)
        forks.join("concate_and_append")
        s += sgl.gen("end", max_tokens=1)

    state = program.run()
    assert echo.calls[-1].segments == (
        ids("Points:"), ids(" 0"), ids(" 0"), ids(" 1"), ids(" 1"),
    )  # fmt: skip
    assert state.text() == "Points: 0 0 1 1 "
    assert "p" not in state


def test_joined_text_within_a_message_stays_in_it(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.user("q") + sgl.assistant_begin() + "A:"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("p", max_tokens=1)
        forks.join("concate_and_append")
        s += sgl.assistant_end() + sgl.user("r") + sgl.assistant(sgl.gen("end", max_tokens=1))

    state = program.run()
    fill = echo.calls[0]
    assert isinstance(fill, Fill)
    assert fill.segments == (Turn("user", (Text("q"),)), Turn("assistant", (Text("A:"),), open=True))
    content = (Text("A:"), Text("0"), ids("A"), Text("1"), ids("A"))
    assert echo.calls[-1].segments[1] == Turn("assistant", content)
    assert state.messages()[1] == {"role": "assistant", "content": "A:0A1A"}


def test_a_branch_in_another_message_cannot_be_appended(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        forks = s.fork(1)
        forks += sgl.user_begin() + "x"
        forks.join("concate_and_append")

    with pytest.raises(sgl.LangError, match="branch 0 cannot be appended: it is in user message"):
        program.run()


def test_a_branch_that_has_ended_the_message_it_was_forked_in_cannot_be_appended(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += sgl.user_begin() + "Q:"
        branches = s.fork(2)
        branches += lambda i: f"{i}" + sgl.user_end() + sgl.assistant(sgl.gen("a"))
        s += sgl.user_end()
        branches.join("concate_and_append")

    with pytest.raises(sgl.LangError, match="branch 0 cannot be appended: it has ended the message"):
        program.run()


def test_after_the_join_a_branch_can_be_read_but_not_written(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        forks = s.fork(2)
        forks += "x" + sgl.gen("a")
        forks.join()
        assert forks[0].text() == "xx"
        with pytest.raises(sgl.LangError, match="has ended"):
            forks[0] += "more"
        with pytest.raises(ValueError, match=r'"gather_variable" or "concate_and_append", got \'mix\''):
            forks.join("mix")

    program.run()


def test_forks_of_forks(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "r"
        outer = s.fork(2)
        for i, o in enumerate(outer):
            o += str(i)
            inner = o.fork(2)
            inner += lambda j: str(j) + sgl.gen("leaf")
            inner.join()
        outer.join()

    state = program.run()
    assert state["leaf"] == [["0", "1"], ["0", "1"]]
    assert len(generated(echo)) == 4
    assert {call.segments for call in generated(echo)} == {
        (ids("r"), ids(str(i)), Text(str(j))) for i in range(2) for j in range(2)
    }
    assert sum(isinstance(call, Fill) for call in echo.calls) == 3


def test_branches_wait_for_the_request_of_their_fork() -> None:
    backend = Echo(delay=lambda call: 0.05 if isinstance(call, Fill) else 0.0)

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        s.fork(2).__iadd__(sgl.gen("a"))
        s += sgl.gen("b")

    program.run(backend=backend)
    assert isinstance(backend.done[0], Fill)
    assert [call.segments for call in backend.calls[1:]] == [(ids("x"),)] * 3


def test_a_backend_that_cannot_fill_is_not_asked_to() -> None:
    class Plain(Echo):
        async def fill(self, call: Fill) -> None:  # type: ignore[override]
            raise sgl.Unsupported("no fill")

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        forks = s.fork(2)
        forks += sgl.gen("a")
        forks.join()

    backend = Plain()
    assert program.run(backend=backend)["a"] == ["x", "x"]
    assert [call.segments for call in backend.calls] == [(Text("x"),)] * 2


def test_a_fork_of_no_branch_is_an_error(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State, size: int) -> None:
        s.fork(size)

    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        program.run(0)
