"""What the scheduler knows: the pool, the tree, the rows, who waits, and what is in flight.

Who owns a slot, at any time exactly one of:

    pool (free) ──take──► row (private) ──insert──► tree ──evict, flush──► pool
                              └──────release: duplicates and the rest──────►┘

The rooms around this one act on it: admission and plan make steps, results and ends take them in.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.config import Config
from sapwood.srt.messages import Stats
from sapwood.srt.scheduler.deadlines import Deadlines
from sapwood.srt.scheduler.estimate import OutputEstimate
from sapwood.srt.scheduler.grammars import Grammars
from sapwood.srt.scheduler.policy import Queue
from sapwood.srt.scheduler.programs import Program, Programs
from sapwood.srt.scheduler.request import Request, Sequence
from sapwood.srt.scheduler.rows import Rows
from sapwood.srt.scheduler.shared import SharedPrefixes
from sapwood.srt.scheduler.step_cost import FIRST_ROW, StepCost
from sapwood.srt.scheduler.step_counts import Part

if TYPE_CHECKING:
    from sapwood.srt.scheduler.drafts import Drafts


def step_budget(config: Config, context_length: int) -> int:
    """Tokens of one step; without chunks a step takes whole prompts up to the context length."""
    return context_length if config.chunk < 0 else config.chunk


@dataclass(slots=True)
class Sent:
    """What is remembered of a step in flight: its result is read against this, never against present rows.
    `drafts` is None if no row has one, `part` if none is a program's."""

    number: int
    rows: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int32]
    extends: npt.NDArray[np.bool_]
    samples: npt.NDArray[np.int32]
    drafts: npt.NDArray[np.int32] | None
    part: Part | None
    prompt_tokens: int
    tokens: int


@dataclass(slots=True)
class Counters:
    """Totals since the start, for the metrics."""

    retracted: int = 0
    steps: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    evicted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds_saved: float = 0.0
    seconds_per_prompt_token: float = 0.0


@dataclass(slots=True)
class State:
    """`eos_ids` end a row that does not ignore them; `max_request_tokens` bounds prompt plus output.

    `waiting` has all sequences without a row; those of them that could get one are in the `queue` too.
    """

    config: Config
    eos_ids: npt.NDArray[np.int32]
    context_length: int
    pool: SlotPool
    tree: RadixTree
    rows: Rows
    queue: Queue
    max_request_tokens: int
    seeds: random.Random
    clock: Callable[[], float]
    drafts: Drafts
    programs: Programs
    row_cost: StepCost = field(default_factory=lambda: StepCost(FIRST_ROW))
    """Of the steps without prompts: a token is a row."""
    grammars: Grammars = field(default_factory=Grammars)
    waiting: dict[int, Sequence] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    tombstones: dict[int, float] = field(default_factory=dict)
    in_flight: deque[Sent] = field(default_factory=deque)
    outgoing: dict[int, list[Any]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    shared: SharedPrefixes = field(default_factory=SharedPrefixes)
    outputs: OutputEstimate = field(default_factory=OutputEstimate)
    tenants: dict[str, int] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    listed_tokens: int = 0
    """Room that listed prefixes take, or will again: requests are accepted for what is left."""
    orders: int = 0
    short: bool = False
    """Whether the last step left somebody waiting who would have had a row, but not the slots."""
    reserved_rows: int = 0

    @property
    def budget(self) -> int:
        """Tokens of one step."""
        return step_budget(self.config, self.context_length)

    @property
    def available(self) -> int:
        """Slots that a row could be given now, by eviction if need be."""
        return self.pool.num_free + self.tree.evictable_tokens

    def keep_room(self, listed: int) -> None:
        """Accept requests for what `listed` tokens of prefixes leave of the pool, as long as it lasts."""
        self.listed_tokens = max(self.listed_tokens, listed)
        self.max_request_tokens = min(self.max_request_tokens, self.pool.total - self.listed_tokens)

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """`count` slots, evicting what they need; the caller has made sure that they are available."""
        short = count - self.pool.num_free
        if short > 0:
            self.counters.evicted_tokens += self.tree.evict(short)
        return self.pool.allocate(count)

    def wait(self, sequence: Sequence) -> None:
        """`sequence` has no row; it may get one if it can be `queued`."""
        self.waiting[sequence.key] = sequence
        if sequence.queued:
            self.queue.add(sequence)

    def surplus(self, program: Program | None, tokens: int) -> None:
        """So many tokens that were drawn, for a request of this program, are in no answer."""
        self.counters.surplus_tokens += tokens
        if program is not None:
            program.counts.surplus_tokens += tokens

    def tell(self, tokenizer: int, message: Any) -> None:
        """Queue a message for a tokenizer; what one step gives is sent as one frame."""
        self.outgoing.setdefault(tokenizer, []).append(message)

    def stats(self) -> Stats:
        """Gauges and counters of now."""
        c = self.counters
        return Stats(
            running=self.rows.num_active,
            waiting=len(self.waiting),
            slots_used=self.pool.total - self.pool.num_free - self.tree.evictable_tokens,
            slots_cached=self.tree.cached_tokens,
            slots_total=self.pool.total,
            retracted=c.retracted,
            steps=c.steps,
            prompt_tokens_cached=c.prompt_tokens_cached,
            prompt_tokens_computed=c.prompt_tokens_computed,
            output_tokens=c.output_tokens,
            surplus_tokens=c.surplus_tokens,
            evicted_tokens=c.evicted_tokens,
            seconds_saved=c.seconds_saved,
            drafted_tokens=c.drafted_tokens,
            accepted_tokens=c.accepted_tokens,
            programs=len(self.programs),
            slots_pinned=self.tree.pinned_tokens,
        )

    def private_slots(self) -> Iterator[npt.NDArray[np.int32]]:
        """Per active row, the slots that are the row's alone."""
        for row in np.flatnonzero(self.rows.active):
            own, node = self.rows.own(int(row)), self.rows.node[row]
            shared = node.path_slots()
            differ = np.ones(len(own), dtype=np.bool_)
            differ[: len(shared)] = own[: len(shared)] != shared
            yield own[differ]

    def check(self) -> None:
        """Every slot is free, in the tree, or private to one row, and who waits is where it should be:
        AssertionError if not."""
        self.tree.check()
        private = list(self.private_slots())
        check_pool(self.pool, self.tree, private)
        counted = int(self.rows.private[self.rows.active].sum())
        assert sum(map(len, private)) == counted, (sum(map(len, private)), counted)
        self.queue.check(s for s in self.waiting.values() if s.queued)
        self.grammars.check(list(self.requests.values()))
