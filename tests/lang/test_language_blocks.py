"""Blocks of a program: within each other, and left by an error."""

from __future__ import annotations

import contextlib

import pytest

import sapwood as sgl
from sapwood.lang.backends.echo import Echo


def test_a_scope_may_be_within_one_of_its_own_name(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State, depth: int) -> list[str]:
        with s.var_scope("part"):
            s += f"{depth}("
            inner = program(s, depth - 1) if depth else []
            s += ")"
        return [*inner, s["part"]]

    assert program.run(2).ret_value == ["0()", "1(0())", "2(1(0()))"]


def test_an_error_in_a_block_is_raised_though_its_message_has_ended(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        with s.user():
            s += "x" + sgl.user_end()
            raise ZeroDivisionError("the program's own")

    with pytest.raises(ZeroDivisionError, match="the program's own"):
        program.run()


def test_a_block_whose_message_has_ended_is_an_error(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        with s.user():
            s += "x" + sgl.user_end()

    with pytest.raises(sgl.LangError, match="a message of user ends, but no message is open"):
        program.run()


def test_after_an_error_in_a_block_the_message_is_complete(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        with contextlib.suppress(ZeroDivisionError), s.user():
            s += "x"
            raise ZeroDivisionError
        s += sgl.assistant(sgl.gen("a"))

    assert program.run().messages()[0] == {"role": "user", "content": "x"}
