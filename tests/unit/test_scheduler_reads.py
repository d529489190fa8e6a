"""What the scheduler promises of prompts that are read: each value once, no output for max_tokens 0."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sapwood.srt import messages
from sapwood.srt.messages import Done
from sapwood.srt.scheduler import results
from tests.simulation import World

READ = {"logprobs": 0, "logprob_start": 0}
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30}


def prompt(n: int, seed: int = 0) -> list[int]:
    return [2 + (i * 7 + seed) % 47 for i in range(n)]


def verdict(world: World, key: int) -> tuple[int, str]:
    admitted = world.clients[key].admitted
    assert admitted is not None
    return admitted.verdict.matched, admitted.verdict.stopped


@pytest.mark.parametrize("chunk", [1, 7, 16, -1])
@pytest.mark.parametrize("start", [0, 1, 2, 30, 39, 40, 41])
def test_values_from_any_index_are_told_once(chunk: int, start: int) -> None:
    world = World(chunked_prefill_size=chunk)
    key = world.submit(prompt(40), logprobs=0, logprob_start=start, max_tokens=5)
    world.run()
    world.expect(key)
    assert len(world.clients[key].reads) == max(0, 40 - max(1, start))
    world.idle()


@pytest.mark.parametrize(
    ("start", "matched", "stopped"),
    [(0, 0, "logprobs"), (1, 0, "logprobs"), (2, 1, "logprobs"), (30, 29, "logprobs"), (39, 38, "logprobs")],
)
def test_the_cache_is_used_up_to_what_is_read(start: int, matched: int, stopped: str) -> None:
    world = World()
    world.submit(prompt(40), max_tokens=1)
    world.run()
    key = world.submit(prompt(40), logprobs=0, logprob_start=start)
    world.run()
    world.expect(key)
    assert verdict(world, key) == (matched, stopped)
    world.idle()


def test_a_start_at_the_end_of_the_prompt_reads_none_of_it() -> None:
    world = World()
    for _ in range(2):
        key = world.submit(prompt(40), logprobs=0, logprob_start=40)
        world.run()
        world.expect(key)
    assert verdict(world, key) == (39, "last_token")


def test_the_verdict_says_logprobs_only_if_the_tree_had_more() -> None:
    world = World()
    cold = world.submit(prompt(20, 1), **READ)
    world.run()
    assert verdict(world, cold) == (0, "cold")
    world.submit([*prompt(10, 1), 2, 2], max_tokens=1)
    world.run()
    diverged = world.submit([*prompt(10, 1), 2, 3, 4, 5], logprobs=0, logprob_start=12)
    world.run()
    assert verdict(world, diverged) == (11, "diverged")


def test_one_that_reads_all_of_its_prompt_waits_for_no_sibling() -> None:
    world = World(num_slots=1024)
    world.submit(prompt(60), **LONG)
    reading = world.submit([*prompt(60), 8], **READ, **LONG)
    plain = world.submit([*prompt(60), 9], **LONG)
    world.turn()
    assert world.state.sequences[reading].row >= 0
    assert world.state.sequences[plain].row < 0
    world.run()
    for key in (reading, plain):
        world.expect(key)
    world.idle()


def test_one_that_reads_the_end_of_its_prompt_waits_for_what_it_may_take() -> None:
    world = World(num_slots=1024)
    world.submit(prompt(60), **LONG)
    reading = world.submit([*prompt(60), 8], **{**READ, "logprob_start": 61}, **LONG)
    world.turn()
    assert world.state.sequences[reading].row < 0
    world.run()
    admitted = world.clients[reading].admitted
    assert admitted is not None
    assert admitted.verdict.matched == 60
    world.expect(reading)
    world.idle()


def test_a_prompt_that_is_read_is_cached_for_others() -> None:
    world = World()
    key = world.submit(prompt(40), **READ, max_tokens=0)
    world.run()
    world.expect(key)
    after = world.submit(prompt(40))
    world.run()
    assert verdict(world, after) == (39, "last_token")


@pytest.mark.parametrize("n", [1, 4])
def test_choices_share_the_values_of_their_prompt(n: int) -> None:
    world = World(num_slots=1024)
    key = world.submit(prompt(50), n=n, **READ, **LONG)
    world.run()
    world.expect(key)
    assert world.worker.computed == 50 + n * 29 + world.state.counters.surplus_tokens
    world.idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 16, -1])
def test_a_retraction_repeats_no_value(overlap: bool, chunk: int) -> None:
    world = World(num_slots=100, context=90, chunked_prefill_size=chunk, disable_overlap_schedule=not overlap)
    keys = [world.submit([i + 2] * 8, **READ, max_tokens=40, ignore_eos=True) for i in range(8)]
    world.run()
    for key in keys:
        world.expect(key)
    assert world.state.counters.retracted > 0
    world.idle()


def test_a_retracted_prompt_goes_on_where_its_values_ended() -> None:
    world = World(num_slots=100, context=100, chunked_prefill_size=3)
    world.submit(prompt(8), max_tokens=70, ignore_eos=True)
    for _ in range(4):
        world.turn()
    key = world.submit(prompt(64, 3), **READ, max_tokens=2)
    for _ in range(60):
        world.turn()
        if world.state.counters.retracted:
            break
    told = len(world.clients[key].reads)
    assert 0 < told < 63
    for _ in range(60):
        world.turn()
        if world.state.sequences[key].row >= 0:
            break
    start = next(s for step in reversed(world.steps) for s in step.admitted)
    assert start.read_from >= told + 1
    assert len(start.prefix) // 4 <= start.read_from - 1
    world.run()
    world.expect(key)
    world.idle()


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
@pytest.mark.parametrize("chunk", [4, 16, -1])
def test_the_whole_pool_for_a_prompt_that_is_cached_and_computed_again(
    pooling: str | None, chunk: int
) -> None:
    """Its tokens are needed twice: in the tree, from where they may be evicted, and by the row."""
    world = World(num_slots=64, context=200, chunked_prefill_size=chunk)
    world.submit(prompt(50), max_tokens=1)
    world.run()
    asked: dict[str, Any] = {"pooling": pooling} if pooling else READ
    for _ in range(2):
        key = world.submit(prompt(64), **asked, max_tokens=0)
        world.run(300)
        world.expect(key)
    world.idle()


@pytest.mark.parametrize("n", [1, 3, 12])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_max_tokens_0_computes_the_prompt_and_ends(n: int, length: int) -> None:
    world = World(max_running_requests=8)
    for matched in (0, length - 1):
        before = world.worker.computed
        key = world.submit(prompt(length), n=n, max_tokens=0)
        world.run()
        client = world.clients[key]
        assert client.done == {c: Done(key, c, 0, "length") for c in range(n)}
        assert verdict(world, key)[0] == matched
        assert world.worker.computed - before == length - matched
        assert world.state.tree.cached_tokens == length
        world.idle()


def test_max_tokens_0_needs_no_row_for_each_choice() -> None:
    world = World(num_slots=512, max_running_requests=8)
    running = [world.submit([i + 2] * 10, **LONG) for i in range(7)]
    for _ in range(3):
        world.turn()
    key = world.submit(prompt(10), n=8, max_tokens=0)
    for _ in range(3):
        world.turn()
    assert world.clients[key].finished
    assert not any(world.clients[k].finished for k in running)
    world.run()
    world.idle()


def test_a_prompt_may_fill_the_context_if_nothing_is_to_follow() -> None:
    world = World(num_slots=64, context=48)
    full = world.submit(prompt(48), max_tokens=0, **READ)
    over = world.submit(prompt(49), max_tokens=0)
    none = world.submit(prompt(48), max_tokens=None)
    world.run()
    world.expect(full)
    for key in (over, none):
        refused = world.clients[key].refused
        assert refused is not None
        assert refused.error.status == 400


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("asked", [READ, {}, {"pooling": "mean"}])
def test_cancel_while_a_prompt_is_read(turns: int, asked: dict[str, Any]) -> None:
    world = World(num_slots=256, chunked_prefill_size=8)
    key = world.submit(prompt(40), max_tokens=0, **asked)
    other = world.submit(prompt(30, 1), **READ, **LONG)
    for _ in range(turns):
        world.turn()
    world.cancel(key)
    assert world.clients[key].finished
    world.run()
    world.expect(other)
    world.idle()


def test_a_failed_row_tells_nothing_of_its_step() -> None:
    world = World(chunked_prefill_size=8)
    key = world.submit(prompt(20), max_tokens=0, **READ)
    world.turn()
    world.worker.fail_rows = {world.state.sequences[key].row}
    world.run()
    client = world.clients[key]
    assert client.done[0].reason == "error"
    assert sorted(client.reads) == list(range(1, 9))
    world.idle()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk", [1, 7, 16, -1])
def test_a_hidden_state_is_told_once(pooling: str, chunk: int) -> None:
    world = World(chunked_prefill_size=chunk)
    for _ in range(2):
        key = world.submit(prompt(40), pooling=pooling, max_tokens=0)
        world.run()
        world.expect(key)
    assert verdict(world, key) == ((39, "last_token") if pooling == "last" else (0, "pooling"))
    assert world.state.tree.cached_tokens == 40
    world.idle()


def test_a_retracted_mean_begins_anew() -> None:
    world = World(num_slots=100, context=100, chunked_prefill_size=3)
    running = world.submit(prompt(8), max_tokens=70, ignore_eos=True)
    for _ in range(4):
        world.turn()
    key = world.submit(prompt(64, 3), pooling="mean", max_tokens=0)
    world.run()
    assert world.state.counters.retracted > 0
    for each in (running, key):
        world.expect(each)
    world.idle()


@pytest.mark.parametrize("asked", [READ, {"pooling": "last"}, {"pooling": "mean"}])
def test_a_prompt_whose_last_chunk_is_in_flight_is_through_when_its_result_comes(
    asked: dict[str, Any],
) -> None:
    """Retracted at that moment, it ends while it waits; nothing is computed or told again."""
    late = 0
    for turns, length in itertools.product(range(1, 5), range(43, 49)):
        world = World(num_slots=100, context=100, chunked_prefill_size=3)
        running = world.submit(prompt(8), max_tokens=70, ignore_eos=True)
        for _ in range(turns):
            world.turn()
        key = world.submit(prompt(length, 3), max_tokens=0, **asked)
        while not world.clients[key].finished:
            world.scheduler.advance()
            world.collect()
            sequence = world.state.sequences[key]
            through = any(((s.keys == key) & (s.ends == length)).any() for s in world.state.in_flight)
            waits = sequence.pending and through
            world.answer()
            if waits:
                late += 1
                assert world.clients[key].finished
            world.check()
        world.run()
        for each in (running, key):
            world.expect(each)
        world.idle()
    assert late


def test_what_the_cache_saved_is_told_in_seconds() -> None:
    world = World()
    world.submit(prompt(40), max_tokens=1)
    world.run()
    each = world.state.counters.seconds_per_prompt_token
    assert each > 0
    key = world.submit(prompt(40), max_tokens=1)
    world.turn()
    admitted = world.clients[key].admitted
    assert admitted is not None
    assert admitted.saved == world.state.counters.seconds_saved == 39 * each


def test_a_long_prompt_is_told_in_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FRAME_WEIGHT", 256)
    world = World(num_slots=2000, context=2000, chunked_prefill_size=-1)
    key = world.submit(prompt(1000), max_tokens=1, **READ)
    world.scheduler.advance()
    world.collect()
    world.scheduler.handle(world.worker.run(world.sent.popleft()))
    told = [m for m in world.state.outgoing[0] if isinstance(m, messages.PromptRead)]
    assert max(len(m.logprobs) for m in told) == 256
    world.collect()
    world.run()
    world.expect(key)
