"""Runs of the simulation by seed: what one gave; for a failed one, how to repeat it, and a smaller one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.scenario import Scenario, part
from tests.simulation.seeds import of_seed
from tests.simulation.simulator import Simulation

MAX_TRIES = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `worst` is how near its bound on being overtaken any request came (1: at it)."""

    requests: int
    refused: int
    events: int
    steps: int
    tokens: int
    retracted: int
    drafted: int
    accepted: int
    seconds: float
    worst: float


class SimulationFailed(AssertionError):
    """Something did not hold; the text ends with the command that shows it again."""

    def __init__(self, run: Run, events: int, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}"
        super().__init__(f"seed {run.seed}, event {events}: {said}\nrepeat it: {run.command}")
        self.run = run
        self.events = events
        self.said = said


@dataclass(frozen=True, slots=True)
class Run:
    """A seed's scenario, or the part of it that has the arrivals `keep` only."""

    seed: int
    wide: bool = False
    keep: tuple[int, ...] | None = None

    @property
    def scenario(self) -> Scenario:
        whole = of_seed(self.seed, self.wide)
        return whole if self.keep is None else part(whole, list(self.keep))

    @property
    def command(self) -> str:
        """What to type for it."""
        words = f"python -m bench.scheduler simulate --seed {self.seed}"
        if self.wide:
            words += " --wide"
        if self.keep is not None:
            words += " --keep " + ",".join(map(str, self.keep))
        return words

    def go(
        self,
        thorough: bool = True,
        events: int | None = None,
        log: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Simulate it, or its first `events`. Raises SimulationFailed."""
        began = time.perf_counter()
        simulation = Simulation(self.scenario, thorough, log)
        try:
            simulation.run(events)
        except Exception as e:  # whatever it is, the scheduler's process would have died of it
            raise SimulationFailed(self, simulation.clock.happened, e) from e
        counters = simulation.state.counters
        return Outcome(
            requests=len(simulation.clients),
            refused=sum(client.refused is not None for client in simulation.clients.values()),
            events=simulation.clock.happened,
            steps=counters.steps,
            tokens=simulation.senders.tokens,
            retracted=counters.retracted,
            drafted=counters.drafted_tokens,
            accepted=counters.accepted_tokens,
            seconds=time.perf_counter() - began,
            worst=simulation.worst,
        )


def shrink(failed: SimulationFailed) -> SimulationFailed:
    """A run that fails too, with as few of the arrivals as can be found in MAX_TRIES."""
    best, run = failed, failed.run
    keep = list(run.keep if run.keep is not None else range(len(run.scenario.arrivals)))
    size, tries = max(1, len(keep) // 2), 0
    while tries < MAX_TRIES:
        at, before = 0, len(keep)
        while at < len(keep) and tries < MAX_TRIES:
            tries += 1
            less = keep[:at] + keep[at + size :]
            try:
                Run(run.seed, run.wide, tuple(less)).go()
                at += size
            except SimulationFailed as e:
                best, keep = e, less
        if size == 1 and len(keep) == before:
            break
        size = max(1, size // 2)
    return best
