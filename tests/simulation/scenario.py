"""What one seed stands for: a server's options, its traffic, and all that happens to it. Times are seconds on
the virtual clock, on which a step takes about STEP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sapwood.srt.messages import Grammar
from sapwood.srt.params import SamplingParams, Scheduling

STEP = 0.01


@dataclass(frozen=True, slots=True)
class Abort:
    """When a client hangs up. `when`: "overtaking" (its Cancel comes before its Submit), "timed" (`after`
    seconds), "admitted", "token" (with its output token number `after`), or "ended". `twice`: once more."""

    when: str
    after: float = 0.0
    twice: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. With `follows` it goes on where that one's conversation is then, else from `prompt` alone.

    `stops` has the output token at which a choice's stop string is complete; with `echo_stop` StopAt is sent
    twice. In the `fails`-th step that works for the request its row fails (0: in none).
    """

    at: float
    prompt: list[int]
    params: SamplingParams
    namespace: str = ""
    scheduling: Scheduling = field(default_factory=Scheduling)
    tokenizer: int = 0
    follows: int = -1
    stops: dict[int, int] = field(default_factory=dict)
    echo_stop: bool = False
    abort: Abort | None = None
    fails: int = 0
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class AboutProgram:
    """A question about a program; with `end` it is ended."""

    namespace: str
    tenant: str
    name: str
    end: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """The server and the kind of traffic. `gap` is the mean time between bursts of up to `burst` requests;
    `chaos` scales how often something unexpected happens; so many prefixes are `listed` before all else. With
    `repeats` requests come again, and are drawn with few seeds, some of which give few tokens, so that drafts
    are kept; an `eager` scheduler proposes what does not pay, and keeps hardly any grammar. `grammars` is the
    share of requests that have one; a token adds `token_cost` to the time of a step, over that of an empty
    one. `programs` is the share of requests that belong to one. The worker dies `deaths` times, the scheduler
    begins anew `rebuilds` times; `drain` ends what is left.
    """

    options: dict[str, Any]
    num_slots: int
    context: int
    requests: int
    gap: float
    burst: int = 1
    sharing: tuple[str, ...] = ("families", "tree", "chat", "same", "cold", "short")
    output: int = 8
    chaos: float = 1.0
    namespaces: tuple[str, ...] = ("",)
    tokenizers: int = 1
    delay: float = STEP / 5
    questions: int = 0
    deaths: int = 0
    rebuilds: int = 0
    listed: int = 0
    repeats: bool = False
    eager: bool = False
    grammars: float = 0.0
    token_cost: float = 0.0
    drain: bool = False
    programs: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation needs but its own random delays, which `seed` decides too."""

    seed: int
    shape: Shape
    arrivals: list[Arrival]
    questions: list[tuple[float, str | AboutProgram]] = field(default_factory=list)
    deaths: list[float] = field(default_factory=list)
    rebuilds: list[float] = field(default_factory=list)


def part(scenario: Scenario, keep: list[int]) -> Scenario:
    """The same with these arrivals only; what follows a left out one begins anew."""
    places = {old: new for new, old in enumerate(keep)}
    arrivals = [scenario.arrivals[i] for i in keep]
    kept = [replace(a, follows=places.get(a.follows, -1)) for a in arrivals]
    return replace(scenario, arrivals=kept)
