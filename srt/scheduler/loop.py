"""The scheduler process: messages in, steps out, results in, tokens out."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt import log, messages
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.channel import HIGH_WATER, Inbox, Outbox, frames
from sapwood.srt.config import Config, Device, ModelSource
from sapwood.srt.errors import ErrorInfo, Overloaded, ProcessDied, Unavailable
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import (
    Ask,
    Cancel,
    GrammarLoaded,
    Stats,
    Step,
    StepResult,
    StopAt,
    Submit,
    WorkerReady,
)
from sapwood.srt.orders import Boot, Restart, inbox_of
from sapwood.srt.scheduler import intake, questions, results
from sapwood.srt.scheduler.drafts import Drafts
from sapwood.srt.scheduler.estimate import OutputEstimate
from sapwood.srt.scheduler.grammars import Grammars
from sapwood.srt.scheduler.plan import plan
from sapwood.srt.scheduler.policy import Queue
from sapwood.srt.scheduler.programs import Programs
from sapwood.srt.scheduler.recovery import Guard, carry_over
from sapwood.srt.scheduler.rows import Rows
from sapwood.srt.scheduler.state import State, step_budget

STATS_SECONDS = 0.2
RETRY_SECONDS = 0.01
"""After which a tokenizer that did not take a frame is asked again."""
RECENT_STEPS = 8
"""So many are kept for a dump."""


def make_state(
    config: Config,
    source: ModelSource,
    num_slots: int,
    clock: Callable[[], float] = time.monotonic,
    device: Device = "cpu",
) -> State:
    """An empty pool of `num_slots`, an empty tree, no rows. A pool below the context length caps requests."""
    config = config.on(device)
    seed = config.random_seed if config.random_seed is not None else int.from_bytes(os.urandom(8), "little")
    eos_ids = np.array(sorted(source.eos_ids), dtype=np.int32)
    outputs = OutputEstimate(config.schedule_conservativeness)
    return _empty(config, eos_ids, source.context_length, num_slots, random.Random(seed), clock, outputs)


def _empty(
    config: Config,
    eos_ids: npt.NDArray[np.int32],
    context_length: int,
    num_slots: int,
    seeds: random.Random,
    clock: Callable[[], float],
    outputs: OutputEstimate,
) -> State:
    limit = min(context_length, num_slots)
    pool = SlotPool(num_slots)
    tree = RadixTree(pool, config.radix_eviction_policy)
    return State(
        config=config,
        eos_ids=eos_ids,
        context_length=context_length,
        pool=pool,
        tree=tree,
        rows=Rows(config.rows, limit),
        queue=Queue(tree, config, step_budget(config, context_length), outputs),
        outputs=outputs,
        max_request_tokens=limit,
        seeds=seeds,
        clock=clock,
        drafts=Drafts.of(config),
        programs=Programs(tree, config.program_timeout, clock),
    )


class Scheduler:
    """Drives one State: at most one step is planned while another runs (`depth` steps in flight).

    The state is replaced by an empty one when the worker is, and when an invariant does not hold. `send`
    takes what the worker is to get, in order: steps and grammars. `recent` are the last steps sent.
    """

    def __init__(self, state: State, send: Callable[[Any], bool]) -> None:
        self.state = state
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self._send = send
        self._depth = 1 if state.config.disable_overlap_schedule else 2
        self._number = 0
        self._first = 0
        """The first step of this state: what comes of those before it is nobody's."""
        self._seated: set[int] = set()
        """Rows that the worker knows."""
        self._has_worker = True
        self._generation = 0
        """Of workers."""

    def handle(self, message: Any) -> None:
        """Take in one message from a tokenizer or the worker."""
        match message:
            case StepResult():
                if message.number >= self._first:
                    results.apply(self.state, message)
            case GrammarLoaded():
                if self._has_worker:  # else a dead one has said it
                    intake.grammar_loaded(self.state, message)
            case Submit():
                intake.submit(self.state, message)
            case StopAt():
                intake.stop_at(self.state, message)
            case Cancel():
                intake.cancel(self.state, message)
            case Ask():
                questions.ask(self.state, message)

    def advance(self) -> None:
        """End what has waited too long; plan and send what can be planned now."""
        intake.expire(self.state)
        self.state.programs.expire(self.state.clock())
        questions.answer_endings(self.state)
        if not self._has_worker:
            return
        orders, self.state.grammars.orders = self.state.grammars.orders, []
        for order in orders:
            self._tell_worker(order)
        while len(self.state.in_flight) < self._depth:
            step = plan(self.state, self._number)
            if step is None:
                return
            self._number += 1
            self.recent.append(step)
            if step.released or step.admitted:
                self._seated.difference_update(messages.unpack(step.released).tolist())
                self._seated.update(start.row for start in step.admitted)
            self._tell_worker(step)

    def _tell_worker(self, message: Any) -> None:
        if not self._send(message):
            raise Overloaded("the worker does not take messages")

    def lose_worker(self, why: str) -> None:
        """The worker has died, and another one will come: what has run ends with an error, what has not goes
        on waiting. Nothing is planned until `take_worker`."""
        error = ProcessDied(f"{why}; another one is being started: the request may be retried")
        self._has_worker = False
        self._seated.clear()
        self._generation += 1
        self._begin(self.state.pool.total, error.info(), waiting_too=False)

    def take_worker(self, num_slots: int) -> None:
        """Begin to plan for another worker, which has `num_slots` slots and knows nothing."""
        if num_slots != self.state.pool.total:
            self._begin(num_slots, Unavailable("the worker was replaced").info(), waiting_too=False)
        self._has_worker = True

    def rebuild(self, error: ErrorInfo) -> None:
        """Give the state up: every request ends with `error`. The worker goes on; it hears with the next step
        that its rows are free, and what it still gives of steps before that is dropped."""
        self._begin(self.state.pool.total, error, waiting_too=True)

    def _begin(self, num_slots: int, error: ErrorInfo, waiting_too: bool) -> None:
        old = self.state
        new = _empty(
            old.config, old.eos_ids, old.context_length, num_slots, old.seeds, old.clock, old.outputs
        )
        new.rows.released = sorted(self._seated)
        if waiting_too:
            old.grammars.forget_users()
            new.grammars = old.grammars
        else:
            new.grammars = Grammars(self._generation)
        carry_over(old, new, error, waiting_too)
        self.state, self._first = new, self._number


class Posts:
    """The outboxes to the tokenizers; frames that one does not take yet wait here, in order, bounded."""

    def __init__(self, outboxes: list[Outbox]) -> None:
        self._outboxes = outboxes
        self._waiting: list[deque[list[Any]]] = [deque() for _ in outboxes]

    def send(self, tokenizer: int, batch: list[Any]) -> None:
        """Send a frame, after those that wait. Raises Overloaded if too many do."""
        self._waiting[tokenizer].append(batch)
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent; whether nothing is left."""
        for outbox, waiting in zip(self._outboxes, self._waiting, strict=True):
            while waiting and outbox.send(*waiting[0]):
                waiting.popleft()
            if len(waiting) > HIGH_WATER:
                raise Overloaded(f"a tokenizer lags {len(waiting)} frames behind")
        return not any(self._waiting)


class Reporter:
    """Sends Stats through the first tokenizer when they have changed, at most every STATS_SECONDS."""

    def __init__(self) -> None:
        self._last: Stats | None = None
        self._when = 0.0

    def due(self, state: State) -> Stats | None:
        """The stats, if they are to be sent now."""
        now = time.monotonic()
        if now - self._when < STATS_SECONDS:
            return None
        stats = state.stats()
        if stats == self._last:
            return None
        self._last, self._when = stats, now
        return stats

    def stale(self, state: State) -> bool:
        """Whether there will be something to send."""
        return state.stats() != self._last


class WorkerLink:
    """The outboxes to the worker that is there now, one for each of its ranks. Each worker has inboxes of its
    own: what was sent to a dead one never reaches another."""

    def __init__(self, directory: str, ranks: int = 1) -> None:
        self.index = 0
        self._directory = directory
        self._ranks = ranks
        self._outboxes = self._connected()

    def send(self, message: Any) -> bool:
        """Every rank gets every step; grammars are for rank 0, which alone samples. False if the queue of one
        is full: that one is lost then, and with it the worker."""
        frame = messages.encode([message])
        outboxes = self._outboxes if isinstance(message, Step) else self._outboxes[:1]
        # No harm if only some ranks get a step: the scheduler ends by Overloaded then, and with it they all.
        return all(outbox.send_frame(frame) for outbox in outboxes)

    def turn_to(self, index: int) -> None:
        """Send to worker `index` from now on."""
        for outbox in self._outboxes:
            outbox.close()
        self.index = index
        self._outboxes = self._connected()

    def _connected(self) -> list[Outbox]:
        return [Outbox(self._directory, inbox_of(rank), self.index) for rank in range(self._ranks)]


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Run until the launcher ends the process."""
    log.set_up("scheduler", boot.config.log_level, boot.config.log_format)
    inbox = Inbox(boot.directory, "scheduler")
    tokenizers = range(boot.config.tokenizer_workers)
    posts = Posts([Outbox(boot.directory, "tokenizer", i) for i in tokenizers])
    early: list[Any] = []
    first: WorkerReady | None = None
    while first is None:
        for message in inbox.receive(None):
            if isinstance(message, WorkerReady):
                first = message
            else:
                early.append(message)
    process = SchedulerProcess(boot, lifeline, inbox, posts, first)
    threading.Thread(target=process.listen, name="commands", daemon=True).start()
    process.run(early)


class SchedulerProcess:
    """The scheduler between its sockets and the launcher; `ready` is the first worker's."""

    def __init__(
        self, boot: Boot, lifeline: Lifeline, inbox: Inbox, posts: Posts, ready: WorkerReady
    ) -> None:
        self._boot = boot
        self._lifeline = lifeline
        self._inbox = inbox
        self._posts = posts
        self._worker = WorkerLink(boot.directory, boot.config.tensor_parallel_size)
        state = make_state(boot.config, boot.source, ready.num_slots, device=ready.device)
        self._scheduler = Scheduler(state, self._worker.send)
        self._guard = Guard(self._scheduler, self._tell_ready)
        self._reporter = Reporter()
        self._orders: deque[Any] = deque()
        self._tell_ready()

    def listen(self) -> None:
        """Runs in a thread of its own: what the launcher says ends the wait for messages."""
        wake = Outbox(self._boot.directory, "scheduler")
        while True:
            self._orders.append(self._lifeline.commands.get())
            wake.send()

    def run(self, batch: list[Any]) -> None:
        """Take in `batch`, and whatever comes after it, for ever."""
        while True:
            while self._orders:
                self._obey(self._orders.popleft())
            for message in batch:
                if isinstance(message, WorkerReady):
                    self._take_worker(message)
                else:
                    self._guard.handle(message)
            self._guard.advance()
            self._tell()
            batch = self._inbox.receive(self._patience())

    def _obey(self, order: Any) -> None:
        if isinstance(order, Restart) and order.index > self._worker.index:
            self._worker.turn_to(order.index)
            self._scheduler.lose_worker(order.message)

    def _take_worker(self, ready: WorkerReady) -> None:
        """A worker that is not the next one is one that has died since."""
        # The launcher's word comes another way, and may come after the new worker's own.
        self._obey(Restart(ready.index, "the worker died"))
        if ready.index == self._worker.index:
            self._scheduler.take_worker(ready.num_slots)
            self._tell_ready()

    def _tell_ready(self) -> None:
        state = self._scheduler.state
        longest = f"{state.max_request_tokens} tokens, prompt and output together"
        if state.max_request_tokens < state.context_length:
            longest += (
                f": the KV pool ({state.pool.total} slots) is smaller than the context"
                f" ({state.context_length})"
            )
        self._lifeline.ready({"longest request": longest}, state.max_request_tokens)

    def _tell(self) -> None:
        """Send what the messages so far have led to."""
        state = self._scheduler.state
        outgoing, state.outgoing = state.outgoing, {}
        stats = self._reporter.due(state)
        if stats is not None:
            outgoing.setdefault(0, []).append(stats)
        for tokenizer, told in outgoing.items():
            for frame in frames(told):
                self._posts.send(tokenizer, frame)

    def _patience(self) -> float | None:
        """Seconds to wait for messages; None: for ever."""
        state = self._scheduler.state
        over = [state.deadlines.next(), state.programs.next()]
        waits = [
            None if self._posts.flush() else RETRY_SECONDS,
            STATS_SECONDS if self._reporter.stale(state) else None,
            *(None if when is None else max(0.0, when - state.clock()) for when in over),
            self._guard.patience(),
        ]
        return min((seconds for seconds in waits if seconds is not None), default=None)
