"""Programs counted beside the scheduler: what the steps have computed, and what was answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sapwood.srt import messages
from sapwood.srt.cache.pins import ANYBODY
from sapwood.srt.messages import Ask, Done, Step, StepResult, Submit
from sapwood.srt.scheduler.kept_paths import MAX_PATHS
from sapwood.srt.scheduler.programs import Place, Program
from sapwood.srt.scheduler.state import State


@dataclass(slots=True)
class _Book:
    program: Program
    positions: int = 0
    """That steps have computed."""
    told: int = 0
    """Output tokens of choices that have ended."""


@dataclass(slots=True)
class Programs:
    """All the programs that have ever been there."""

    _books: dict[int, _Book] = field(default_factory=dict)
    """By number."""
    _of: dict[int, _Book] = field(default_factory=dict)
    """By request."""
    _spans: dict[int, list[tuple[_Book, int]]] = field(default_factory=dict)
    """By step in flight, how many positions of whom it computes."""
    _asked: dict[int, _Book | None] = field(default_factory=dict)

    def taken_in(self, state: State, message: Submit) -> None:
        """A request was submitted."""
        request = state.requests.get(message.key)
        program = request.program if request is not None else None
        if program is not None:
            assert program.place.name == message.scheduling.program
            self._of[message.key] = self._books.setdefault(program.number, _Book(program))

    def sent(self, state: State, step: Step) -> None:
        """A step goes to the worker."""
        rows, counts = messages.unpack(step.rows).tolist(), messages.unpack(step.counts).tolist()
        spans = self._spans[step.number] = []
        for row, count in zip(rows, counts, strict=True):
            sequence = state.rows.sequence[row]
            assert sequence is not None
            book = self._of.get(sequence.request.key)
            if book is not None:
                spans.append((book, count))

    def answered(self, result: StepResult) -> None:
        """A step was taken in, unless nobody knows of it any more."""
        for book, count in self._spans.pop(result.number, ()):
            book.positions += count

    def lost(self) -> None:
        """What is in flight is nobody's."""
        self._spans.clear()

    def done(self, request: int, message: Done) -> None:
        """A choice of the request has ended."""
        book = self._of.get(request)
        if book is not None:
            book.told += message.n

    def asked(self, state: State, message: Ask) -> None:
        """Somebody is about to ask for a program, or to end it."""
        state.programs.expire(state.clock())
        options = message.options
        found = state.programs.find(Place(message.namespace, options["tenant"], options["program"]))
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
        positions = told["computed_tokens"] + told["decoded_tokens"] + told["drafted_tokens"]
        assert positions == book.positions, f"{told} of {book.positions} positions"
        assert told["output_tokens"] == book.told, f"{told} of {book.told} output tokens"
        assert told["recomputed_tokens"] <= told["computed_tokens"] + told["decoded_tokens"]
        assert told["accepted_tokens"] <= told["drafted_tokens"]
        assert told["cached_tokens"] <= told["prompt_tokens"]
        assert min(value for value in told.values() if isinstance(value, int)) >= 0, told

    def check_over(self, state: State) -> None:
        """Nothing runs: every program that ever was has been counted whole, and with the last one that lives
        all that is kept for programs goes."""
        assert not self._asked, "a question about a program was not answered"
        for book in self._books.values():
            counts = book.program.counts
            self._check(book, {name: getattr(counts, name) for name in counts.__slots__})
        state.programs.expire(float("inf"))
        assert len(state.programs) == 0
        check_programs(state)
        for node in state.tree._pins:
            assert set(state.tree._pins.holders(node)) == {ANYBODY}, "a pin outlives its program"
        state.tree.check()


def check_programs(state: State) -> None:
    """Pins are those of programs that live, and programs know how many of their requests there are."""
    alive: dict[Program, int] = {}
    for request in state.requests.values():
        if request.program is not None:
            alive[request.program] = alive.get(request.program, 0) + 1
    pinned = {
        (number, node) for node in state.tree._pins for number in state.tree._pins.holders(node) if number
    }
    for program in state.programs:
        assert not program.over
        assert program.live == alive.get(program, 0), f"{program.live} requests of {program.place}"
        assert len(program.paths) <= MAX_PATHS
        pinned -= {(program.number, node) for node in program.paths}
    assert not pinned, "something is kept for a program that does not live, or does not know of it"
    idle = [program for program in state.programs if not program.live]
    assert set(state.programs._idle) == set(idle)
    for program in alive.keys() - set(state.programs):
        assert program.over
        assert not program.paths
