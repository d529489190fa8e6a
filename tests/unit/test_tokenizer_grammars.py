"""A request with a constraint: its grammar and its ids come in any order, and hold up nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import (
    Abort,
    Admitted,
    ChatPrompt,
    Chunk,
    Compile,
    Compiled,
    Ended,
    Finish,
    Forget,
    Generate,
    Grammar,
    IdsPrompt,
    Started,
    Submit,
    pack,
)
from sapwood.srt.params import Constraint, Parsing, SamplingParams, Scheduling
from sapwood.srt.tokenizer.process import TokenizerLoop
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.requests import NoTexts
from tests.tokenizer_kinds import byte_level
from tests.unit.test_tokenizer_loop import SOURCE, VERDICT, VOCABULARY, Bench, Box

GRAMMAR = Grammar(b"key", "start: /a/", ["x-lenient: not is not enforced"])
FAULT = BadRequest("regex is none", param="regex").info()


class Compiling(Bench):
    """A Bench with the grammar process's inbox."""

    def __init__(self, texts: Any = VOCABULARY) -> None:
        super().__init__()
        self.grammar = Box()
        encoder = PromptEncoder(SOURCE, byte_level(), True)
        self.loop = TokenizerLoop(0, SOURCE, encoder, texts, self.scheduler, self.server, self.grammar)

    def ask(self, rid: str = "r", prompt: Any = None, **constraint: Any) -> None:
        its = Constraint(**{"kind": "regex", "text": "a", "field": "regex", **constraint})
        prompt = prompt or IdsPrompt(pack([5, 6]))
        self.step(Generate(rid, prompt, SamplingParams(), constraint=its, parsing=Parsing()))

    def call(self) -> int:
        (compile_,) = self.grammar.take()
        assert isinstance(compile_, Compile)
        return compile_.call


def test_it_is_submitted_once_it_has_both() -> None:
    bench = Compiling()
    bench.ask()
    assert bench.scheduler.take() == []
    bench.step(Generate("other", IdsPrompt(pack([7])), SamplingParams()))  # held up by nobody
    (other,) = bench.scheduler.take()
    assert (other.rid, other.grammar) == ("other", None)
    bench.step(Compiled(bench.call(), GRAMMAR))
    (submit,) = bench.scheduler.take()
    assert (submit.rid, submit.grammar, submit.ids) == ("r", GRAMMAR, pack([5, 6]))
    bench.step(Admitted(submit.key, VERDICT, 0.0))
    (started,) = bench.server.take()
    assert isinstance(started, Started)
    assert started.warnings == GRAMMAR.warnings


def test_the_grammar_may_be_there_first() -> None:
    bench = Compiling()
    chat = ChatPrompt([{"role": "user", "content": "x", "more": "m"}])
    bench.ask(prompt=chat)
    bench.step(Compiled(bench.call(), GRAMMAR))
    while not (got := bench.scheduler.take()):
        bench.step()
    assert [(type(m), m.grammar) for m in got] == [(Submit, GRAMMAR)]
    assert bench.grammar.take() == []


def test_an_error_ends_the_request() -> None:
    bench = Compiling()
    bench.ask()
    call = bench.call()
    bench.step(Compiled(call, None, FAULT))
    assert bench.server.take() == [Ended("r", FAULT)]
    bench.step(Compiled(call, None, FAULT), Compiled(99, GRAMMAR))
    assert bench.server.take() == bench.scheduler.take() == bench.grammar.take() == []


def test_a_prompt_that_is_wrong_ends_it_too() -> None:
    bench = Compiling()
    bench.ask(prompt=IdsPrompt(pack([-1])))
    call = bench.grammar.take()[0].call
    (ended,) = bench.server.take()
    assert ended.error.param == "prompt"
    bench.step(Compiled(call, GRAMMAR))
    assert bench.server.take() == bench.scheduler.take() == []


def test_an_abort_while_it_is_compiled_ends_both() -> None:
    bench = Compiling()
    bench.ask()
    call = bench.call()
    bench.step(Abort("r"))
    assert bench.grammar.take() == [Forget(call, 0)]
    chunk, ended = bench.server.take()
    assert isinstance(chunk, Chunk)
    assert (chunk.finish, ended) == (Finish("abort"), Ended("r"))
    bench.step(Compiled(call, GRAMMAR))
    assert bench.scheduler.take() == []


def test_an_abort_that_came_first_compiles_nothing() -> None:
    bench = Compiling()
    bench.step(Abort("r"))
    bench.ask()
    assert bench.grammar.take() == []
    assert bench.server.take()[-1] == Ended("r")


def test_a_full_queue_is_told() -> None:
    bench = Compiling()
    bench.grammar.open = False
    bench.ask()
    (ended,) = bench.server.take()
    assert (ended.error.status, ended.error.code) == (429, "queue_full")


@pytest.mark.parametrize(
    ("fields", "party"),
    [
        ({"group": "g", "scheduling": Scheduling(tenant="t")}, "t"),
        ({"group": "g"}, "g"),
        ({}, "r"),
    ],
)
def test_whose_turn_it_comes_in(fields: dict[str, Any], party: str) -> None:
    bench = Compiling()
    its = Constraint("regex", "a", "regex")
    bench.step(Generate("r", IdsPrompt(pack([5, 6])), SamplingParams(), constraint=its, **fields))
    assert [message.party for message in bench.grammar.take()] == [party]


def test_what_begins_after_something_is_compiled_when_the_prompt_is_known() -> None:
    bench = Compiling()
    bench.ask(prompt=ChatPrompt([{"role": "user", "content": "x", "more": "m"}]), after="</think>")
    assert bench.grammar.take() == []
    while not (got := bench.grammar.take()):
        bench.step()
    assert got[0].constraint.after == "</think>"
    bench.step(Compiled(got[0].call, GRAMMAR))
    assert bench.scheduler.take()[0].grammar == GRAMMAR


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "x" * 65_537}, "regex has 65537 bytes, above the limit of 65536"),
        ({"text": "é" * 40_000}, "regex has 80000 bytes, above the limit of 65536"),
        ({"text": "\ud800"}, "regex holds a lone surrogate"),
        ({"after": "\udfff"}, "regex holds a lone surrogate"),
    ],
)
def test_constraints_are_checked_again(fields: dict[str, str], said: str) -> None:
    bench = Compiling()
    bench.ask(**fields)
    (ended,) = bench.server.take()
    assert (ended.error.status, ended.error.message) == (400, said)
    assert bench.grammar.take() == []


def test_without_a_tokenizer_there_are_none() -> None:
    bench = Compiling(NoTexts())
    bench.ask()
    (ended,) = bench.server.take()
    assert ended.error.message == "regex needs a tokenizer (--skip-tokenizer-init is set)"
