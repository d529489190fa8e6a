"""Who goes next under each policy, who has to give way, and what output is expected."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from sapwood.srt.params import Scheduling
from sapwood.srt.scheduler.estimate import DECAY_STEPS, FIRST, LEAST, OutputEstimate
from tests.simulation import World


def ask(world: World, prompt: list[int], tenant: str = "", priority: int = 0, **params: Any) -> int:
    """Submit a request of a tenant or with a priority; its key."""
    params = {"ignore_eos": True, **params}
    return world.submit(prompt, scheduling=Scheduling(tenant=tenant, priority=priority), **params)


def admissions(world: World) -> list[int]:
    """Run to the end; the keys in the order in which they were first admitted."""
    order: list[int] = []
    for _ in range(5000):
        world.turn()
        order += [k for k, c in world.clients.items() if c.admitted is not None and k not in order]
        if not world.sent and not world.state.requests:
            break
    for key in world.clients:
        world.expect(key)
    world.idle()
    return order


def busy(tokens: int = 4, **options: Any) -> tuple[World, int]:
    """A world of one row that is taken."""
    world = World(**{"num_slots": 2048, "max_running_requests": 1, "chunked_prefill_size": 64, **options})
    first = ask(world, [2] * 5, max_tokens=tokens)
    world.turn()
    return world, first


def test_lof_takes_the_longest_output_first() -> None:
    world, first = busy(schedule_policy="lof")
    keys = [ask(world, [3 + i] * 5, max_tokens=n) for i, n in enumerate([2, 9, 5, 9])]
    assert admissions(world) == [first, keys[1], keys[3], keys[2], keys[0]]


def test_dfs_weight_stays_in_the_branch_in_which_most_wait() -> None:
    world = World(
        num_slots=2048, max_running_requests=1, chunked_prefill_size=64, schedule_policy="dfs-weight"
    )
    small, large = [3] * 20, [4] * 10
    for shared in (small, large):
        world.submit([*shared, 2], max_tokens=1)
    world.run()
    first = ask(world, [2] * 5, max_tokens=4)
    world.turn()
    few = [ask(world, [*small, 10 + i], max_tokens=1) for i in range(2)]
    many = [ask(world, [*large, 10 + i], max_tokens=1) for i in range(4)]
    assert [key for key in admissions(world) if key >= first] == [first, *many, *few]


def test_priorities_go_by_their_number() -> None:
    for low_first in (False, True):
        world, first = busy(schedule_policy="priority", schedule_low_priority_values_first=low_first)
        keys = [ask(world, [3 + i] * 5, priority=p) for i, p in enumerate([0, 0])]
        lower = ask(world, [20] * 5, priority=1 if low_first else -1)
        assert admissions(world) == [first, *keys, lower]


def test_a_request_of_a_higher_priority_takes_the_row_of_a_lower_one() -> None:
    world, first = busy(30, schedule_policy="priority")
    for _ in range(2):
        world.turn()
    assert not world.clients[first].finished
    urgent = ask(world, [3] * 5, priority=7, max_tokens=3)
    equal = ask(world, [4] * 5)
    while not world.clients[urgent].finished:
        world.turn()
        assert not world.clients[first].finished
    assert world.state.counters.retracted == 1
    assert world.clients[equal].admitted is None
    assert admissions(world) == [first, urgent, equal]


def test_slots_are_taken_from_lower_priorities_too() -> None:
    world = World(num_slots=64, max_running_requests=4, chunked_prefill_size=64, schedule_policy="priority")
    low = [ask(world, [3 + i] * 10, max_tokens=10) for i in range(3)]
    for _ in range(4):
        world.turn()
    urgent = ask(world, [20] * 30, priority=1, max_tokens=10)
    for _ in range(2):
        world.turn()
    assert world.clients[urgent].admitted is not None
    assert world.state.counters.retracted >= 1
    assert admissions(world) == [*low, urgent]


def test_rows_for_choices_are_held_by_those_that_run_only() -> None:
    """One that is preempted in its prompt has choices to come: for them none is kept from the urgent one."""
    world = World(num_slots=256, max_running_requests=3, chunked_prefill_size=4, schedule_policy="priority")
    low = ask(world, [2] * 30, n=2)
    world.turn()
    assert world.state.reserved_rows == 1
    urgent = ask(world, [3] * 30, n=3, priority=1)
    assert admissions(world) == [low, urgent]
    assert world.state.counters.retracted == 1


def test_who_has_used_least_goes_next() -> None:
    world, first = busy(schedule_policy="fair")
    flood = [ask(world, [3 + i] * 10, tenant="flood", max_tokens=2) for i in range(20)]
    for _ in range(30):
        world.turn()
    late = [ask(world, [30 + i] * 10, tenant="late", max_tokens=2) for i in range(3)]
    before = {key for key in flood if world.clients[key].admitted is not None}
    assert 3 < len(before) < 17
    order = admissions(world)
    assert order[0] == first
    assert order.index(late[0]) <= len(before) + 2, "nothing is held against who was not there"
    # From then on they take turns.
    places = [order.index(key) for key in late]
    assert all(b - a <= 2 for a, b in pairwise(places)), places


def test_what_the_cache_has_is_not_charged() -> None:
    world, _first = busy(schedule_policy="fair", num_slots=8192, context=1200, chunked_prefill_size=512)
    hot = [3] * 500
    world.submit(hot, scheduling=Scheduling(tenant="cached"), max_tokens=1)
    world.run(check=False)
    blocker = ask(world, [2] * 5, max_tokens=4)
    world.turn()
    cached = [ask(world, [*hot, 5 + i], tenant="cached", max_tokens=1) for i in range(6)]
    cold = [ask(world, [20 + i] * 500, tenant="cold", max_tokens=1) for i in range(6)]
    order = [key for key in admissions(world) if key >= blocker]
    assert set(order[-4:]) <= set(cold), "each of these counts as hundreds of the others"
    assert set(cached) < set(order)


def test_a_tenant_without_rows_takes_one_of_who_has_many() -> None:
    world = World(num_slots=2048, max_running_requests=4, chunked_prefill_size=64, schedule_policy="fair")
    flood = [ask(world, [3 + i] * 10, tenant="flood", max_tokens=100) for i in range(8)]
    for _ in range(4):
        world.turn()
    assert world.state.rows.num_free == 0
    late = [ask(world, [30 + i] * 10, tenant="late", max_tokens=4) for i in range(3)]
    for _ in range(3):
        world.turn()
    admitted = [key for key in late if world.clients[key].admitted is not None]
    assert len(admitted) == 2, "half of the rows"
    assert world.state.counters.retracted == 2
    assert not any(world.clients[key].finished for key in flood)
    assert set(admissions(world)) == {*flood, *late}


def test_who_has_more_than_its_share_of_rows_pauses_where_rows_are_dear() -> None:
    world = World(num_slots=2048, max_running_requests=6, chunked_prefill_size=64, schedule_policy="fair")
    rows = world.state.rows
    flood = [ask(world, [3 + i] * 10, tenant="flood", max_tokens=60) for i in range(6)]
    for _ in range(6):
        world.turn()
    late = ask(world, [30] * 10, tenant="late", max_tokens=30)
    gained: dict[float, int] = {}
    for ratio in (0.001, 1.0):  # a row costs nothing; as much as an empty step
        while world.clients[late].admitted is None:
            world.turn()
        running = np.flatnonzero(rows.active & (rows.tenant == world.state.tenants["flood"]))
        before = rows.length[running].copy()
        for _ in range(9):
            world.state.row_cost.ratio = ratio
            world.turn()
        gained[ratio] = int((rows.length[running] - before).sum())
    assert gained[0.001] >= 40, "five rows, nine steps"
    assert 6 <= gained[1.0] <= 16, "one of them a step, in turns, and what was in flight"
    assert set(admissions(world)) == {*flood, late}
    assert all(world.clients[key].finished for key in flood)


def test_what_was_retracted_goes_before_what_is_new() -> None:
    world = World(num_slots=64, max_running_requests=4, chunked_prefill_size=64)
    keys = [ask(world, [3 + i] * 8, max_tokens=40) for i in range(3)]
    while not world.state.counters.retracted:
        world.turn()
    new = ask(world, [20] * 4, max_tokens=2)
    order = admissions(world)
    assert order == [*keys, new]


def test_the_row_goes_that_is_cheapest_to_bring_back() -> None:
    world = World(num_slots=120, max_running_requests=4, chunked_prefill_size=64, context=100)
    shared = [5] * 30
    oldest = ask(world, shared, max_tokens=60)
    while world.clients[oldest].admitted is None:
        world.turn()
    world.turn()
    cheap = ask(world, [*shared, 6], max_tokens=60)
    dear = ask(world, [7] * 30, max_tokens=60)
    while not world.state.counters.retracted:
        world.turn()
    waiting = [s.request.key for s in world.state.waiting.values()]
    assert waiting == [cheap]
    assert not world.clients[dear].finished
    admissions(world)


def test_expected_output_follows_what_requests_produce() -> None:
    estimate = OutputEstimate()
    assert estimate.ratio == FIRST
    assert estimate.of(1000) == 1000 * FIRST
    assert estimate.of(100) == LEAST
    assert estimate.of(3) == 3
    assert estimate.of(0) == 0
    for _ in range(200):
        estimate.ended(500, 1000)
    assert abs(estimate.ratio - 0.5) < 0.01
    assert estimate.of(np.array([1000, 10], dtype=np.int32)).tolist() == [int(1000 * estimate.ratio), 10]
    estimate.ended(1000, 0)
    assert abs(estimate.ratio - 0.5) < 0.01


def test_a_retraction_raises_what_is_expected_for_a_while() -> None:
    estimate = OutputEstimate()
    estimate.retracted(np.array([80, 80], dtype=np.int32), np.array([100, 100], dtype=np.int32))
    assert estimate.ratio == 1.0
    for _ in range(DECAY_STEPS // 2):
        estimate.stepped()
    assert 0.4 < estimate.ratio < 0.6
    for _ in range(DECAY_STEPS):
        estimate.stepped()
    assert estimate.ratio == FIRST
    assert OutputEstimate(3.0).ratio == 3 * FIRST


def test_nobody_gives_way_for_what_would_not_fit_even_then() -> None:
    world = World(num_slots=2048, max_running_requests=4, chunked_prefill_size=64, schedule_policy="fair")
    flood = [ask(world, [3 + i] * 10, tenant="flood", max_tokens=30) for i in range(4)]
    for _ in range(4):
        world.turn()
    # Its choices need all rows, and the flood keeps one of them.
    ask(world, [30] * 10, tenant="late", max_tokens=4, n=4)
    for _ in range(4):
        world.turn()
    assert world.state.counters.retracted == 0
    assert all(world.state.sequences[key].row >= 0 for key in flood)
    admissions(world)


def test_ones_own_cached_prefix_is_no_room_for_it() -> None:
    world = World(num_slots=130, max_running_requests=4, chunked_prefill_size=64, schedule_policy="priority")
    prefix = [4] * 50
    world.submit(prefix, max_tokens=1)
    world.run()
    low = ask(world, [3] * 50, max_tokens=60)
    for _ in range(3):
        world.turn()
    assert world.state.tree.evictable_tokens >= 49
    # 49 of its tokens are cached, and what is free besides is too little for the rest.
    urgent = ask(world, [*prefix, *[5] * 30], priority=1, max_tokens=10)
    for _ in range(3):
        world.turn()
    assert world.clients[urgent].admitted is not None
    assert world.state.counters.retracted == 1
    admissions(world)
    assert world.clients[low].finished


def test_what_has_left_is_not_kept_behind_one_that_waits_for_long() -> None:
    world = World(num_slots=2048, max_running_requests=1, chunked_prefill_size=16, schedule_policy="priority")
    ask(world, [2] * 5, max_tokens=190)
    world.turn()
    first = ask(world, [3] * 5)
    sequence = world.state.sequences[first]
    for i in range(500):
        world.cancel(ask(world, [3] * 5 if i % 2 else [4 + i % 40] * 5))
    line, spot = sequence.line, sequence.spot
    assert line is not None
    assert spot is not None
    assert len(line._fifo) < 100
    assert len(line._heap) < 100
    assert len(spot.queue[line]) < 100
    admissions_of = [world.clients[key].finished for key in world.clients if key > first]
    assert all(admissions_of)
