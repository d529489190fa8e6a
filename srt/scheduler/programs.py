"""Programs: requests that say that they belong together. What they use stays cached while their program
lives, as far as there is room for it (see kept_paths.py), and what they cost is counted.

A program is known by its namespace, its tenant and its name. It lives from its first request on until it is
ended, or until none of its requests has run or waited for a while. What is told of it is exact: positions are
counted when the step that computed them is taken in, for each of the step's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.pins import MAX_PINNED_SHARE
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import Ask
from sapwood.srt.scheduler.kept_paths import KeptPaths
from sapwood.srt.scheduler.rows import Rows

MAX_PROGRAMS = 4096
"""Programs without a request that runs or waits: of one more, the one idle longest is forgotten."""

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Counts:
    """What the requests of a program have used so far, in tokens.

    Of the `prompt_tokens` of the `requests` that have begun, `cached_tokens` were found in the cache. Steps
    have computed `computed_tokens` of prompts, `decoded_tokens` of outputs, and `drafted_tokens` that were
    only proposed, of which `accepted_tokens` were kept: together all positions that a forward pass computed
    for the program's rows. Of those of prompts and outputs, `recomputed_tokens` had been computed before, by
    the same choice, which was `retracted`, or by another one of the same request. The choices that have ended
    have `output_tokens`; `surplus_tokens` were drawn too, and are in no answer.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    retracted: int = 0


class Place(NamedTuple):
    """By what a program is known."""

    namespace: str
    tenant: str
    name: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class Program:
    """`number` is never another one's. `order` is that of the first of its requests that is there since one
    always was. `live` requests wait or run; if none does, none has since `idle_since`. `paths` are pinned for
    it, in the order of their last use, True if a request has begun with it."""

    place: Place
    number: int
    order: int = 0
    live: int = 0
    idle_since: float = 0.0
    over: bool = False
    counts: Counts = field(default_factory=Counts)
    paths: dict[Node, bool] = field(default_factory=dict)


class Part(NamedTuple):
    """Of a step in flight, whose its rows are (0: of no program), where they extend from, where their prompts
    end, and up to where they had been computed before; one entry a row each."""

    numbers: npt.NDArray[np.int64]
    starts: Int32s
    prompts: Int32s
    known: Int32s


class Ending(NamedTuple):
    """A program that was ended, and who has asked for it: answered when step `number` was taken in."""

    ask: Ask
    program: Program
    released: int
    number: int


class Programs:
    """The programs that live, and the counts of those whose last steps are still in flight."""

    def __init__(self, tree: RadixTree, pool: SlotPool, timeout: float, clock: Callable[[], float]) -> None:
        self.endings: list[Ending] = []
        self._kept = KeptPaths(tree, int(pool.total * MAX_PINNED_SHARE))
        self._timeout = timeout
        self._clock = clock
        self._known: dict[Place, Program] = {}
        self._idle: dict[Program, None] = {}
        """The one that has been idle longest comes first."""
        self._numbered: WeakValueDictionary[int, Program] = WeakValueDictionary()
        """Those of which something is told yet: as long as a request or an Ending knows one."""
        self._last = 0

    def __len__(self) -> int:
        """How many live."""
        return len(self._known)

    def __iter__(self) -> Iterator[Program]:
        """Those that live."""
        return iter(self._known.values())

    def find(self, place: Place) -> Program | None:
        """The program that lives there."""
        return self._known.get(place)

    def of(self, place: Place) -> Program | None:
        """The program of a request, a new one if none lives there; None without a name."""
        if not place.name:
            return None
        program = self._known.get(place)
        if program is None:
            self._last += 1
            program = self._known[place] = self._numbered[self._last] = Program(place, self._last)
        return program

    def join(self, program: Program, order: int) -> None:
        """A request of the program begins to wait."""
        program.live += 1
        if program.live == 1:
            program.order = order
            self._idle.pop(program, None)
            self._kept.move(program, math.inf)

    def leave(self, program: Program) -> None:
        """A request of the program has ended."""
        program.live -= 1
        if program.live == 0 and not program.over:
            self._rest(program)

    def found(self, program: Program, node: Node) -> None:
        """A request has begun with the path to `node`, from the cache."""
        if not program.over:
            self._kept.keep(program, node, math.inf, again=True)

    def left(self, program: Program, node: Node) -> None:
        """A request has ended, and left the path to `node`."""
        if not program.over:
            self._kept.keep(program, node, math.inf, again=False)

    def end(self, program: Program) -> int:
        """It lives no more: its requests go on, but nothing is kept for them. How many tokens are pinned no
        more."""
        program.over = True
        del self._known[program.place]
        self._idle.pop(program, None)
        return self._kept.release(program, self._clock())

    def expire(self, now: float) -> None:
        """End those that have been idle for too long. O(1) if there is none."""
        while self._idle and (first := next(iter(self._idle))).idle_since + self._timeout <= now:
            self.end(first)

    def next(self) -> float | None:
        """When the first of them ends by itself."""
        return next(iter(self._idle)).idle_since + self._timeout if self._idle else None

    def part(self, rows: Rows, of: Int32s, starts: Int32s) -> Part | None:
        """What is to be known of a step's rows when it is taken in; None if they are of no program."""
        numbers = rows.program[of]
        return Part(numbers, starts, rows.prompt[of], rows.known[of]) if numbers.any() else None

    def count(self, part: Part, ends: Int32s, drafts: Int32s | None) -> None:
        """A step has extended its rows up to `ends`, which includes drafts."""
        drafted = np.zeros_like(ends) if drafts is None else drafts
        plain = ends - drafted
        prompts = np.maximum(np.minimum(plain, part.prompts) - part.starts, 0)
        again = np.maximum(np.minimum(plain, part.known) - part.starts, 0)
        numbers, of = np.unique(part.numbers, return_inverse=True)
        sums = (np.bincount(of, each) for each in (prompts, plain - part.starts, again, drafted))
        for number, *tokens in zip(numbers.tolist(), *(each.tolist() for each in sums), strict=True):
            program = self._numbered.get(number)
            if program is not None:
                computed, extended, known, proposed = map(int, tokens)
                counts = program.counts
                counts.computed_tokens += computed
                counts.decoded_tokens += extended - computed
                counts.recomputed_tokens += known
                counts.drafted_tokens += proposed

    def whose(self, part: Part | None, i: int) -> Program | None:
        """Whose the step's i-th row was."""
        return self._numbered.get(int(part.numbers[i])) if part is not None else None

    def take_over(self, old: Programs) -> None:
        """Go on with the programs of a state that was given up: their pins are gone with its tree, and their
        requests have to join anew."""
        self.endings, self._known, self._last = old.endings, old._known, old._last
        self._numbered = old._numbered
        for program in self:
            program.paths.clear()
            if program.live:
                program.live, program.idle_since = 0, self._clock()
        self._idle = dict.fromkeys(sorted(self, key=lambda program: program.idle_since))

    def _rest(self, program: Program) -> None:
        """None of its requests is there any more."""
        program.idle_since = self._clock()
        self._idle[program] = None
        self._kept.move(program, program.idle_since + self._timeout)
        if len(self._idle) > MAX_PROGRAMS:
            self.end(next(iter(self._idle)))
