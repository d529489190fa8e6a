"""What the scheduler promises of a prompt whose last token is only judged: it gets its logprob, and is not
computed."""

from __future__ import annotations

import pytest

from sapwood.srt.scheduler.preemption import retract
from tests.simulation import World

JUDGED = {"logprobs": 0, "judges_last": True, "max_tokens": 0}


def prompt(n: int, seed: int = 0) -> list[int]:
    return [2 + (i * 7 + seed) % 47 for i in range(n)]


def verdict(world: World, key: int) -> tuple[int, str]:
    admitted = world.clients[key].admitted
    assert admitted is not None
    return admitted.verdict.matched, admitted.verdict.stopped


@pytest.mark.parametrize("chunk", [1, 7, 16, -1])
@pytest.mark.parametrize("start", [0, 1, 2, 30, 38, 39])
def test_a_last_token_that_is_only_judged_is_not_computed(chunk: int, start: int) -> None:
    world = World(chunked_prefill_size=chunk)
    matched = 0
    for _ in range(2):
        before = world.worker.computed
        key = world.submit(prompt(40), logprob_start=start, **JUDGED)
        world.run()
        world.expect(key)
        assert len(world.clients[key].reads) == 40 - max(1, start)
        assert world.worker.computed - before == 39 - matched
        assert world.state.tree.cached_tokens == 39
        world.idle()
        matched = max(0, start - 1)
    assert verdict(world, key)[0] == matched


def test_a_judged_token_is_nobodys_prefix() -> None:
    """What another has of it in the cache changes nothing, and it is not there for others."""
    world = World()
    world.submit(prompt(40), logprob_start=39, **JUDGED)
    world.run()
    longer = world.submit([*prompt(40), 3], max_tokens=1)
    world.run()
    assert world.worker.computed == 39 + 2
    assert verdict(world, longer)[0] == 39
    key = world.submit(prompt(40), logprob_start=39, **JUDGED)
    world.run()
    assert verdict(world, key) == (38, "last_token")
    world.expect(key)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts_that_judge(length: int) -> None:
    """A first token has no logprob: it is computed, as without `judges_last`."""
    world = World()
    key = world.submit(prompt(length), logprob_start=0, **JUDGED)
    world.run()
    world.expect(key)
    assert world.worker.computed == 1
    assert len(world.clients[key].reads) == length - 1
    world.idle()


@pytest.mark.parametrize("chunk", [1, 3, 16, -1])
@pytest.mark.parametrize("turns", [0, 1, 2, 7, 12, 13])
def test_one_that_judges_is_retracted_at_any_time(chunk: int, turns: int) -> None:
    """With a step of it in flight, its last one too: what was told is not told again."""
    world = World(num_slots=100, context=100, chunked_prefill_size=chunk)
    other = world.submit(prompt(20, 1), max_tokens=40, ignore_eos=True)
    key = world.submit(prompt(38, 3), logprob_start=4, **JUDGED)
    for _ in range(turns):
        world.turn()
    world.scheduler.advance()
    world.collect()
    sequence = world.state.sequences.get(key)
    if sequence is not None and sequence.row >= 0:
        retract(world.state, sequence.row)
        world.check()
    world.run()
    for each in (key, other):
        world.expect(each)
    world.idle()


@pytest.mark.parametrize("turns", range(6))
def test_cancel_while_a_last_token_is_judged(turns: int) -> None:
    world = World(num_slots=256, chunked_prefill_size=8)
    key = world.submit(prompt(40), logprob_start=3, **JUDGED)
    for _ in range(turns):
        world.turn()
    world.cancel(key)
    assert world.clients[key].finished
    world.run()
    world.idle()


def test_a_judged_prompt_may_fill_the_context() -> None:
    world = World(num_slots=64, context=48)
    full = world.submit(prompt(48), logprob_start=40, **JUDGED)
    over = world.submit(prompt(49), logprob_start=40, **JUDGED)
    world.run()
    world.expect(full)
    refused = world.clients[over].refused
    assert refused is not None
    assert refused.error.status == 400
