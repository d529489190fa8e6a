"""Drafts change no answer: whatever is proposed, wherever it comes from, and whatever befalls its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.config import make
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler import drafts, sources
from sapwood.srt.scheduler.acceptance import Rates, Source, agreement, expected, worthwhile
from sapwood.srt.scheduler.fairness import OUTPUT_WEIGHT
from sapwood.srt.scheduler.preemption import retract
from sapwood.srt.scheduler.sources import MAX_IDS, MAX_NAMESPACES, Recent
from sapwood.srt.scheduler.step_cost import FIRST, StepCost
from tests.simulation import World, expected as plain_answer
from tests.simulation.answers import _values
from tests.simulation.clients import check_logprobs

LONG = {"ignore_eos": True, "max_tokens": 60}
PROMPT = [3, 4, 5, 6, 7]


def eager(**options: Any) -> World:
    """A world in which everything that is found is proposed."""
    world = World(**{"num_slots": 2000, "context": 200, **options})
    world.state.drafts.gain_alone = world.state.drafts.gain_among_others = 0.0
    world.state.drafts.rates.of[:] = [1.0, 0.9, 0.9, 0.9]
    return world


def drafted(world: World) -> int:
    """Steps with drafts."""
    return sum(bool(step.drafts) for step in world.steps)


def until_in_flight(world: World, key: int) -> int:
    """Turn until a draft of the request is in flight; its row."""
    for _ in range(200):
        world.scheduler.advance()
        world.collect()
        row = world.state.sequences[key].row
        if world.state.rows.proposed[row]:
            return row
        world.answer()
    raise AssertionError("nothing was proposed")


def warm(world: World, **params: Any) -> int:
    """Ask once, then again; the key of the one that runs now."""
    world.submit(PROMPT, **{**LONG, **params})
    world.run()
    return world.submit(PROMPT, **{**LONG, **params})


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", ["none", "auto", "radix", "ngram"])
def test_a_repeated_request_is_drafted_from_the_tree(algorithm: str, overlap: bool) -> None:
    world = World(
        num_slots=2000,
        context=200,
        speculative_algorithm=algorithm,
        disable_overlap_schedule=not overlap,
    )
    key = warm(world)
    before = world.state.counters.steps
    world.run()
    world.expect(key)
    done, steps = world.clients[key].done[0], world.state.counters.steps - before
    if algorithm in ("auto", "radix"):
        assert done.drafted == done.accepted > 50
        assert steps < 12
    else:
        assert (done.drafted, drafted(world)) == (0, 0)
        assert steps == 60
    stats = world.state.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (done.drafted, done.accepted)
    world.idle()


@pytest.mark.parametrize("seed", [-1, -2, -3])
@pytest.mark.parametrize("algorithm", ["auto", "radix", "ngram"])
def test_half_right_drafts_give_the_plain_answer(algorithm: str, seed: int) -> None:
    """Below seed 0 there are two tokens: drafts are right now and then, of one row and of several."""
    world = eager(speculative_algorithm=algorithm)
    for _ in range(3):
        keys = [
            world.submit([i + 2, *PROMPT], seed=seed, n=1 + i % 3, logprobs=0, max_tokens=50)
            for i in range(4)
        ]
        world.run()
        for key in keys:
            world.expect(key)
            for choice, output in world.clients[key].output.items():
                check_logprobs(world.clients[key], _values(world.clients[key].prompt, output), choice)
    counters = world.state.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    done = [d for client in world.clients.values() for d in client.done.values()]
    assert sum(d.drafted for d in done) == counters.drafted_tokens
    assert sum(d.accepted for d in done) == counters.accepted_tokens
    world.idle()


def test_no_draft_goes_beyond_the_limit() -> None:
    world = eager()
    key = warm(world, max_tokens=23)
    world.run()
    world.expect(key)
    for step in world.steps:
        starts, counts = messages.unpack(step.starts), messages.unpack(step.counts)
        # The last token is drawn, but never computed.
        assert (starts + counts <= len(PROMPT) + 22).all()


def test_a_retracted_draft_is_taken_in_where_it_waits() -> None:
    world = eager()
    key = warm(world)
    row = until_in_flight(world, key)
    length = int(world.state.rows.length[row])
    retract(world.state, row)
    world.check()
    sequence = world.state.sequences[key]
    assert sequence.pending
    while sequence.pending:
        world.answer()
        world.check()
    assert len(sequence.ids) > length + 2
    world.run()
    world.expect(key)
    assert world.clients[key].done[0].accepted > 40
    world.idle()


def test_all_that_is_generated_counts_for_its_tenant() -> None:
    """The tokens of a row that was retracted meanwhile too, and the first ones of all choices."""
    world = eager(schedule_policy="fair")
    policy: Any = world.state.queue._policy
    key = warm(world)
    row = until_in_flight(world, key)
    used, output = int(policy._used[0]), world.state.counters.output_tokens
    retract(world.state, row)
    while world.state.sequences[key].pending:
        world.answer()
    come = world.state.counters.output_tokens - output
    assert come > 2
    assert policy._used[0] - used == OUTPUT_WEIGHT * come
    world.run()
    used = int(policy._used[0])
    forked = world.submit([9, 9, 8], n=3, max_tokens=1)
    world.run()
    world.expect(forked)
    assert policy._used[0] - used == 3 + OUTPUT_WEIGHT * 3


def test_stop_at_inside_a_kept_draft() -> None:
    world = eager()
    key = warm(world)
    until_in_flight(world, key)
    before = len(world.clients[key].output.get(0, []))
    while len(world.clients[key].output.get(0, [])) < before + 4:
        world.answer()
    n = len(world.clients[key].output[0]) - 2
    world.stop_at(key, 0, n)
    assert (world.clients[key].done[0].reason, world.clients[key].done[0].n) == ("stop", n)
    world.run()
    world.idle()
    again = world.submit(PROMPT, **LONG)
    world.run()
    world.expect(again)


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_an_end_while_a_draft_is_in_flight(how: str) -> None:
    world = eager()
    key = warm(world)
    until_in_flight(world, key)
    n = len(world.clients[key].output[0])
    if how == "stop":
        world.stop_at(key, 0, n)
    else:
        world.cancel(key)
    world.check()
    surplus = world.state.counters.surplus_tokens
    world.run()
    assert world.clients[key].done[0].n == n
    assert world.state.counters.surplus_tokens > surplus
    world.idle()


@pytest.mark.parametrize("stop_id", [False, True])
def test_an_end_inside_a_draft_cuts_it(stop_id: bool) -> None:
    """A stop id is the scheduler's own: the worker goes on to draw what comes after it."""
    world = eager()
    world.submit(PROMPT, **LONG)
    world.run()
    answer = world.clients[0].output[0]
    late = next(token for token in answer[20:] if token not in answer[:20])
    key = world.submit(PROMPT, **{**LONG, **({"stop_token_ids": [late]} if stop_id else {"max_tokens": 33})})
    world.run()
    world.expect(key)
    done = world.clients[key].done[0]
    assert done.reason == ("stop" if stop_id else "length")
    assert done.n == (answer.index(late) + 1 if stop_id else 33)
    world.idle()


def test_others_go_on_while_a_row_waits() -> None:
    world = World(num_slots=4000, context=400)
    world.submit(PROMPT, ignore_eos=True, max_tokens=200)
    world.run()
    other = world.submit([9, 9, 8], ignore_eos=True, max_tokens=200, seed=9)
    for _ in range(6):
        world.turn()
    repeated = world.submit(PROMPT, ignore_eos=True, max_tokens=200)
    row = until_in_flight(world, repeated)
    row_of_other = world.state.sequences[other].row
    while repeated in world.state.sequences:
        known = len(world.steps)
        world.turn()
        new = world.steps[known:]
        # Not one step is without it, but when all rows waited for their results.
        assert all(row_of_other in messages.unpack(step.rows) for step in new)
    assert row_of_other != row
    world.run()
    for key in (other, repeated):
        world.expect(key)
    assert world.clients[repeated].done[0].accepted > 100
    assert world.clients[other].done[0].drafted == 0


def test_nobody_is_retracted_for_a_draft_and_none_is_made_when_slots_are_short() -> None:
    retracted = []
    for algorithm in ("none", "auto"):
        world = eager(num_slots=150, context=140, speculative_algorithm=algorithm)
        for _ in range(2):
            keys = [world.submit([i + 2] * 8, max_tokens=40, ignore_eos=True, seed=-1) for i in range(8)]
            world.run()
            for key in keys:
                world.expect(key)
        retracted.append(world.state.counters.retracted)
        world.idle()
    assert world.state.counters.drafted_tokens > 0
    assert retracted[1] <= retracted[0]


def test_rows_in_the_next_step_find_their_slots() -> None:
    """What is left of the pool is less than a draft: it is cut to what no row needs."""
    world = eager(num_slots=60, context=60)
    world.submit(PROMPT, ignore_eos=True, max_tokens=25)
    world.run()
    keys = [world.submit(PROMPT, ignore_eos=True, max_tokens=25) for _ in range(2)]
    world.run()
    for key in keys:
        world.expect(key)
    assert world.state.counters.retracted == 0
    assert world.state.counters.drafted_tokens > 0
    world.idle()


def test_what_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is always wrong costs a few drafts, ever further apart; then rates say that none pays."""
    monkeypatch.setattr(sources, "own", lambda ids, most: np.full(most, 49, np.int32))
    world = World(num_slots=4000, context=2000, speculative_algorithm="ngram")
    key = world.submit(PROMPT, ignore_eos=True, max_tokens=1500, seed=-1)
    world.run(check=False)
    world.expect(key)
    done = world.clients[key].done[0]
    assert done.accepted == 0
    assert 0 < done.drafted < 30
    assert drafted(world) < 8


def test_what_does_not_pay_is_noted_and_learnt_from() -> None:
    """Among others a draft must bring more: the first one is only compared with what comes."""
    world = World(num_slots=4000, context=400)
    world.state.drafts.rates.of[Source.PATH] = 0.5
    world.submit(PROMPT, ignore_eos=True, max_tokens=150)
    world.run()
    other = world.submit([9, 9, 8], ignore_eos=True, max_tokens=250, seed=9)
    for _ in range(6):
        world.turn()
    key = world.submit(PROMPT, ignore_eos=True, max_tokens=150)
    world.run()
    for each in (key, other):
        world.expect(each)
    assert 0 < world.clients[key].done[0].accepted < 149 - 16
    assert world.state.drafts.rates.of[Source.PATH] > 0.5


def test_a_failing_row_with_a_draft_ends_alone() -> None:
    world = eager()
    key = warm(world)
    other = world.submit([2, 2], **LONG)
    row = until_in_flight(world, key)
    world.worker.fail_rows.add(row)
    while key in world.state.sequences:
        world.answer()
        world.check()
    world.worker.fail_rows.clear()
    world.run()
    assert world.clients[key].done[0].reason == "error"
    world.expect(other)
    world.idle()


def test_namespaces_propose_nothing_to_each_other() -> None:
    world = eager(speculative_algorithm="radix")
    world.submit(PROMPT, "a", **LONG)
    world.run()
    key = world.submit(PROMPT, "b", **LONG)
    world.run()
    world.expect(key)
    assert drafted(world) == 0


def test_flushed_outputs_are_forgotten() -> None:
    world = eager(speculative_algorithm="radix")
    world.submit(PROMPT, **LONG)
    world.run()
    world.ask("flush")
    key = world.submit(PROMPT, **LONG)
    world.run()
    world.expect(key)
    assert drafted(world) == 0


def test_the_suffix_finds_what_the_path_does_not() -> None:
    """The end of another prompt and its answer: the second prompt begins otherwise."""
    world = eager(speculative_algorithm="radix")
    recent = world.state.drafts.recent
    prompt = [8, 9, *PROMPT]
    answer = plain_answer(prompt, SamplingParams(max_tokens=60, ignore_eos=True), 5, 0, 100)
    recent.add("", np.array([*PROMPT[-4:], *answer], dtype=np.int32))
    key = world.submit(prompt, **LONG)
    world.run()
    world.expect(key)
    assert world.clients[key].done[0].accepted > 40


# ---- sources


def test_own_text_is_found_and_a_period_goes_on() -> None:
    def own(ids: list[int], most: int) -> list[int]:
        return sources.own(np.array(ids, dtype=np.int32), most).tolist()

    assert own([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 3) == [5, 6, 7]
    assert own([9, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 2) == [5, 6]
    assert own([1, 2, 3, 1, 2, 3], 5) == [1, 2, 3, 1, 2]
    assert own([5, 5, 5, 5], 3) == [5, 5, 5]
    assert own([1, 2, 4, 5, 2, 3, 1, 2, 3], 3) == []
    assert own([1, 2], 3) == []
    # Four tokens say more than three, wherever they are.
    assert own([1, 2, 3, 4, 8, 7, 2, 3, 4, 9, 1, 2, 3, 4], 1) == [8]


def test_recent_outputs_are_bounded_and_apart() -> None:
    rng, recent = np.random.default_rng(1), Recent()
    outputs = [rng.integers(0, 50_000, 1000, dtype=np.int32) for _ in range(MAX_IDS // 1000 * 2)]
    for output in outputs:
        recent.add("a", output)
    last = outputs[-1]
    assert np.array_equal(recent.after("a", last[10:14], 20), last[14:34])
    assert not len(recent.after("a", outputs[0][10:14], 20))
    assert not len(recent.after("b", last[10:14], 20))
    assert len(recent.after("a", last[-6:-2], 20)) == 2
    for name in range(MAX_NAMESPACES):
        recent.add(str(name), last)
    assert not len(recent.after("a", last[10:14], 20))
    recent.add("0", np.arange(3 * MAX_IDS, dtype=np.int32))
    assert recent.after("0", np.arange(4, dtype=np.int32) + 3 * MAX_IDS - 10, 2).tolist() == [
        3 * MAX_IDS - 6,
        3 * MAX_IDS - 5,
    ]


def test_the_tree_goes_on_along_the_child_used_last() -> None:
    pool = SlotPool(100)
    tree = RadixTree(pool)

    def insert(ids: list[int]) -> Any:
        return tree.insert("", messages.pack(ids), pool.allocate(len(ids))).node

    def after(node: Any, since: list[int], most: int) -> list[int]:
        return messages.unpack(tree.after(node, messages.pack(since), most)).tolist()

    insert([1, 2, 3, 4, 5, 6])
    insert([1, 2, 3, 7, 8])
    node = tree.match("", messages.pack([1, 2]), 2).node
    assert after(node, [], 2) == [3, 7]
    assert after(node, [3], 9) == [7, 8]
    assert after(node, [3, 4], 9) == [5, 6]
    assert after(node, [3, 4, 5], 1) == [6]
    assert after(node, [3, 4, 6], 9) == after(node, [3, 9], 9) == after(node, [3, 4, 5, 6, 7], 9) == []
    tree.match("", messages.pack([1, 2, 3, 4, 5]), 5)
    assert after(node, [], 9) == [3, 4, 5, 6]


# ---- what pays


def test_the_cost_of_a_token_is_learnt() -> None:
    cost = StepCost()
    assert cost.ratio == FIRST
    rng = np.random.default_rng(2)
    for _ in range(300):
        tokens = int(rng.integers(1, 40))
        cost.saw(tokens, 0, (10 + 0.2 * tokens) * rng.uniform(0.95, 1.05))
        cost.saw(500, 480, 1.0)
    assert cost.ratio == pytest.approx(0.02, rel=0.2)
    for _ in range(2000):
        cost.saw(8, 0, 11.6)
    assert cost.ratio == pytest.approx(0.02, rel=0.2), "steps that are all alike say nothing of it"


def test_drafts_are_shorter_where_steps_are_fuller() -> None:
    cost = StepCost()
    lengths = [worthwhile(0.9, cost.marginal(rows)) for rows in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 10
    assert lengths[-1] <= 1
    assert expected(1.0, 7) == 7
    assert expected(0.5, 3) == 0.875


def test_rates_follow_what_is_kept() -> None:
    rates = Rates()
    for _ in range(5):
        rates.saw(Source.OWN, 0, True, 0.15)
    assert rates.of[Source.OWN] < 0.3
    rates.saw(Source.OWN, 30, False, 0.15)
    assert rates.of[Source.OWN] > 0.9
    assert rates.of[Source.PATH] == Rates().of[Source.PATH]
    a, b = np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)
    assert (agreement(a, b), agreement(a, b[:2])) == ((2, True), (2, False))


def test_the_flags_choose_the_sources() -> None:
    def chosen(**options: Any) -> tuple[bool, tuple[Source, ...]]:
        found = drafts.Drafts.of(make(**options))
        return found.on, found.sources

    assert chosen() == (True, (Source.PATH, Source.SUFFIX, Source.OWN))
    assert chosen(disable_radix_cache=True) == (True, (Source.OWN,))
    assert chosen(speculative_algorithm="none") == (False, ())
