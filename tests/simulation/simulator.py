"""The real scheduler among simulated tokenizers, clients and a worker, on a virtual clock.

    clients, tokenizers ──Submit, StopAt, Cancel, Ask──► scheduler ──Step──► worker
                        ◄─────Tokens, Done, ...─────────           ◄─StepResult─

Every arrow takes a random time, and keeps the order of what one sender sends. The scheduler takes in all that
has come, as its process does, whenever it is not busy. One seed decides everything (scenario.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.errors import SapwoodError
from sapwood.srt.messages import Answer, Ask, Done, Step, StepResult, Submit
from sapwood.srt.scheduler.loop import Scheduler, make_state
from sapwood.srt.scheduler.state import State
from sapwood.srt.scheduler.step_cost import StepCost
from tests.simulation import checks
from tests.simulation.clients import Clients
from tests.simulation.clock import Channel, Clock
from tests.simulation.machine import Death, Machine, Ready
from tests.simulation.overtaking import Overtaking
from tests.simulation.programs import Programs
from tests.simulation.scenario import STEP, Scenario
from tests.simulation.senders import Senders
from tests.simulation.shown import shown
from tests.simulation.world import model


@dataclass(slots=True)
class Turn:
    """What the scheduler took in at one moment, and what it gave."""

    now: float
    inputs: list[Any]
    steps: list[Any]
    outputs: dict[int, list[Any]]


class _Free(StepCost):
    """Tokens cost next to nothing."""

    def marginal(self, tokens: int) -> float:
        return 0.001


class Rebuild:
    """In the scheduler's inbox: an invariant does not hold, says recovery.Guard."""

    def __repr__(self) -> str:
        return "Rebuild()"


class Simulation:
    """Runs one scenario; an AssertionError says what did not hold.

    `thorough`: check everything after every message, not only sums and what clients are told. `log` gets a
    line for each event, `tap` each turn of the scheduler.
    """

    def __init__(
        self,
        scenario: Scenario,
        thorough: bool = True,
        log: Callable[[str], None] | None = None,
        tap: Callable[[Turn], None] | None = None,
    ) -> None:
        shape = scenario.shape
        self.scenario = scenario
        self.clock = Clock()
        self.clients = Clients()
        self.worst = 0.0
        """How near its bound on being overtaken any request came: 1 is at it."""
        self._thorough = thorough
        self._log = log
        self._tap = tap
        self._rng = random.Random(scenario.seed ^ 0xC10C)
        state = make_state(make(**shape.options), model(shape.context), shape.num_slots, self._time)
        if shape.eager:
            state.drafts.gain_alone = state.drafts.gain_among_others = 0.0
            state.drafts.cost = _Free()
            state.grammars.most_unused = 1
        self.scheduler = Scheduler(state, self._send)
        self._overtaking = Overtaking(state) if thorough else None
        self.senders = Senders(scenario, self.clock, self.clients, self.channel, self._take)
        self._programs = Programs()
        self._machine = Machine(scenario, self.clock, self.channel, self._take, self.senders.asked)
        self._inbox: list[Any] = []
        self._steps: list[Any] = []
        """And orders about grammars."""
        self._outputs: dict[int, list[Any]] = {}
        self._worker = 0
        """The number of the last worker of which the scheduler knows."""
        self._waking = False
        self._busy_until = 0.0
        self._most = 20_000 + 3_000 * len(scenario.arrivals)

    @property
    def state(self) -> State:
        """The scheduler's present one."""
        return self.scheduler.state

    def channel(self, receive: Callable[[bytes], None]) -> Channel:
        """A way on which frames take time."""
        return Channel(self.clock, self._rng, self.scenario.shape.delay, receive)

    def run(self, events: int | None = None) -> None:
        """All of it, or the first `events`."""
        self.senders.begin()
        for when in self.scenario.deaths:
            self.clock.at(when, self._machine.die)
        for when in self.scenario.rebuilds:
            self.clock.at(when, lambda: self._take(Rebuild()))
        while events is None or self.clock.happened < events:
            if not self.clock.next():
                self._finish()
                return
            assert self.clock.happened < self._most, "there is no end of it"

    def _time(self) -> float:
        return self.clock.now

    def _say(self, what: str, message: Any) -> None:
        if self._log is not None:
            self._log(f"{self.clock.now:10.5f}  " + f"{what} {shown(message)}")

    def _take(self, message: Any) -> None:
        """Something has come to the scheduler's inbox."""
        self._inbox.append(message)
        self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._waking:
            self._waking = True
            self.clock.at(self._busy_until, self._wake)

    def _wake(self) -> None:
        self._waking = False
        batch, self._inbox = self._inbox, []
        for message in batch:
            self._say("scheduler <-", message)
            self._handle(message)
            self._collect()
        self.scheduler.advance()
        self._collect()
        self._busy_until = self.clock.now + self._rng.random() * STEP / 10
        over = self.state.deadlines.next()
        if over is not None:
            self.clock.at(over, lambda: self._deadline(over))
        self._post(batch)

    def _deadline(self, when: float) -> None:
        """The process waits for messages until the next deadline at most."""
        if self.state.deadlines.next() == when:
            self._wake_soon()

    def _handle(self, message: Any) -> None:
        before = self.state
        match message:
            case Death(index):
                self._lose(index)
            case Ready(index):
                # The launcher's word of the death comes another way, and may come later.
                self._lose(index)
                if index == self._worker:
                    self.scheduler.take_worker(message.num_slots)
                    self.senders.resized(self.state.max_request_tokens)
            case Rebuild():
                self.senders.lost()
                self._programs.lost()
                self.scheduler.rebuild(SapwoodError("begun anew").info())
            case _:
                if isinstance(message, Submit):
                    self.senders.taken_in(message, self.state.max_request_tokens)
                if isinstance(message, Ask) and message.what == "program":
                    self._programs.asked(self.state, message)
                if isinstance(message, StepResult):
                    self._programs.answered(message)
                self.scheduler.handle(message)
                if isinstance(message, Submit):
                    self._programs.taken_in(self.state, message)
        if self.state is not before and self._overtaking is not None:
            self.worst = max(self.worst, self._overtaking.worst)
            self._overtaking = Overtaking(self.state)

    def _lose(self, index: int) -> None:
        if index > self._worker:
            self._worker = index
            self.senders.lost()
            self._programs.lost()
            self.scheduler.lose_worker("the worker died")

    def _post(self, batch: list[Any]) -> None:
        """Send off what the scheduler gave in one turn."""
        steps, self._steps = self._steps, []
        outputs, self._outputs = self._outputs, {}
        for step in steps:
            self._machine.links[self._worker].send(messages.encode([step]))
        for tokenizer, told in outputs.items():
            self.senders.inboxes[tokenizer].send(messages.encode(told))
        if self._tap is not None and (batch or steps or outputs):
            self._tap(Turn(self.clock.now, batch, steps, outputs))

    def _send(self, step: Any) -> bool:
        self._say("scheduler ->", step)
        for start in step.admitted if isinstance(step, Step) else ():
            client, choice = self.clients.choices[int(self.state.rows.key[start.row])]
            assert choice == start.choice
            client.check_start(start)
            self._machine.serves[start.row, step.number] = client.submit.key
        if isinstance(step, Step):
            self._programs.sent(self.state, step)
        self._steps.append(step)
        return True

    def _collect(self) -> None:
        """Check what the scheduler tells, and its state."""
        outgoing, self.state.outgoing = self.state.outgoing, {}
        for message in (message for told in outgoing.values() for message in told):
            if isinstance(message, Answer):  # given before anything else that one turn has counted
                self._answered(message)
        for tokenizer, told in outgoing.items():
            self._outputs.setdefault(tokenizer, []).extend(told)
            for message in told:
                self._say(f"scheduler -> tokenizer {tokenizer}", message)
                if isinstance(message, Answer):
                    continue
                self.clients.tell(message)
                self._programs.heard(message)
                if isinstance(message, Done) and message.error is not None:
                    self.senders.failed(message)
        if self._thorough:
            checks.check_all(self.state, self.clients)
        else:
            checks.check_sums(self.state)

    def _answered(self, message: Answer) -> None:
        if self.senders.answered(message):
            self._programs.told(message)

    def _finish(self) -> None:
        self.senders.check_over()
        checks.check_all(self.state, self.clients)
        checks.check_idle(self.state)
        self._programs.check_over(self.state)
        if self._overtaking is not None:
            self.worst = max(self.worst, self._overtaking.worst)
