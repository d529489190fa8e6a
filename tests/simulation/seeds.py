"""Which scenario a seed stands for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec

from sapwood.srt.namespaces import LISTED
from tests.simulation.scenario import STEP, AboutProgram, Arrival, Scenario, Shape
from tests.simulation.traffic import Traffic

POLICIES = ("lpm", "fcfs", "dfs-weight", "lof", "priority", "fair")
EVICTIONS = ("lru", "lfu", "slru", "priority")
SHARINGS = ("families", "tree", "chat", "same", "cold", "short")


def of_seed(seed: int, wide: bool = False) -> Scenario:
    """The scenario of a seed; a `wide` one has more rows and requests, and fewer accidents."""
    rng = random.Random(seed)
    shape = _with_drafts(seed, _wide_shape(rng) if wide else _shape(rng))
    return fill(seed, _with_programs(seed, shape))


def fill(seed: int, shape: Shape) -> Scenario:
    """The traffic of this shape that the seed gives."""
    rng = random.Random(seed ^ 0x5EED)
    arrivals = Traffic(rng, shape).arrivals()
    end = max((a.at for a in arrivals), default=0.0) + 20 * STEP
    kinds = ("flush", "state", "check", "tree", "explain", "tokenize")
    questions: list[tuple[float, str | AboutProgram]]
    questions = sorted((rng.uniform(0, end), rng.choice(kinds)) for _ in range(shape.questions))
    deaths = sorted(rng.uniform(0, end) for _ in range(shape.deaths))
    rebuilds = sorted(rng.uniform(0, end) for _ in range(shape.rebuilds))
    if shape.programs:
        arrivals = _in_programs(random.Random(seed ^ 0x9806), shape, arrivals)
        questions += _about_programs(random.Random(seed ^ 0xA5C), arrivals, end)
    return Scenario(seed, shape, arrivals, questions, deaths, rebuilds)


def _with_programs(seed: int, shape: Shape) -> Shape:
    rng = random.Random(seed ^ 0x9706)
    timeout = STEP * rng.choice([1.0, 20.0, 100.0, 1e6])
    share = rng.choice([0.0, 0.3, 1.0])
    return replace(shape, options=shape.options | {"program_timeout": timeout}, programs=share)


def _in_programs(rng: random.Random, shape: Shape, arrivals: list[Arrival]) -> list[Arrival]:
    """Some of the requests belong to programs: what follows in a chat to that of its last turn."""
    names = [f"p{i}" for i in range(rng.choice([1, 3, 12]))]
    found: list[Arrival] = []
    for arrival in arrivals:
        program = ""
        if arrival.namespace != LISTED and rng.random() < shape.programs:
            before = found[arrival.follows].scheduling.program if arrival.follows >= 0 else ""
            program = before or rng.choice(names)
        scheduling = msgspec.structs.replace(arrival.scheduling, program=program)
        found.append(replace(arrival, scheduling=scheduling))
    return found


def _about_programs(
    rng: random.Random, arrivals: list[Arrival], end: float
) -> list[tuple[float, str | AboutProgram]]:
    asked: list[tuple[float, str | AboutProgram]] = []
    for arrival in arrivals:
        place = arrival.scheduling
        if place.program and rng.random() < 0.2:
            about = AboutProgram(arrival.namespace, place.tenant, place.program, rng.random() < 0.5)
            asked.append((min(end, arrival.at + rng.expovariate(1 / (10 * STEP))), about))
    return asked


def _shape(rng: random.Random) -> Shape:
    long = rng.random() < 0.1
    context = 400 if long else rng.choice([24, 60, 60, 120])
    slots = {
        "below": int(context * rng.uniform(0.5, 1.0)),
        "storm": context + rng.randint(0, 10),
        "small": int(context * rng.uniform(1.5, 4.0)),
        "roomy": context * rng.randint(8, 40),
    }
    options = {
        "max_running_requests": rng.choice([1, 2, 3, 8, 16, 16]),
        "chunked_prefill_size": rng.choice([40, 64, 200, -1] if long else [1, 5, 16, 64, -1]),
        "schedule_policy": rng.choice(POLICIES),
        "schedule_low_priority_values_first": rng.random() < 0.3,
        "schedule_conservativeness": rng.choice([0.01, 0.3, 1.0, 3.0]),
        "radix_eviction_policy": rng.choice(EVICTIONS),
        "disable_radix_cache": rng.random() < 0.15,
        "disable_overlap_schedule": rng.random() < 0.3,
        "max_queued_requests": rng.choice([4] + [4096] * 7),
        "queue_timeout": rng.choice([None, None, None, rng.uniform(2, 100) * STEP]),
        "restart_worker": True,
        "random_seed": rng.randrange(1000),
    }
    return Shape(
        options=options,
        num_slots=max(8, slots[rng.choice(["below", "storm", "storm", "small", "small", "roomy"])]),
        context=context,
        requests=rng.choice([10, 30, 40, 60, 120]),
        gap=STEP * rng.choice([0.1, 0.5, 2.0, 8.0]),
        burst=rng.choice([1, 1, 4, 20, 150]),
        sharing=rng.choice([SHARINGS, *((kind,) for kind in SHARINGS)]),
        output=rng.choice([1, 5, 12, context, context]),
        chaos=rng.choice([0.0, 0.5, 1.0, 1.0, 2.0]),
        namespaces=rng.choice([("",), ("",), ("", "", "salt:a"), ("key:a", "key:b", "key:c")]),
        tokenizers=rng.choice([1, 1, 2]),
        delay=STEP * rng.choice([0.01, 0.2, 1.0, 5.0]),
        questions=rng.choice([0, 3, 10]),
        deaths=rng.choice([0, 0, 0, 0, 1, 2]),
        rebuilds=rng.choice([0, 0, 0, 0, 0, 1]),
        drain=rng.random() < 0.15,
        listed=rng.choice([0, 0, 0, 1, 3]),
    )


def _with_drafts(seed: int, shape: Shape) -> Shape:
    rng = random.Random(seed ^ 0xD2AF)
    options: dict[str, Any] = {
        "speculative_algorithm": rng.choice(["auto", "auto", "auto", "radix", "ngram", "none"]),
        "speculative_num_draft_tokens": rng.choice([1, 4, 16, 16]),
    }
    eager = rng.random() < 0.5
    if eager:
        options["chunked_prefill_size"] = rng.choice([16, 64, -1])
    return replace(
        shape,
        num_slots=shape.num_slots * (6 if eager and rng.random() < 0.7 else 1),
        output=max(shape.output, 12) if eager else shape.output,
        options=shape.options | options,
        gap=shape.gap * (4 if eager else 1),
        repeats=rng.random() < 0.6,
        eager=eager,
        grammars=rng.choice([0.0, 0.0, 0.3, 0.8]),
        token_cost=rng.choice([0.003, 0.02, 0.2, 1.0]),
    )


def _wide_shape(rng: random.Random) -> Shape:
    context = 64
    options = {
        "max_running_requests": rng.choice([32, 64]),
        "chunked_prefill_size": rng.choice([64, 128, -1]),
        "schedule_policy": rng.choice(POLICIES),
        "radix_eviction_policy": rng.choice(EVICTIONS),
        "random_seed": rng.randrange(1000),
        "max_queued_requests": rng.choice([64, 4096, 4096, 4096]),
    }
    return Shape(
        options=options,
        num_slots=context * rng.choice([8, 16, 40]),
        context=context,
        requests=rng.choice([500, 1000, 2000]),
        gap=STEP * rng.choice([0.1, 0.2, 0.5]),
        burst=rng.choice([1, 4, 20, 300]),
        sharing=rng.choice([SHARINGS, *((kind,) for kind in SHARINGS)]),
        output=rng.choice([3, 6]),
        chaos=rng.choice([0.0, 0.3]),
        namespaces=rng.choice([("",), ("", "", "salt:a"), ("key:a", "key:b", "key:c")]),
        questions=rng.choice([0, 4]),
    )
