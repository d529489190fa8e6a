"""The scheduler's promises, on the simulated worker, whose tokens depend on every slot of their prefix."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.cache.explain import Trace
from sapwood.srt.messages import Cancel, Submit
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler import policy
from tests.simulation import EOS, VOCAB, World, expected

LONG = {"ignore_eos": True, "max_tokens": 30}


def test_one_request_gives_the_plain_answer() -> None:
    world = World()
    key = world.submit([5, 6, 7], max_tokens=20)
    world.run()
    world.expect(key)
    world.idle()


def test_a_second_turn_hits_everything_but_the_last_token() -> None:
    world = World()
    first = world.submit(list(range(2, 22)), **LONG)
    world.run()
    history = [*range(2, 22), *world.clients[first].output[0]]
    second = world.submit([*history, 9, 9], **LONG)
    world.run()
    admitted = world.clients[second].admitted
    assert admitted is not None
    # The last output token was sampled but never computed.
    assert admitted.verdict.matched == len(history) - 1
    assert admitted.verdict.stopped == "diverged"
    world.expect(second)
    world.idle()


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    world = World()
    for _ in range(2):
        key = world.submit([3] * 10)
        world.run()
        world.expect(key)
    admitted = world.clients[key].admitted
    assert admitted is not None
    assert (admitted.verdict.matched, admitted.verdict.stopped) == (9, "last_token")


def test_siblings_share_a_prefix_that_is_being_computed() -> None:
    world = World(num_slots=1024)
    shared = [7] * 40
    keys = [world.submit([*shared, 10 + i], **LONG) for i in range(6)]
    world.run()
    for key in keys:
        world.expect(key)
    outputs = 6 * (30 - 1)
    assert world.worker.computed == 40 + 6 + outputs + world.state.counters.surplus_tokens


def test_a_sibling_takes_over_when_the_first_is_cancelled() -> None:
    world = World(num_slots=1024)
    first = world.submit([7] * 60, **LONG)
    second = world.submit([*([7] * 60), 8], **LONG)
    world.turn()
    assert world.clients[second].admitted is None
    world.cancel(first)
    world.run()
    world.expect(second)
    assert world.clients[first].done[0].reason == "abort"
    world.idle()


def test_n_choices_compute_the_prompt_once() -> None:
    world = World(num_slots=1024, max_running_requests=8)
    key = world.submit([4] * 50, n=5, **LONG)
    world.run()
    world.expect(key)
    assert world.worker.computed == 50 + 5 * 29 + world.state.counters.surplus_tokens
    world.idle()


def test_more_choices_than_rows() -> None:
    world = World(num_slots=1024, max_running_requests=2)
    key = world.submit([4] * 20, n=7, max_tokens=12)
    world.run()
    world.expect(key)
    world.idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 16, -1])
def test_retraction_keeps_answers(overlap: bool, chunk: int) -> None:
    world = World(num_slots=100, context=90, chunked_prefill_size=chunk, disable_overlap_schedule=not overlap)
    keys = [world.submit([i + 2] * 8, max_tokens=40, ignore_eos=True) for i in range(8)]
    world.run()
    for key in keys:
        world.expect(key)
    assert world.state.counters.retracted > 0
    world.idle()


def test_a_lone_row_that_holds_tokens_twice_still_has_the_whole_pool() -> None:
    """The next turn of a chat comes while the last one is generated: both compute the same tokens."""
    world = World(num_slots=100, context=100, chunked_prefill_size=4)
    prompt, params = [7] * 30, SamplingParams(max_tokens=21, ignore_eos=True, seed=5)
    answer = expected(prompt, params, 5, 0, 70)
    first = world.submit(prompt, max_tokens=21, ignore_eos=True)
    while len(world.clients[first].output.get(0, [])) < 12:
        world.turn()
    second = world.submit([*prompt, *answer[:20], *([9] * 10)], max_tokens=None, ignore_eos=True)
    world.run()
    world.expect(first)
    world.expect(second)
    assert world.clients[second].done[0].n == 40
    # Not for want of slots, of which there are enough for one: to give back those it held twice.
    assert world.state.counters.retracted == 1
    world.idle()


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    world = World(num_slots=64, context=200)
    long = world.submit([2] * 80)
    short = [world.submit([i + 2] * 4) for i in range(5)]
    world.run()
    refused = world.clients[long].refused
    assert refused is not None
    assert refused.error.status == 400
    assert "80" in refused.error.message
    assert "64" in refused.error.message
    for key in short:
        world.expect(key)


def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    world = World(num_slots=64, context=48)
    key = world.submit([2] * 40, max_tokens=None, ignore_eos=True)
    world.run()
    done = world.clients[key].done[0]
    assert (done.reason, done.n) == ("length", 8)


def test_whole_pool_for_one_request() -> None:
    world = World(num_slots=40, context=200)
    key = world.submit([2] * 10, max_tokens=None, ignore_eos=True)
    world.run()
    assert world.clients[key].done[0].n == 30
    world.expect(key)
    world.idle()


def test_stop_at_cuts_a_running_row() -> None:
    world = World()
    key = world.submit([5] * 5, **LONG)
    for _ in range(12):
        world.turn()
    seen = len(world.clients[key].output[0])
    assert seen > 4
    world.stop_at(key, 0, 3)
    done = world.clients[key].done[0]
    assert (done.reason, done.n) == ("stop", 3)
    world.run()
    # 5 prompt tokens and 2 of the 3 output tokens stay.
    assert world.state.tree.cached_tokens == 7
    world.idle()


def test_stop_at_after_the_end_is_ignored() -> None:
    world = World()
    key = world.submit([5] * 5, max_tokens=3, ignore_eos=True)
    world.run()
    world.stop_at(key, 0, 2)
    assert world.clients[key].done[0].n == 3
    world.idle()


def test_stop_at_reaches_a_retracted_choice() -> None:
    world = World(num_slots=100, context=90)
    keys = [world.submit([i + 2] * 8, max_tokens=40, ignore_eos=True) for i in range(8)]
    while not any(s.resumed for s in world.state.waiting.values()):
        world.turn()
    retracted = next(s for s in world.state.waiting.values() if s.resumed)
    world.stop_at(retracted.key, 0, 1)
    world.run()
    assert world.clients[retracted.key].done[0].n == 1
    for key in keys:
        if key != retracted.key:
            world.expect(key)
    world.idle()


def test_cancel_before_submit_is_remembered() -> None:
    world = World()
    world.scheduler.handle(Cancel(0))
    key = world.submit([2, 3], n=2)
    world.collect()
    assert {c: d.reason for c, d in world.clients[key].done.items()} == {0: "abort", 1: "abort"}
    world.idle()


@pytest.mark.parametrize("turns", range(12))
def test_cancel_at_any_moment(turns: int) -> None:
    world = World(num_slots=512)
    key = world.submit([5] * 40, n=3, **LONG)
    other = world.submit([6] * 20, **LONG)
    for _ in range(turns):
        world.turn()
    world.cancel(key)
    assert len(world.clients[key].done) == 3
    world.run()
    world.expect(other)
    world.idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cancelled_row_is_in_no_further_step(overlap: bool) -> None:
    world = World(max_running_requests=1, disable_overlap_schedule=not overlap)
    gone, waits = world.submit([5] * 6, **LONG), world.submit([6] * 6, **LONG)
    for _ in range(3):
        world.turn()
    seen = len(world.steps)
    world.cancel(gone)
    world.turn()
    assert len(world.steps) == seen + 1, "there is room for a step at once"
    step = world.steps[-1]
    assert messages.unpack(step.released).tolist() == [0]
    assert [start.row for start in step.admitted] == [0]
    assert world.state.sequences[waits].row == 0
    world.run()
    world.expect(waits)
    world.idle()


def test_a_failed_row_ends_alone_and_leaves_nothing_in_the_tree() -> None:
    world = World(num_slots=512)
    bad = world.submit([5] * 6, **LONG)
    good = world.submit([6] * 6, **LONG)
    world.scheduler.advance()
    row = world.state.sequences[bad].row
    world.worker.fail_rows = {row}
    world.turn()
    world.worker.fail_rows = set()
    world.run()
    done = world.clients[bad].done[0]
    assert done.reason == "error"
    assert done.error is not None
    assert world.state.tree.peek("", messages.pack([5] * 6), 6)[0] == 0
    world.expect(good)
    world.idle()


def test_namespaces_share_nothing() -> None:
    world = World()
    matched = []
    for namespace in ("a", "b", "a"):
        key = world.submit([9] * 20, namespace=namespace)
        world.run()
        admitted = world.clients[key].admitted
        assert admitted is not None
        matched.append(admitted.verdict.matched)
    assert matched == [0, 0, 19]


def test_without_the_radix_cache_nothing_is_kept() -> None:
    world = World(disable_radix_cache=True)
    for _ in range(2):
        key = world.submit([9] * 20, n=3)
        world.run()
        world.expect(key)
        admitted = world.clients[key].admitted
        assert admitted is not None
        assert (admitted.verdict.matched, admitted.verdict.stopped) == (0, "disabled")
        assert world.state.tree.cached_tokens == 0
    world.idle()


def test_a_decode_is_never_held_up_for_more_than_one_chunk() -> None:
    world = World(num_slots=2048, context=1000, chunked_prefill_size=16)
    running = world.submit([3] * 4, max_tokens=60, ignore_eos=True)
    for _ in range(5):
        world.turn()
    world.submit([4] * 500, max_tokens=2)
    row = world.state.sequences[running].row
    seen = len(world.steps)
    while running in world.state.requests:
        world.turn()
    for step in world.steps[seen : seen + 40]:
        assert row in messages.unpack(step.rows)
        assert int(messages.unpack(step.counts).sum()) <= 16


def test_overlap_plans_one_step_ahead() -> None:
    world = World()
    world.submit([3] * 4, **LONG)
    world.scheduler.advance()
    assert len(world.sent) == 2
    assert messages.unpack(world.sent[1].ids).tolist() == [-1]
    alone = World(disable_overlap_schedule=True)
    alone.submit([3] * 4, **LONG)
    alone.scheduler.advance()
    assert len(alone.sent) == 1


def test_a_row_in_its_prompt_waits_for_its_result() -> None:
    world = World(chunked_prefill_size=4)
    world.submit([3] * 12, **LONG)
    world.scheduler.advance()
    assert len(world.sent) == 1


def test_longest_cached_prefix_goes_first() -> None:
    world = World(num_slots=512, max_running_requests=1)
    world.submit([8] * 30, max_tokens=1)
    world.run()
    world.submit([2] * 10, max_tokens=2, ignore_eos=True)
    world.turn()
    cold = world.submit([4] * 10, max_tokens=1)
    warm = world.submit([*([8] * 30), 3], max_tokens=1)
    while world.clients[warm].admitted is None:
        world.turn()
    assert world.clients[cold].admitted is None
    world.run()


def test_only_those_who_are_concerned_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_slots=512, max_running_requests=1, chunked_prefill_size=64)
    running = world.submit([2] * 10, max_tokens=40, ignore_eos=True)
    world.turn()
    tree, looked_up = world.state.tree, 0
    trace = tree.trace

    def count(*arguments: Any) -> Trace:
        nonlocal looked_up
        looked_up += 1
        return trace(*arguments)

    monkeypatch.setattr(tree, "trace", count)
    waiting = [world.submit([*([2] * 9), 10 + i], max_tokens=1) for i in range(5)]
    others = [world.submit([3] * 8 + [10 + i], max_tokens=1) for i in range(50)]
    assert looked_up == 55
    for _ in range(4):
        first = world.state.queue.first()
        assert first is not None
        assert first.key == waiting[0]
        world.turn(check=False)
    assert looked_up == 55
    world.cancel(running)
    assert looked_up == 56, "only the insert: what ran put its output where nobody waits"
    world.run(check=False)
    assert all(world.clients[key].finished for key in waiting + others)
    assert looked_up < 55 * 8


def test_ageing_bounds_how_far_a_cold_request_is_overtaken() -> None:
    world = World(num_slots=4096, context=400, max_running_requests=1, chunked_prefill_size=16)
    hot = [8] * 100
    world.submit(hot, max_tokens=1)
    world.run()
    world.submit([2] * 4, max_tokens=2, ignore_eos=True)
    world.turn()
    cold = world.submit([4] * 10, max_tokens=1)
    overtaken = 0
    while world.clients[cold].admitted is None:
        while len(world.state.waiting) < 4:
            world.submit([*hot, *(random.Random(overtaken).choices(range(2, VOCAB), k=12))], max_tokens=1)
        world.turn(check=False)
        overtaken += 1
        assert overtaken < 200
    assert overtaken > 1


def test_requests_that_are_wholly_cached_cannot_starve_a_cold_one() -> None:
    world = World(num_slots=4096, context=400, max_running_requests=1, chunked_prefill_size=256)
    hot = [8] * 100
    world.submit(hot, max_tokens=1)
    world.run()
    world.submit([2] * 4, max_tokens=2, ignore_eos=True)
    world.turn()
    cold = world.submit([4] * 10, max_tokens=1)
    others: list[int] = []
    while world.clients[cold].admitted is None:
        while len(world.state.waiting) < 4:
            others.append(world.submit(hot, max_tokens=1))
        world.turn(check=False)
        assert len(others) < 300
    overtook = [key for key in others if world.clients[key].admitted is not None]
    # The budget of a step, and what one more admission brings.
    assert 10 < len(overtook) <= 256 // policy.LEAST + 1


def test_a_full_queue_refuses() -> None:
    world = World(max_queued_requests=3)
    keys = [world.submit([i + 2] * 4) for i in range(5)]
    world.collect()
    assert [world.clients[k].refused is not None for k in keys] == [False, False, False, True, True]
    refused = world.clients[keys[-1]].refused
    assert refused is not None
    assert refused.error.status == 429
    world.run()


def test_flush_keeps_what_runs() -> None:
    world = World()
    done = world.submit([5] * 20, max_tokens=2)
    world.run()
    key = world.submit([*([5] * 20), 6], **LONG)
    for _ in range(4):
        world.turn()
    world.ask("flush")
    world.run()
    world.expect(done)
    world.expect(key)
    world.idle()


def test_eos_and_stop_ids_end_and_are_counted() -> None:
    world = World()
    ended = 0
    for i in range(40):
        key = world.submit([i % 48 + 2, i], max_tokens=60)
        stop = world.submit([i % 48 + 2, i, 3], max_tokens=60, stop_token_ids=[7, 9])
        world.run()
        for k in (key, stop):
            world.expect(k)
            done = world.clients[k].done[0]
            if done.reason == "stop":
                ended += 1
                assert done.matched == world.clients[k].output[0][-1]
                assert done.matched in ((EOS,) if k == key else (EOS, 7, 9))
    assert ended > 20


def test_steps_of_plain_decodes_have_a_bounded_size() -> None:
    world = World(num_slots=2048)
    for i in range(8):
        world.submit([i + 2] * 10, max_tokens=100, ignore_eos=True)
    for _ in range(60):
        world.turn(check=False)
    sizes = {len(messages.encode([s])) for s in world.steps[20:50]}
    assert max(sizes) < 400


def test_seeds_are_drawn_when_none_is_given() -> None:
    world = World(random_seed=3)
    keys = [world.submit([5, 6], seed=None, max_tokens=10, ignore_eos=True) for _ in range(4)]
    assert len({world.state.requests[k].seed for k in keys}) == 4
    again = World(random_seed=3)
    assert again.submit([5, 6], seed=None) == keys[0]
    assert again.state.requests[keys[0]].seed == world.state.requests[keys[0]].seed


def test_prompt_arrays_do_not_alias_messages() -> None:
    world = World()
    message = Submit(0, 0, "r", messages.pack([2, 3]), SamplingParams(seed=1), "", 0.0)
    world.scheduler.handle(message)
    assert np.array_equal(world.state.sequences[0].ids, [2, 3])
