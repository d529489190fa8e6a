"""The worker's process: takes steps in order, each takes a random time, and it may die."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sapwood.srt import messages
from sapwood.srt.messages import DropGrammars, LoadGrammar, RowStart, Step
from tests.simulation.answers import Asked
from tests.simulation.clock import Channel, Clock
from tests.simulation.scenario import STEP, Scenario
from tests.simulation.worker import SimulatedWorker


@dataclass(frozen=True, slots=True)
class Death:
    """In the scheduler's inbox: a worker has died, says the launcher; the next one is number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Ready:
    """In the scheduler's inbox: worker number `index` can begin."""

    index: int
    num_slots: int


class Machine:
    """One worker after another. What it tells the scheduler goes to `take`."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        channel: Callable[[Callable[[bytes], None]], Channel],
        take: Callable[[Any], None],
        asked: Mapping[int, Asked],
    ) -> None:
        self._shape = scenario.shape
        self._clock = clock
        self._channel = channel
        self._take = take
        self._asked = asked
        self._rng = random.Random(scenario.seed ^ 0x3013)
        self.serves: dict[tuple[int, int], int] = {}
        """Whose each row is from which step on: the worker itself knows no keys."""
        self._generation = 0
        self.links: dict[int, Channel] = {}
        """The way to each worker, dead or alive."""
        self._install(self._shape.num_slots, 0)

    def die(self) -> None:
        """What is on its way to the worker is lost, what is on its way from it is not."""
        self._generation += 1
        death = Death(self._generation)
        self._waiting.clear()
        self._clock.after(self._pause(), lambda: self._take(death))
        slots = self._shape.num_slots
        if self._rng.random() < 0.3:
            slots = max(8, int(slots * self._rng.uniform(0.6, 1.5)))
        generation = self._generation
        self._clock.after(self._pause(), lambda: self._ready(generation, slots))

    def _pause(self) -> float:
        return self._rng.expovariate(1 / (5 * STEP))

    def _ready(self, generation: int, num_slots: int) -> None:
        if generation == self._generation:
            self._install(num_slots, None)
            ready = Ready(generation, num_slots)
            self._clock.after(self._rng.expovariate(1 / STEP), lambda: self._take(ready))

    def _install(self, num_slots: int, first_step: int | None) -> None:
        rows = self._shape.options.get("max_running_requests", 64)
        self._model = SimulatedWorker(num_slots, rows, self._shape.context)
        self._model.fails = self._fails
        self._model.token_cost = self._shape.token_cost
        self._first_step = first_step
        self._keys: dict[int, int] = {}
        self._waiting: deque[Any] = deque()
        generation = self._generation
        self.links[generation] = self._channel(lambda frame: self._receive(generation, frame))
        self._results = self._channel(lambda frame: self._take(*messages.decode(frame)))

    def _receive(self, generation: int, frame: bytes) -> None:
        if generation != self._generation:
            return
        idle = not self._waiting
        self._waiting += messages.decode(frame)
        if idle:
            self._start()

    def _start(self) -> None:
        """Do what takes no time, and begin with the next step."""
        generation = self._generation
        while self._waiting and not isinstance(self._waiting[0], Step):
            order = self._waiting.popleft()
            if isinstance(order, LoadGrammar):
                self._clock.after(self._pause(), partial(self._loaded, generation, order))
            else:
                assert isinstance(order, DropGrammars)
                self._model.drop(order)
        if not self._waiting:
            return
        self._clock.after(STEP * self._rng.uniform(0.2, 1.8), lambda: self._done(generation))

    def _loaded(self, generation: int, order: LoadGrammar) -> None:
        if generation == self._generation:
            loaded = self._model.load(order)
            if loaded is not None:
                self._results.send(messages.encode([loaded]))

    def _done(self, generation: int) -> None:
        if generation != self._generation:
            return
        step = self._waiting.popleft()
        if self._first_step is None:
            self._first_step = self._model.number = step.number
        for start in step.admitted:
            self._keys[start.row] = self.serves.pop((start.row, step.number))
        self._results.send(messages.encode([self._model.run(step)]))
        if self._waiting:
            self._start()

    def _fails(self, start: RowStart) -> bool:
        asked = self._asked[self._keys[start.row]]
        asked.steps += 1
        fails = asked.steps == asked.arrival.fails
        asked.failed |= fails
        return fails
