"""Programs: requests that say that they belong together. What they use stays cached while their program
lives, as far as there is room for it (see kept_paths.py), and what they cost is counted.

A program is known by its namespace, its tenant and its name. It lives from its first request on until it is
ended, or until none of its requests has run or waited for a while. What is told of it is exact: positions are
counted when the step that computed them is taken in (see step_counts.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary, finalize

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.messages import Ask
from sapwood.srt.scheduler.kept_paths import KeptPath, KeptPaths
from sapwood.srt.scheduler.step_counts import Part, StepCounts

MAX_PROGRAMS = 4096
"""Programs without a request that runs or waits: of one more, one is forgotten."""


@dataclass(slots=True)
class Counts:
    """What the requests of a program have used so far, in tokens.

    Of the `prompt_tokens` of the `requests` that have begun, `cached_tokens` were found in the cache. Steps
    have computed `computed_tokens` of prompts, `decoded_tokens` of outputs, and `drafted_tokens` that were
    only proposed: together all positions that a forward pass computed for the program's rows. After
    `accepted_tokens` of the proposed ones another token was drawn. Of those of prompts and outputs,
    `recomputed_tokens` had been computed before for the same request, and were no longer cached: it was
    `retracted`, or another choice had computed them. The choices that have ended have `output_tokens`;
    `surplus_tokens` were drawn too, and are in no answer.
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


class ProgramKey(NamedTuple):
    """By what a program is known."""

    namespace: str
    tenant: str
    name: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class Program:
    """`number` is never another one's. `order` is that of the first of its requests that is there since one
    always was. `live` requests wait or run; if none does, none has since `idle_since`. `paths` are pinned for
    it, in the order of their last use. The `counts` of steps are complete when they are asked for."""

    key: ProgramKey
    number: int
    order: int = 0
    live: int = 0
    idle_since: float = 0.0
    over: bool = False
    counts: Counts = field(default_factory=Counts)
    paths: OrderedDict[Node, KeptPath] = field(default_factory=OrderedDict, repr=False)


class Ending(NamedTuple):
    """A program that was ended, and who has asked for it: answered when step `number` was taken in."""

    ask: Ask
    program: Program
    released: int
    number: int


class _Idle:
    """Programs without a request, the one that has been idle longest first. Of one more than MAX_PROGRAMS,
    that of the tenant goes which has most of them."""

    def __init__(self) -> None:
        self._all: OrderedDict[Program, None] = OrderedDict()
        self._of: dict[str, OrderedDict[Program, None]] = {}
        """By tenant, of those that have any."""

    def __iter__(self) -> Iterator[Program]:
        return iter(self._all)

    def add(self, program: Program) -> None:
        self._all[program] = None
        self._of.setdefault(program.key.tenant, OrderedDict())[program] = None

    def discard(self, program: Program) -> None:
        if program in self._all:
            del self._all[program]
            theirs = self._of[program.key.tenant]
            del theirs[program]
            if not theirs:
                del self._of[program.key.tenant]

    def too_many(self) -> Program | None:
        """The one that goes, if there are too many."""
        if len(self._all) <= MAX_PROGRAMS:
            return None
        most = max(self._of.values(), key=len)
        return next(iter(most))


class Programs:
    """The programs that live, and the counts of those whose last steps are still in flight."""

    def __init__(self, tree: RadixTree, timeout: float, clock: Callable[[], float]) -> None:
        self.endings: list[Ending] = []
        self.steps = StepCounts()
        self._kept = KeptPaths(tree, timeout)
        self._timeout = timeout
        self._clock = clock
        self._known: dict[ProgramKey, Program] = {}
        self._idle = _Idle()
        self._numbered: WeakValueDictionary[int, Program] = WeakValueDictionary()
        """Those of which something is told yet: as long as a request or an Ending knows one."""

    def __len__(self) -> int:
        """How many live."""
        return len(self._known)

    def __iter__(self) -> Iterator[Program]:
        """Those that live."""
        return iter(self._known.values())

    def find(self, key: ProgramKey) -> Program | None:
        """The program of that key that lives."""
        return self._known.get(key)

    def of(self, key: ProgramKey) -> Program | None:
        """The program of a request, a new one if none lives; None without a name."""
        if not key.name:
            return None
        program = self._known.get(key)
        if program is None:
            number = self.steps.open()
            program = self._known[key] = self._numbered[number] = Program(key, number)
            finalize(program, self.steps.close, number).atexit = False
        return program

    def join(self, program: Program, order: int) -> None:
        """A request of the program begins to wait."""
        program.live += 1
        if program.live == 1:
            program.order = order
            self._idle.discard(program)

    def leave(self, program: Program) -> None:
        """A request of the program has ended."""
        program.live -= 1
        if program.live == 0 and not program.over:
            program.idle_since = self._clock()
            self._idle.add(program)
            self._trim()

    def found(self, program: Program, node: Node) -> None:
        """A request has begun with the path to `node`, from the cache."""
        if not program.over:
            self._kept.keep(program, node, True, self._clock())

    def left(self, program: Program, node: Node) -> None:
        """A request has ended, and left the path to `node`."""
        if not program.over:
            self._kept.keep(program, node, False, self._clock())

    def end(self, program: Program) -> int:
        """It lives no more: its requests go on, but nothing is kept for them. How many tokens are pinned no
        more."""
        program.over = True
        del self._known[program.key]
        self._idle.discard(program)
        return self._kept.release(program, self._clock())

    def expire(self, now: float) -> None:
        """End those that have been idle for too long. O(1) if there is none."""
        while (over := self.next()) is not None and over <= now:
            self.end(next(iter(self._idle)))

    def next(self) -> float | None:
        """When the first of them ends by itself."""
        first = next(iter(self._idle), None)
        return first.idle_since + self._timeout if first is not None else None

    def counts(self, program: Program) -> Counts:
        """All that has been counted for it."""
        counts, steps = program.counts, self.steps.take(program.number)
        counts.computed_tokens += steps.prompts
        counts.decoded_tokens += steps.outputs
        counts.recomputed_tokens += steps.again
        counts.drafted_tokens += steps.drafts
        return counts

    def whose(self, part: Part | None, i: int) -> Program | None:
        """Whose the step's i-th row was."""
        return self._numbered.get(int(part.numbers[i])) if part is not None else None

    def drew_after_drafts(self, part: Part | None, i: int, tokens: int) -> None:
        """After so many drafts of the step's i-th row another token was drawn."""
        if (program := self.whose(part, i)) is not None:
            program.counts.accepted_tokens += tokens

    def take_over(self, old: Programs) -> None:
        """Go on with the programs of a state that was given up: their pins are gone with its tree, and their
        requests have to join anew."""
        self.endings, self.steps = old.endings, old.steps
        self._known, self._numbered = old._known, old._numbered
        for program in self:
            program.paths.clear()
            if program.live:
                program.live, program.idle_since = 0, self._clock()
        for program in sorted(self, key=lambda program: program.idle_since):
            self._idle.add(program)
        self._trim()

    def _trim(self) -> None:
        while (program := self._idle.too_many()) is not None:
            self.end(program)
