"""Programs counted beside the scheduler: from the steps, their results, and what clients are told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sapwood.srt import messages
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.pins import ANYBODY
from sapwood.srt.messages import Admitted, Ask, Done, Step, StepResult, Submit, Tokens
from sapwood.srt.scheduler.kept_paths import MAX_PATHS, KeptPaths
from sapwood.srt.scheduler.programs import Counts, Program, ProgramKey
from sapwood.srt.scheduler.state import State
from tests.simulation.clients import tokens_of

SEEN = tuple(name for name in Counts.__slots__ if name != "retracted")
"""All but what can only be bounded from outside: of a draft's tokens some may be dropped with an end, and who
is retracted may never come back."""


@dataclass(slots=True)
class _Book:
    program: Program
    counts: Counts = field(default_factory=Counts)
    """Of the `retracted` those that came back."""


@dataclass(slots=True)
class _Choice:
    book: _Book
    prompt: int
    known: int
    """Up to here its tokens have been computed, by it or by the choice that it was forked from."""
    seats: int = 0
    handed: int = 0
    """Output tokens that its client was told."""


@dataclass(slots=True)
class _Span:
    """What a step computes for one row: `end` is without drafts."""

    choice: _Choice
    row: int
    start: int
    end: int
    drafts: int
    samples: int

    def count(self, drawn: int, failed: bool) -> None:
        counts, choice = self.choice.book.counts, self.choice
        prompt = min(self.end, choice.prompt)
        counts.computed_tokens += max(0, prompt - self.start)
        counts.decoded_tokens += self.end - max(self.start, prompt)
        counts.recomputed_tokens += max(0, min(self.end, choice.known) - self.start)
        counts.drafted_tokens += self.drafts
        counts.surplus_tokens += 0 if failed else drawn
        if self.drafts:
            counts.accepted_tokens += 0 if failed else drawn - 1
            choice.known = max(choice.known, self.end + drawn - 1)
        else:
            choice.known = max(choice.known, self.end)


def _computed(submit: Submit) -> int:
    """Tokens of the prompt, without one that is only judged."""
    n, params = len(submit.ids) // 4, submit.params
    return n - 1 if params.judges_last and params.reads_from(n) >= 0 else n


@dataclass(slots=True)
class Programs:
    """All the programs that have ever been there."""

    _books: dict[int, _Book] = field(default_factory=dict)
    """By number."""
    _choices: dict[int, _Choice] = field(default_factory=dict)
    """By key; a request's is its first one's."""
    _spans: dict[int, list[_Span | None]] = field(default_factory=dict)
    """By step in flight, one a row."""
    _asked: dict[int, _Book | None] = field(default_factory=dict)

    def taken_in(self, state: State, message: Submit) -> None:
        """A request was submitted."""
        request = state.requests.get(message.key)
        program = request.program if request is not None else None
        if program is not None:
            assert program.key.name == message.scheduling.program
            book = self._books.setdefault(program.number, _Book(program))
            prompt = _computed(message)
            # Under a grammar each choice draws from the prompt's last logits by itself.
            forked = prompt - (message.grammar is not None)
            for choice in range(message.params.n):
                self._choices[message.key + choice] = _Choice(book, prompt, forked if choice else 0)

    def sent(self, state: State, step: Step) -> None:
        """A step goes to the worker."""
        for start in step.admitted:
            choice = self._choices.get(int(state.rows.key[start.row]))
            if choice is not None:
                choice.seats += 1
                choice.book.counts.retracted += choice.seats > 1
        keys = {row: int(state.rows.key[row]) for row in messages.unpack(step.rows).tolist()}
        columns = [messages.unpack(column).tolist() for column in (step.starts, step.counts, step.samples)]
        drafts = messages.unpack(step.drafts).tolist() if step.drafts else [0] * len(keys)
        spans = self._spans[step.number] = []
        for row, start, count, samples, proposed in zip(keys, *columns, drafts, strict=True):
            choice = self._choices.get(keys[row])
            end = start + count - proposed
            spans.append(_Span(choice, row, start, end, proposed, samples) if choice is not None else None)

    def answered(self, result: StepResult) -> None:
        """A step was taken in, unless nobody knows of it any more."""
        spans = self._spans.pop(result.number, ())
        failed = {error.row for error in result.errors}
        drawn = messages.unpack(result.counts).tolist() if result.counts else None
        for i, span in enumerate(spans):
            if span is not None:
                span.count(drawn[i] if drawn is not None else span.samples, span.row in failed)

    def lost(self) -> None:
        """What is in flight is nobody's."""
        self._spans.clear()

    def heard(self, message: Any) -> None:
        """Clients are told something. All tokens that were drawn are surplus, as long as nobody is told."""
        match message:
            case Admitted():
                if (choice := self._choices.get(message.key)) is not None:
                    choice.book.counts.requests += 1
                    choice.book.counts.prompt_tokens += choice.prompt
                    choice.book.counts.cached_tokens += message.verdict.matched
            case Tokens():
                for key, _ in tokens_of(message):
                    if (choice := self._choices.get(key)) is not None:
                        choice.handed += 1
                        choice.book.counts.surplus_tokens -= 1
            case Done():
                if (choice := self._choices.get(message.key + message.choice)) is not None:
                    choice.book.counts.output_tokens += message.n
                    choice.book.counts.surplus_tokens += choice.handed - message.n

    def asked(self, state: State, message: Ask) -> None:
        """Somebody is about to ask for a program, or to end it."""
        state.programs.expire(state.clock())
        options = message.options
        found = state.programs.find(ProgramKey(message.namespace, options["tenant"], options["program"]))
        self._asked[message.call] = self._books[found.number] if found is not None else None

    def told(self, answer: messages.Answer) -> None:
        """It is answered."""
        book = self._asked.pop(answer.call)
        if book is None:
            assert answer.error is not None
            assert answer.error.code == "program_not_found"
            return
        assert answer.error is None, answer.error
        self._check(book, answer.data)

    def _check(self, book: _Book, told: dict[str, Any]) -> None:
        seen = asdict(book.counts)
        for name in SEEN:
            assert told[name] == seen[name], f"{name} is {told[name]}, not {seen[name]}"
        assert told["retracted"] >= seen["retracted"]

    def check_over(self, state: State) -> None:
        """Nothing runs: every program that ever was has been counted whole, and with the last one that lives
        all that is kept for programs goes."""
        assert not self._asked, "a question about a program was not answered"
        for book in self._books.values():
            self._check(book, asdict(state.programs.counts(book.program)))
        state.programs.expire(float("inf"))
        assert len(state.programs) == 0
        check_programs(state)
        for node in state.tree.pins:
            assert set(state.tree.pins.holders(node)) == {ANYBODY}, "a pin outlives its program"
        state.tree.check()


def check_programs(state: State) -> None:
    """Pins are those of programs that live, and programs know how many of their requests there are."""
    alive: dict[Program, int] = {}
    for request in state.requests.values():
        if request.program is not None:
            alive[request.program] = alive.get(request.program, 0) + 1
    pins = state.tree.pins
    pinned = {(number, node) for node in pins for number in pins.holders(node) if number}
    known = {(program.number, node) for program in state.programs for node in program.paths}
    assert pinned == known, "something is kept for a program that does not live, or does not know of it"
    for program in state.programs:
        assert not program.over
        assert program.live == alive.get(program, 0), f"{program.live} requests of {program.key}"
        assert len(program.paths) <= MAX_PATHS
    idle = [program for program in state.programs if not program.live]
    assert set(state.programs._idle) == set(idle)
    for program in alive.keys() - set(state.programs):
        assert program.over
        assert not program.paths
    _check_kept(state.programs._kept, known)


def _check_kept(kept: KeptPaths, known: set[tuple[int, Node]]) -> None:
    """Each path is in its tenant's share, once, in the line of its kind."""
    assert set(kept._held) == known
    shared = [path for share in kept._shares.values() for path in (*share.ends, *share.again)]
    assert len(shared) == len(known)
    for tenant, share in kept._shares.items():
        paths = (*share.ends, *share.again)
        assert share.tokens == sum(path.tokens for path in paths) > 0
        assert all(path is kept._held[path.program.number, path.node] for path in paths)
        assert {path.program.key.tenant for path in paths} == {tenant}
        assert not any(path.again for path in share.ends)
        assert all(path.again for path in share.again)
