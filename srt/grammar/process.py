"""The grammar process: constraints of all tokenizers to grammars, each once, none at the others' expense.

tokenizer ──Compile, Forget──► calls ──new ones──► compiler ──► forks of the engine's process
    ▲                            │ ◄─────────────────┘
    └─────────Compiled───────────┴◄─ kept: what was asked for before
"""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from sapwood.srt import log
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.errors import Overloaded, Unavailable
from sapwood.srt.grammar.child import Outcome, Setup
from sapwood.srt.grammar.compiler import Compiler
from sapwood.srt.grammar.kept import Kept, content, tells_field
from sapwood.srt.grammar.turns import Turns
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import Compile, Compiled, Forget, GrammarStats
from sapwood.srt.orders import Boot, Drain
from sapwood.srt.params import Constraint

MAX_WAITING = 1024
"""So many calls may wait for an answer. Beyond that the party that has most of them loses its last."""
MAX_LANES = 4
STATS_SECONDS = 0.2
BUSY_SECONDS = 0.2
IDLE_SECONDS = 1.0
"""Between two looks at the clock. An answer and a message end a wait at once."""
_Call = tuple[int, int]
"""(tokenizer, its number of the call)."""


class Sender(Protocol):
    def send(self, *batch: Any) -> bool: ...


class _Caller(NamedTuple):
    party: str
    field: str
    """Where its request has the constraint."""


class _Work(NamedTuple):
    number: int
    constraint: Constraint
    callers: dict[_Call, _Caller]


class GrammarLoop:
    """All calls of all tokenizers; `outboxes` lead to these."""

    def __init__(
        self, whitespace: int, compiler: Compiler, outboxes: Sequence[Sender], server: Sender
    ) -> None:
        self._whitespace = whitespace
        self._compiler = compiler
        self._outboxes = outboxes
        self._server = server
        self._stats = GrammarStats()
        self._told = GrammarStats()
        self._told_at = 0.0
        self._kept = Kept()
        self._calls: dict[_Call, _Work] = {}
        self._waiting: Turns[_Call] = Turns()
        self._works: dict[int, _Work] = {}
        self._by_content: dict[bytes, _Work] = {}
        self._next = 0
        self._unsent: list[tuple[int, Compiled]] = []

    def run(self, inbox: Inbox, commands: queue.SimpleQueue[Any]) -> None:
        """Serve until there is a Drain among the commands."""
        while True:
            busy = bool(self._works or self._unsent or self._stats != self._told)
            self.handle(inbox.receive(BUSY_SECONDS if busy else IDLE_SECONDS))
            if not commands.empty() and isinstance(commands.get(), Drain):
                return

    def handle(self, batch: list[Any]) -> None:
        """Take messages in, and answer what can be answered by now."""
        for message in batch:
            if isinstance(message, Compile):
                self._compile(message)
            elif isinstance(message, Forget):
                self._forget((message.tokenizer, message.call))
        for number, outcome, seconds in self._compiler.finished():
            self._stats.seconds += seconds
            if outcome.error is None:
                self._stats.compiled += 1
            else:
                self._stats.refused += 1
            self._finish(self._works.pop(number), outcome)
        unsent, self._unsent = self._unsent, []
        for tokenizer, compiled in unsent:
            self._send(tokenizer, compiled)
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if (
            self._stats != self._told
            and now - self._told_at >= STATS_SECONDS
            and self._server.send(self._stats)
        ):
            self._told, self._told_at = msgspec.structs.replace(self._stats), now

    def _compile(self, message: Compile) -> None:
        constraint = message.constraint
        if constraint.whitespace is None:
            constraint = msgspec.structs.replace(constraint, whitespace=self._whitespace)
        call = (message.tokenizer, message.call)
        if (known := self._kept.find(constraint)) is not None:
            self._stats.known += 1
            self._answer(call, known)
        elif self._has_room(call, message.party):
            self._join(call, constraint, message.party)

    def _has_room(self, call: _Call, party: str) -> bool:
        """Whether it may wait; another call may have to give way to it."""
        self._waiting.put(call, party)
        if len(self._waiting) <= MAX_WAITING:
            return True
        late = self._waiting.shorten(party)
        self._forget(late)
        error = Overloaded(f"{MAX_WAITING} constraints wait to be compiled; try again later")
        self._answer(late, Outcome(error=error.info()))
        return late != call

    def _join(self, call: _Call, constraint: Constraint, party: str) -> None:
        key = content(constraint)
        work = self._by_content.get(key)
        if work is None:
            self._next += 1
            work = self._by_content[key] = self._works[self._next] = _Work(self._next, constraint, {})
            self._compiler.put(work.number, constraint, party)
        else:
            self._compiler.join(work.number, party)
        work.callers[call] = _Caller(party, constraint.field)
        self._calls[call] = work

    def _forget(self, call: _Call) -> None:
        self._waiting.drop(call)
        if (work := self._calls.pop(call, None)) is not None:
            del work.callers[call]
            if not work.callers:
                del self._works[work.number], self._by_content[content(work.constraint)]
                self._compiler.drop(work.number)

    def _finish(self, work: _Work, outcome: Outcome) -> None:
        self._kept.keep(work.constraint, outcome)
        del self._by_content[content(work.constraint)]
        for call, (party, field) in work.callers.items():
            if not tells_field(outcome) or field == work.constraint.field:
                del self._calls[call]
                self._waiting.drop(call)
                self._answer(call, outcome)
            else:  # what is wrong, or not enforced, is told with the request's own field
                self._join(call, msgspec.structs.replace(work.constraint, field=field), party)

    def _answer(self, call: _Call, outcome: Outcome) -> None:
        tokenizer, number = call
        self._send(tokenizer, Compiled(number, outcome.grammar, outcome.error))

    def _send(self, tokenizer: int, compiled: Compiled) -> None:
        if not self._outboxes[tokenizer].send(compiled):
            self._unsent.append((tokenizer, compiled))


def lanes() -> int:
    """How many constraints are compiled at once: one on two cores."""
    linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, min(MAX_LANES, cores // 2))


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Serve until a Drain, or the launcher hangs up."""
    log.set_up("grammar", boot.config.log_level, boot.config.log_format)
    source = boot.source
    inbox = Inbox(boot.directory, "grammar")
    outboxes = [Outbox(boot.directory, "tokenizer", i) for i in range(boot.config.tokenizer_workers)]
    server = Outbox(boot.directory, "server")
    setup = Setup(source.tokenizer_file or "", source.vocab_size, source.eos_ids)
    compiler = Compiler(setup, lanes(), inbox.watch)
    facts: dict[str, str] = {}
    try:
        lifeline.on_orphan = compiler.break_off
        if source.tokenizer_file is not None and not boot.config.skip_tokenizer_init:
            # It is ready before the worker is, as a rule; nobody waits for it.
            try:
                compiler.start()
                facts = {"constraints": f"{lanes()} compiled at a time"}
            except Unavailable as e:
                facts = {"constraints": e.message}
        lifeline.ready(facts)
        loop = GrammarLoop(boot.config.json_whitespace, compiler, outboxes, server)
        loop.run(inbox, lifeline.commands)
    finally:
        compiler.close()
        inbox.close()
        for outbox in (server, *outboxes):
            outbox.close()
