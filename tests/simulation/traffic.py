"""Draws the requests of a scenario: how they come, what they share, what they ask for, what befalls them."""

from __future__ import annotations

import random
from typing import Any

from sapwood.srt.messages import Grammar
from sapwood.srt.namespaces import LISTED
from sapwood.srt.params import SamplingParams, Scheduling
from tests.simulation.rules import Rules
from tests.simulation.scenario import STEP, Abort, Arrival, Shape
from tests.simulation.worker import VOCAB


class Traffic:
    """Draws arrivals one after the other."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape
        self.longest = min(shape.context, shape.num_slots)
        self.families = [self._tokens(self.longest // 2) for _ in range(3)]
        self.listed = self._listed()
        self.segments: dict[tuple[int, ...], list[int]] = {}
        self.asked: list[tuple[list[int], int, SamplingParams]] = []
        self.grammars = [self._grammar() for _ in range(6)] if shape.grammars else []

    def arrivals(self) -> list[Arrival]:
        rng, shape = self.rng, self.shape
        arrivals = [Arrival(0.0, ids, SamplingParams(max_tokens=0), LISTED) for ids in self.listed]
        now, burst = 0.0, 0
        for i in range(len(arrivals), len(arrivals) + shape.requests):
            if burst == 0:
                now += rng.expovariate(1 / shape.gap)
                burst = rng.randint(1, shape.burst)
            burst -= 1
            arrivals.append(self._arrival(now, i))
        return arrivals

    def _listed(self) -> list[list[int]]:
        """Prefixes, some of which begin with others, on at most a quarter of the slots; families begin so."""
        rng, shape = self.rng, self.shape
        most = min(self.longest // 2, shape.num_slots // 4 // max(1, shape.listed))
        found: list[list[int]] = []
        for i in range(shape.listed if most > 2 else 0):
            before = found[-1][: most // 2] if found and rng.random() < 0.5 else []
            found.append(before + self._tokens(rng.randint(1, most - len(before))))
            self.families[i % 3] = [*found[-1], *self.families[i % 3]][: self.longest // 2 + 1]
        return found

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(2, VOCAB) for _ in range(n)]

    def _arrival(self, now: float, i: int) -> Arrival:
        rng, shape = self.rng, self.shape
        chaos = shape.chaos
        prompt, follows = self._prompt(i)
        params = self._params(len(prompt))
        if shape.repeats:
            if self.asked and rng.random() < 0.5:
                prompt, follows, params = rng.choice(self.asked)
            self.asked.append((prompt, follows, params))
        stops: dict[int, int] = {}
        if chaos and params.max_tokens != 0 and rng.random() < 0.25:
            stops = {c: min(1 + int(rng.expovariate(0.2)), self.longest) for c in range(params.n)}
        return Arrival(
            at=now,
            prompt=prompt,
            params=params,
            namespace=rng.choice(shape.namespaces),
            scheduling=self._scheduling(),
            tokenizer=rng.randrange(shape.tokenizers),
            follows=follows,
            stops=stops,
            echo_stop=rng.random() < 0.2,
            abort=self._abort() if rng.random() < 0.15 * chaos else None,
            fails=rng.randint(1, 6) if rng.random() < 0.03 * chaos else 0,
            grammar=rng.choice(self.grammars) if shape.grammars and rng.random() < shape.grammars else None,
        )

    def _grammar(self) -> Grammar:
        """With forced text in some places, and an end in some."""
        rng = self.rng
        end = rng.choice([1, rng.randint(2, 40), 1000, 1000])
        forced: dict[int, int] = {}
        place = rng.choice([0, rng.randrange(6)])
        while place < min(end, self.longest) and rng.random() < 0.9:
            run = rng.choice([1, 2, 5, 12])
            forced |= {at: rng.randrange(2, VOCAB) for at in range(place, place + run)}
            place += run + rng.randint(1, 8)
        return Rules(forced, rng.randint(0, 8), end, rng.random() < 0.1 * self.shape.chaos).grammar()

    def _prompt(self, i: int) -> tuple[list[int], int]:
        rng, longest = self.rng, self.longest
        kind = rng.choice(self.shape.sharing)
        own = self._tokens(rng.randint(1, 12))
        if rng.random() < 0.01 * self.shape.chaos:
            return self._tokens(longest + rng.randint(0, 3)), -1
        prompt: list[int]
        match kind:
            case "families":
                base = rng.choice(self.families)
                prompt = base[: rng.randint(0, len(base))] + own
            case "tree":
                prompt = []
                path: tuple[int, ...] = ()
                while len(prompt) < longest - 12 and rng.random() < 0.8:
                    path = (*path, min(int(rng.expovariate(1.0)), 5))
                    if path not in self.segments:
                        self.segments[path] = self._tokens(rng.randint(2, 8))
                    prompt = prompt + self.segments[path]
                prompt = prompt + own[: rng.randint(1, 3)]
            case "chat":
                if i and rng.random() < 0.7:
                    return own[:4], rng.randrange(max(0, i - 10), i)
                prompt = self.families[0][:6] + own
            case "short":
                prompt = own
            case "same":
                prompt = rng.choice(self.families)[: max(1, longest // 2)]
            case _:
                prompt = self._tokens(rng.randint(1, max(1, longest // 2)))
        return prompt[:longest], -1

    def _params(self, length: int) -> SamplingParams:
        rng = self.rng
        lengths = [None, 0, 1, *[rng.randint(1, 2 * self.shape.output) for _ in range(12)]]
        wanted: dict[str, Any] = {
            "max_tokens": rng.choice(lengths),
            "n": rng.choice([1] * 8 + [2, 3]),
            "ignore_eos": rng.random() < (0.4 if self.shape.output < self.longest else 0.8),
            "seed": rng.randrange(1 << 40) if rng.random() < 0.8 else None,
            "repetition_penalty": rng.choice([1.0, 1.0, 1.0, 1.2]),
            "stop_token_ids": [rng.randrange(VOCAB)] if rng.random() < 0.1 else [],
        }
        if self.shape.repeats:
            wanted["seed"] = rng.choice([3, -1, -2])
        kind = rng.random()
        if kind < 0.08:
            wanted |= {"logprobs": 0, "logprob_start": rng.choice([0, 1, rng.randrange(60), length - 1])}
        elif kind < 0.12:
            wanted |= {"logprobs": 2}
        elif kind < 0.17:
            wanted |= {"max_tokens": 0, "n": 1, "pooling": rng.choice(["last", "mean"])}
        elif kind < 0.22:
            start = rng.choice([0, rng.randrange(60), length - 1])
            wanted |= {"max_tokens": 0, "n": 1, "logprobs": 0, "logprob_start": start, "judges_last": True}
        return SamplingParams(**wanted)

    def _scheduling(self) -> Scheduling:
        rng, options = self.rng, self.shape.options
        by_priority = "priority" in (options.get("schedule_policy"), options.get("radix_eviction_policy"))
        tenant = rng.choice(["loud"] * 6 + ["a", "b", "c"])
        priority = rng.randint(-2, 3) if by_priority else 0
        keep = rng.choice([0.0, 0.0, 0.0, rng.uniform(1, 300) * STEP])
        patience = rng.uniform(1, 100) * STEP if rng.random() < 0.05 * self.shape.chaos else None
        return Scheduling(tenant, priority, keep, patience)

    def _abort(self) -> Abort:
        rng = self.rng
        when = rng.choice(["overtaking", "timed", "timed", "admitted", "token", "token", "ended"])
        after = float(rng.randint(1, 8)) if when == "token" else rng.expovariate(1 / (10 * STEP))
        return Abort(when, after, rng.random() < 0.2)
