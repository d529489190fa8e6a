"""Random traffic through the scheduler: every answer is plain, every value is told once, nothing leaks."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from sapwood.srt import messages
from tests.simulation import VOCAB, World, random_prompt


def random_params(rng: random.Random, prompt: list[int]) -> dict[str, Any]:
    """What a request asks for: output, values of its prompt, both, or neither."""
    params: dict[str, Any] = {
        "max_tokens": rng.choice([0, 1, 3, 15, None]),
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(1000),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
    }
    if rng.random() < 0.35:
        params |= {"logprobs": 0, "logprob_start": rng.choice([0, 1, rng.randrange(60), len(prompt) - 1])}
    elif rng.random() < 0.2:
        params |= {"max_tokens": 0, "n": 1, "pooling": rng.choice(["last", "mean"])}
    return params


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic(seed: int) -> None:
    """Arrivals, ends, stops and cancels at random moments, in tiny pools."""
    rng = random.Random(seed)
    world = World(
        num_slots=rng.choice([64, 100, 300]),
        context=60,
        max_running_requests=rng.choice([1, 3, 8]),
        chunked_prefill_size=rng.choice([1, 5, 16, 64, -1]),
        schedule_policy=rng.choice(["lpm", "fcfs"]),
        disable_radix_cache=rng.random() < 0.2,
        disable_overlap_schedule=rng.random() < 0.3,
    )
    families = [[rng.randrange(2, VOCAB) for _ in range(30)] for _ in range(3)]
    send(world, rng, families, 45)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_over_long_prefixes(seed: int) -> None:
    """As above, where prefixes are long enough to be named in steps: the simulation checks each step's."""
    rng = random.Random(seed)
    world = World(
        num_slots=rng.choice([420, 700, 2500]),
        context=400,
        max_running_requests=rng.choice([3, 8, 16]),
        chunked_prefill_size=rng.choice([40, 64, 200, -1]),
        schedule_policy=rng.choice(["lpm", "fcfs"]),
        disable_radix_cache=rng.random() < 0.1,
        disable_overlap_schedule=rng.random() < 0.3,
    )
    trunk = [rng.randrange(2, VOCAB) for _ in range(150)]
    families = [trunk + [rng.randrange(2, VOCAB) for _ in range(150)] for _ in range(3)]
    send(world, rng, families, 330)
    if not world.state.config.disable_radix_cache:
        assert sum(len(step.shared) > 0 for step in world.steps) > 5


def send(world: World, rng: random.Random, families: list[list[int]], longest: int) -> None:
    """Traffic of prompts up to `longest` tokens; checks all answers."""
    cut: dict[int, dict[int, int | None]] = defaultdict(dict)
    live: list[int] = []
    for _ in range(150):
        if rng.random() < 0.35 and len(world.clients) < 40:
            prompt = random_prompt(rng, families, longest)
            if live and rng.random() < 0.3:
                # The next turn of a chat, asked while the last one may still be running.
                before = world.clients[rng.choice(live)]
                turns = [*messages.unpack(before.submit.ids).tolist(), *before.output.get(0, [])]
                prompt = [*turns, *prompt[-4:]][:longest]
            namespace = rng.choice(["", "", "x"])
            live.append(world.submit(prompt, namespace, **random_params(rng, prompt)))
        if live and rng.random() < 0.08:
            key = rng.choice(live)
            client = world.clients[key]
            if client.refused is None:
                running = set(range(client.submit.params.n)) - set(client.done)
                cut[key].update(dict.fromkeys(running))
            world.cancel(key)
        if live and rng.random() < 0.08:
            key = rng.choice(live)
            outputs = world.clients[key].output
            if outputs:
                choice = rng.choice(list(outputs))
                if outputs[choice]:
                    n = rng.randint(1, len(outputs[choice]))
                    if choice not in world.clients[key].done:
                        cut[key][choice] = n
                    world.stop_at(key, choice, n)
        if rng.random() < 0.03:
            world.ask("flush")
        if rng.random() < 0.5:
            world.scheduler.advance()
            world.collect()
        else:
            world.turn()
        if rng.random() < 0.4:
            world.answer()
    world.run()
    for key, client in world.clients.items():
        assert client.finished
        if client.refused is None:
            world.expect(key, cut[key])
    world.idle()
