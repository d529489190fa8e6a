"""The grammar process's calls: each constraint is compiled once, each caller is answered once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sapwood.srt.errors import BadRequest, ErrorInfo, SapwoodError, Unavailable
from sapwood.srt.grammar import compiler, process
from sapwood.srt.grammar.child import Outcome, Setup
from sapwood.srt.grammar.compiler import Compiler
from sapwood.srt.grammar.kept import Kept
from sapwood.srt.grammar.process import GrammarLoop
from sapwood.srt.grammar.turns import Turns
from sapwood.srt.messages import Compile, Compiled, Forget, Grammar, GrammarStats
from sapwood.srt.params import Constraint

FAULT = BadRequest("f is wrong", param="f").info()
GRAMMAR = Grammar(b"key", "start: /a/", [])


class Work:
    """A compiler that is done with what the test says."""

    def __init__(self) -> None:
        self.put_in: dict[int, Constraint] = {}
        self.dropped: list[int] = []
        self.parties: list[tuple[int, str]] = []
        self._done: list[tuple[int, Outcome, float]] = []

    def put(self, number: int, constraint: Constraint, party: str) -> None:
        self.put_in[number] = constraint
        self.parties.append((number, party))

    def join(self, number: int, party: str) -> None:
        assert number in self.put_in
        self.parties.append((number, party))

    def drop(self, number: int) -> None:
        self.dropped.append(number)
        del self.put_in[number]

    def finish(self, outcome: Outcome, number: int | None = None) -> None:
        number = min(self.put_in) if number is None else number
        del self.put_in[number]
        self._done.append((number, outcome, 0.0))

    def finished(self) -> Iterator[tuple[int, Outcome, float]]:
        while self._done:
            yield self._done.pop(0)


class Box:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.open = True

    def send(self, *batch: Any) -> bool:
        if self.open:
            self.got += batch
        return self.open

    def take(self) -> list[Any]:
        got, self.got = self.got, []
        return got


class Bench:
    def __init__(self) -> None:
        self.work = Work()
        self.boxes = [Box(), Box()]
        self.server = Box()
        self.loop = GrammarLoop(3, self.work, self.boxes, self.server)  # type: ignore[arg-type]

    def ask(self, call: int, text: str = "a", tokenizer: int = 0, party: str = "", **fields: Any) -> None:
        constraint = Constraint(**{"kind": "regex", "text": text, "field": "f", **fields})
        self.loop.handle([Compile(call, tokenizer, constraint, party)])

    def finish(self, grammar: Grammar | None = None, error: ErrorInfo | None = None) -> None:
        self.work.finish(Outcome(grammar, error))
        self.loop.handle([])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_equal_constraints_are_compiled_once(bench: Bench) -> None:
    bench.ask(1)
    bench.ask(1, tokenizer=1)
    bench.ask(2, field="other")
    bench.ask(3, whitespace=3)  # which is the server's
    assert len(bench.work.put_in) == 1
    bench.finish(GRAMMAR)
    assert bench.boxes[0].take() == [Compiled(1, GRAMMAR), Compiled(2, GRAMMAR), Compiled(3, GRAMMAR)]
    assert bench.boxes[1].take() == [Compiled(1, GRAMMAR)]
    bench.ask(4, field="a third")
    assert bench.boxes[0].take() == [Compiled(4, GRAMMAR)]
    assert not bench.work.put_in


@pytest.mark.parametrize(
    "other",
    [{"text": "b"}, {"kind": "ebnf"}, {"whitespace": 0}, {"after": "</think>"}, {"opening": "<think>"}],
)
def test_others_are_not(bench: Bench, other: dict[str, Any]) -> None:
    bench.ask(1)
    bench.ask(2, **other)
    assert len(bench.work.put_in) == 2
    bench.finish(GRAMMAR)
    assert bench.boxes[0].take() == [Compiled(1, GRAMMAR)]


def test_the_servers_whitespace_is_filled_in(bench: Bench) -> None:
    bench.ask(1)
    bench.ask(2, whitespace=7)
    assert [constraint.whitespace for constraint in bench.work.put_in.values()] == [3, 7]


def test_what_is_wrong_is_told_with_the_requests_own_field(bench: Bench) -> None:
    bench.ask(1)
    bench.ask(2, field="g")
    bench.ask(3)
    bench.finish(error=FAULT)
    assert bench.boxes[0].take() == [Compiled(1, None, FAULT), Compiled(3, None, FAULT)]
    (again,) = bench.work.put_in.values()
    assert again.field == "g"
    other = BadRequest("g is wrong", param="g").info()
    bench.finish(error=other)
    assert bench.boxes[0].take() == [Compiled(2, None, other)]
    bench.ask(4)
    bench.ask(5, field="g")
    assert bench.boxes[0].take() == [Compiled(4, None, FAULT), Compiled(5, None, other)]
    assert not bench.work.put_in


def test_what_is_not_enforced_is_told_with_the_requests_own_field(bench: Bench) -> None:
    bench.ask(1)
    bench.ask(2, field="g")
    warned, other = (msgspec.structs.replace(GRAMMAR, warnings=[f"{field} is odd"]) for field in "fg")
    bench.finish(warned)
    assert bench.boxes[0].take() == [Compiled(1, warned)]
    bench.finish(other)
    assert bench.boxes[0].take() == [Compiled(2, other)]
    bench.ask(3)
    bench.ask(4, field="g")
    assert bench.boxes[0].take() == [Compiled(3, warned), Compiled(4, other)]
    assert not bench.work.put_in


@pytest.mark.parametrize("kind", [SapwoodError, Unavailable])
def test_a_failure_that_was_not_the_constraints_is_not_kept(bench: Bench, kind: type[SapwoodError]) -> None:
    bench.ask(1)
    failure = kind("its process has ended").info()
    bench.finish(error=failure)
    assert bench.boxes[0].take() == [Compiled(1, None, failure)]
    bench.ask(2)
    bench.finish(GRAMMAR)
    assert bench.boxes[0].take() == [Compiled(2, GRAMMAR)]


def test_what_nobody_waits_for_any_more_is_dropped(bench: Bench) -> None:
    bench.ask(1)
    bench.ask(1, tokenizer=1)
    bench.loop.handle([Forget(1, 0), Forget(7, 0)])
    assert bench.work.dropped == []
    bench.loop.handle([Forget(1, 1), Forget(1, 1)])
    assert len(bench.work.dropped) == 1
    bench.ask(2)  # anew
    bench.finish(GRAMMAR)
    assert bench.boxes[0].take() == [Compiled(2, GRAMMAR)]
    assert bench.boxes[1].take() == []


def test_only_so_many_calls_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_WAITING", 2)
    for call in range(3):
        bench.ask(call, text=str(call))
    (refused,) = bench.boxes[0].take()
    assert refused.call == 2
    assert refused.error is not None
    assert refused.error.status == 429
    bench.finish(GRAMMAR)
    bench.ask(3, text="0")  # known: it needs no place
    bench.ask(4, text="4")
    assert len(bench.work.put_in) == 2


def test_who_has_most_waiting_gives_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_WAITING", 3)
    refused = []
    for call, party in enumerate(["many", "many", "many", "many", "few", "few", "one", "other"]):
        bench.ask(call, text=str(call), party=party)
        refused += [answer.call for answer in bench.boxes[0].take()]
    assert refused == [3, 2, 5, 1, 7]
    for _ in range(3):
        bench.finish(GRAMMAR)
    assert [answer.call for answer in bench.boxes[0].take()] == [0, 4, 6]


def test_it_may_come_in_the_turn_of_any_who_wants_it(bench: Bench) -> None:
    bench.ask(1, party="many")
    bench.ask(2, party="one")
    bench.ask(3, party="one", field="g")
    bench.finish(error=FAULT)
    assert bench.work.parties == [(1, "many"), (1, "one"), (1, "one"), (2, "one")]


def test_parties_take_turns() -> None:
    turns: Turns[int] = Turns()
    for number in range(4):
        turns.put(number, "many")
    for number in (9, 3, 3):
        turns.put(number, "few")
    assert [turns.take() for _ in range(len(turns))] == [0, 9, 1, 3, 2]
    assert not turns


def test_a_failure_that_nobody_waits_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real compiler, where no process is to be had."""

    def no_process(*_: Any) -> Any:
        raise Unavailable("no process can be started now")

    monkeypatch.setattr(compiler, "BoundedProcess", no_process)
    box = Box()
    loop = GrammarLoop(0, Compiler(Setup("", 8, [0]), 1), [box], Box())
    constraint = Constraint("regex", "a", "f")
    loop.handle([Compile(1, 0, constraint), Forget(1, 0)])
    assert box.take() == []
    loop.handle([Compile(2, 0, constraint, "a"), Compile(3, 0, constraint, "b")])
    assert [(answer.call, answer.error.status) for answer in box.take()] == [(2, 503), (3, 503)]


def test_an_answer_that_finds_the_queue_full_is_told_later(bench: Bench) -> None:
    bench.ask(1)
    bench.boxes[0].open = False
    bench.finish(GRAMMAR)
    bench.loop.handle([])
    bench.boxes[0].open = True
    bench.loop.handle([])
    bench.loop.handle([])
    assert bench.boxes[0].take() == [Compiled(1, GRAMMAR)]


def test_all_is_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STATS_SECONDS", 0.0)
    bench.ask(1)
    bench.finish(GRAMMAR)
    bench.ask(2)
    bench.ask(3, text="b")
    bench.finish(error=FAULT)
    assert bench.server.got[-1] == GrammarStats(1, 1, 1, 0.0)
    told = len(bench.server.got)
    bench.loop.handle([])
    assert len(bench.server.got) == told


def test_the_one_asked_for_longest_ago_gives_way() -> None:
    kept = Kept(limit=3 * (1000 + 512))
    names = [Constraint("regex", name, "f") for name in "abcd"]
    outcomes = [Outcome(Grammar(name.text.encode(), "x" * 1000)) for name in names]
    for name, outcome in zip(names[:3], outcomes, strict=False):
        kept.keep(name, outcome)
    assert kept.find(names[0]) == outcomes[0]
    kept.keep(names[3], outcomes[3])
    assert [kept.find(name) for name in names] == [outcomes[0], None, outcomes[2], outcomes[3]]
    kept.keep(names[1], Outcome(Grammar(b"", "x" * 10_000)))
    assert not any(kept.find(name) for name in names)
