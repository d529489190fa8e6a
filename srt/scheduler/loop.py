"""The scheduler process: messages in, steps out, results in, tokens out."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sapwood.srt import log
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.channel import HIGH_WATER, Inbox, Outbox, frames
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import Overloaded
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import Ask, Cancel, Stats, StepResult, StopAt, Submit, WorkerReady
from sapwood.srt.orders import Boot
from sapwood.srt.scheduler import intake, questions, results
from sapwood.srt.scheduler.plan import plan
from sapwood.srt.scheduler.policy import Queue
from sapwood.srt.scheduler.rows import Rows
from sapwood.srt.scheduler.state import State, step_budget

STATS_SECONDS = 0.2


def make_state(
    config: Config, source: ModelSource, num_slots: int, clock: Callable[[], float] = time.monotonic
) -> State:
    """An empty pool of `num_slots`, an empty tree, no rows. A pool below the context length caps requests."""
    limit = min(source.context_length, num_slots)
    pool = SlotPool(num_slots)
    tree = RadixTree(pool)
    seed = config.random_seed if config.random_seed is not None else int.from_bytes(os.urandom(8), "little")
    return State(
        config=config,
        eos_ids=np.array(sorted(source.eos_ids), dtype=np.int32),
        context_length=source.context_length,
        pool=pool,
        tree=tree,
        rows=Rows(config.max_running_requests, limit),
        queue=Queue(tree, config.schedule_policy, step_budget(config, source.context_length)),
        max_request_tokens=limit,
        seeds=random.Random(seed),
        clock=clock,
    )


class Scheduler:
    """Drives one State: at most one step is planned while another runs (`depth` steps in flight)."""

    def __init__(self, state: State, send_step: Callable[[Any], bool]) -> None:
        self.state = state
        self._send_step = send_step
        self._depth = 1 if state.config.disable_overlap_schedule else 2
        self._number = 0

    def handle(self, message: Any) -> None:
        """Take in one message from a tokenizer or the worker."""
        match message:
            case StepResult():
                results.apply(self.state, message)
            case Submit():
                intake.submit(self.state, message)
            case StopAt():
                intake.stop_at(self.state, message)
            case Cancel():
                intake.cancel(self.state, message)
            case Ask():
                questions.ask(self.state, message)

    def advance(self) -> None:
        """Plan and send what can be planned now."""
        while len(self.state.in_flight) < self._depth:
            step = plan(self.state, self._number)
            if step is None:
                return
            self._number += 1
            if not self._send_step(step):
                raise Overloaded("the worker does not take steps")


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


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Run until the launcher ends the process."""
    logger = log.set_up("scheduler", boot.config.log_level, boot.config.log_format)
    inbox = Inbox(boot.directory, "scheduler")
    tokenizers = range(boot.config.tokenizer_workers)
    posts = Posts([Outbox(boot.directory, "tokenizer", i) for i in tokenizers])
    worker = Outbox(boot.directory, "worker")
    early: list[Any] = []
    ready: WorkerReady | None = None
    while ready is None:
        for message in inbox.receive(None):
            if isinstance(message, WorkerReady):
                ready = message
            else:
                early.append(message)
    state = make_state(boot.config, boot.source, ready.num_slots)
    scheduler = Scheduler(state, worker.send)
    facts = {"longest request": f"{state.max_request_tokens} tokens, prompt and output together"}
    if state.max_request_tokens < state.context_length:
        facts["longest request"] += (
            f": the KV pool ({ready.num_slots} slots) is smaller than the context ({state.context_length})"
        )
    lifeline.ready(facts, state.max_request_tokens)
    logger.debug("ready with %d slots", ready.num_slots)
    _serve(inbox, scheduler, posts, early)


def _serve(inbox: Inbox, scheduler: Scheduler, posts: Posts, batch: list[Any]) -> None:
    state, reporter = scheduler.state, Reporter()
    while True:
        for message in batch:
            scheduler.handle(message)
        scheduler.advance()
        outgoing, state.outgoing = state.outgoing, {}
        stats = reporter.due(state)
        if stats is not None:
            outgoing.setdefault(0, []).append(stats)
        for tokenizer, told in outgoing.items():
            for frame in frames(told):
                posts.send(tokenizer, frame)
        sent = posts.flush()
        timeout = 0.01 if not sent else (STATS_SECONDS if reporter.stale(state) else None)
        batch = inbox.receive(timeout)
