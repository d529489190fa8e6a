"""Programs: their requests run next to each other, and are counted to the token, as long as they live."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sapwood.srt.errors import SapwoodError
from sapwood.srt.scheduler import programs
from sapwood.srt.scheduler.policy import LEAST
from sapwood.srt.scheduler.preemption import retract
from sapwood.srt.scheduler.programs import ProgramKey
from tests.simulation.program_world import ProgramWorld
from tests.simulation.rules import Rules


def run_with_retractions(world: ProgramWorld, every: int) -> None:
    """To the end, while now and then a row is retracted and something of the cache evicted."""
    for turn in range(5000):
        world.turn()
        if turn % every == every - 1:
            active = np.flatnonzero(world.state.rows.active)
            if len(active):
                retract(world.state, int(active[turn % len(active)]))
                world.state.tree.evict(30)
        if not world.sent and not world.state.requests:
            return
    raise AssertionError("there is no end of it")


def check_positions(world: ProgramWorld) -> None:
    for program, positions in world.computed.items():
        if not program:
            continue
        told = world.told(program)
        sums = told["computed_tokens"] + told["decoded_tokens"] + told["drafted_tokens"]
        assert sums == positions, (program, told)


def test_counts_are_what_was_computed_and_told() -> None:
    world = ProgramWorld()
    first = world.done([2] * 10, max_tokens=4, ignore_eos=True)
    assert world.told() == {
        "program": "p", "requests": 1, "prompt_tokens": 10, "cached_tokens": 0, "computed_tokens": 10,
        "recomputed_tokens": 0, "decoded_tokens": 3, "drafted_tokens": 0, "accepted_tokens": 0,
        "output_tokens": 4, "surplus_tokens": 0, "retracted": 0,
    }  # fmt: skip
    world.done([*first, 3, 3], max_tokens=1)
    told = world.told()
    assert (told["requests"], told["prompt_tokens"], told["cached_tokens"]) == (2, 26, 13)
    assert told["computed_tokens"] == 13, "the last output token and the new ones"
    check_positions(world)


def test_the_tokens_of_a_prefix_tree_are_computed_once() -> None:
    """Distinct tokens of the tree, without last ones that nothing needed, and one more for each request on a
    prompt that is wholly cached."""
    world = ProgramWorld(num_slots=2048, max_running_requests=4)
    shared = list(range(2, 32))
    keys = [world.call([*shared, 40 + i], max_tokens=3, ignore_eos=True) for i in range(6)]
    world.run()
    again = [world.call([*shared, 40 + i], max_tokens=3, ignore_eos=True, seed=9) for i in range(6)]
    world.run()
    paths = [[*world.clients[key].prompt, *world.clients[key].output[0][:-1]] for key in keys + again]
    distinct = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    told = world.told()
    assert told["surplus_tokens"] == told["recomputed_tokens"] == 0
    # Tokens that both runs draw alike are decoded twice: the tree had them only after the first one's end.
    alike = sum(
        tuple(path[: n + 1]) in {tuple(other[: n + 1]) for other in paths[:6]}
        for path in paths[6:]
        for n in range(31, len(path))
    )
    assert told["computed_tokens"] + told["decoded_tokens"] == len(distinct) + len(again) + alike
    check_positions(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_positions_add_up_with_choices_grammars_retraction_and_drafts(overlap: bool) -> None:
    world = ProgramWorld(
        num_slots=900, max_running_requests=6, chunked_prefill_size=16,
        speculative_algorithm="auto", disable_overlap_schedule=overlap,
    )  # fmt: skip
    world.state.drafts.gain_alone = world.state.drafts.gain_among_others = 0.0
    grammar = Rules({1: 5, 2: 6, 3: 7}, 8, 20, False).grammar()
    keys = []
    for i in range(12):
        name = "ab"[i % 2]
        more: dict[str, Any] = {"n": 3} if i % 3 == 0 else {"grammar": grammar, "n": 2} if i % 4 == 1 else {}
        keys.append(world.call([2 + i % 3] * (8 + i), name, max_tokens=24, seed=-1 - i % 2, **more))
    run_with_retractions(world, 5)
    for key in keys:
        world.expect(key)
    check_positions(world)
    counts = {name: world.told(name) for name in "ab"}
    assert sum(told["retracted"] for told in counts.values()) == world.state.counters.retracted > 0
    assert sum(told["recomputed_tokens"] for told in counts.values()) > 0
    accepted = sum(told["accepted_tokens"] for told in counts.values())
    assert 0 < accepted <= sum(told["drafted_tokens"] for told in counts.values())
    for name, told in counts.items():
        mine = [c for c in world.clients.values() if c.submit.scheduling.program == name]
        assert told["requests"] == len(mine)
        assert told["output_tokens"] == sum(done.n for c in mine for done in c.done.values())
        assert told["prompt_tokens"] == sum(len(c.prompt) for c in mine)
        assert told["cached_tokens"] == sum(c.admitted.verdict.matched for c in mine if c.admitted)
    total = sum(told["output_tokens"] + told["surplus_tokens"] for told in counts.values())
    assert total == world.state.counters.output_tokens + world.state.counters.surplus_tokens
    world.idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_decoded_positions_are_those_of_the_output_but_for_drafts_and_surplus(overlap: bool) -> None:
    """Whatever drafts were kept, whichever ends came: a drafted EOS, a limit, a stop string, a hang-up."""
    world = ProgramWorld(4096, speculative_algorithm="auto", disable_overlap_schedule=overlap)
    world.state.drafts.gain_alone = world.state.drafts.gain_among_others = 0.0
    grammar = Rules({1: 5, 2: 6, 3: 7}, 8, 20, False).grammar()
    keys = []
    for i in range(16):
        more: dict[str, Any] = {"n": 3} if i % 3 == 0 else {"grammar": grammar, "n": 2} if i % 4 == 1 else {}
        keys.append(world.call([2 + i % 3] * (8 + i), max_tokens=24, seed=-1 - i % 2, **more))
    for turn in range(12):
        world.turn()
        if turn == 8:
            world.stop_at(keys[2], 0, 3)
            world.cancel(keys[3])
    world.run()
    told = world.told()
    ends = [done.n for client in world.clients.values() for done in client.done.values()]
    assert told["retracted"] == told["recomputed_tokens"] == 0 < told["accepted_tokens"]
    needed = sum(n - 1 for n in ends if n)
    assert told["decoded_tokens"] + told["accepted_tokens"] - told["surplus_tokens"] == needed
    check_positions(world)


def test_what_is_computed_again_after_a_retraction_is_counted_apart() -> None:
    world = ProgramWorld(max_running_requests=2)
    for first in (2, 3):
        world.call([first] * 20, max_tokens=30, ignore_eos=True)
    run_with_retractions(world, 6)
    told = world.told()
    assert told["retracted"] == world.state.counters.retracted > 0
    assert told["recomputed_tokens"] > 0
    useful = told["computed_tokens"] + told["decoded_tokens"] - told["recomputed_tokens"]
    assert useful == 2 * (20 + 29) + told["surplus_tokens"]
    check_positions(world)


def test_a_stop_string_and_a_hang_up_are_surplus_and_output() -> None:
    world = ProgramWorld()
    stopped = world.call([2] * 5, max_tokens=20, ignore_eos=True)
    left = world.call([3] * 5, max_tokens=20, ignore_eos=True)
    for _ in range(8):
        world.turn()
    drawn = len(world.clients[stopped].output[0])
    world.stop_at(stopped, 0, 2)
    world.cancel(left)
    world.run()
    told = world.told()
    assert told["output_tokens"] == 2 + world.clients[left].done[0].n
    # Both rows were in the step in flight.
    assert told["surplus_tokens"] == drawn - 2 + 2 == world.state.counters.surplus_tokens
    check_positions(world)


def test_what_a_fork_drew_for_a_request_that_has_ended_is_surplus() -> None:
    world = ProgramWorld()
    key = world.call([2] * 5, n=3, max_tokens=4, ignore_eos=True)
    world.scheduler.advance()
    world.cancel(key)
    world.run()
    told = world.told()
    assert (told["output_tokens"], told["surplus_tokens"]) == (0, 3)
    assert world.state.counters.surplus_tokens == 3


def test_what_failed_in_a_fork_is_no_surplus() -> None:
    world = ProgramWorld()
    key = world.call([2] * 5, n=3, max_tokens=4, ignore_eos=True)
    world.scheduler.advance()
    world.worker.fail_rows.add(0)
    world.cancel(key)
    world.run()
    assert world.told()["surplus_tokens"] == 0


def test_an_end_is_answered_when_the_last_step_is_counted() -> None:
    world = ProgramWorld()
    world.call([2] * 5, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        world.turn()
    before = world.told()
    world.question(end=True)
    assert len(world.asked) == 1, "a step that works for it is in flight"
    with pytest.raises(LookupError, match="program_not_found"):
        world.told()
    world.turn()
    world.scheduler.advance()
    world.collect()
    told = world.asked[-1].data
    assert told["decoded_tokens"] == before["decoded_tokens"] + 1
    world.run()
    world.expect(0)


def test_a_program_ends_by_itself_when_none_of_its_requests_is_there_for_a_while() -> None:
    world = ProgramWorld(program_timeout=10.0)
    first = world.done([2] * 20, max_tokens=2, ignore_eos=True)
    world.pass_time(9.0)
    second = world.done([*first, 5], max_tokens=2, ignore_eos=True)
    world.pass_time(9.0)
    assert world.told()["requests"] == 2
    world.call(second, max_tokens=100, ignore_eos=True)
    world.turn()
    world.pass_time(100.0)
    assert world.told()["requests"] == 3, "one runs"
    world.run()
    world.pass_time(9.9)
    assert world.state.tree.pinned_tokens > 0
    assert world.state.programs.next() is not None
    world.pass_time(0.1)
    assert (len(world.state.programs), world.state.tree.pinned_tokens) == (0, 0)
    assert world.state.programs.next() is None
    with pytest.raises(LookupError, match="program_not_found"):
        world.told()


def test_namespaces_and_tenants_have_programs_of_their_own() -> None:
    world = ProgramWorld()
    world.done([2] * 10, namespace="a", max_tokens=1)
    world.done([2] * 10, namespace="b", max_tokens=1)
    world.done([2] * 12, tenant="t", max_tokens=1)
    assert world.told(namespace="a")["prompt_tokens"] == 10
    with pytest.raises(LookupError, match="program_not_found"):
        world.told()
    assert world.told(tenant="t")["prompt_tokens"] == 12
    assert world.end(namespace="a")["released_tokens"] == 10
    assert world.told(namespace="b")["cached_tokens"] == 0


def test_a_name_begins_anew_after_its_end_while_old_requests_go_on() -> None:
    world = ProgramWorld()
    old = world.call([2] * 5, max_tokens=30, ignore_eos=True)
    for _ in range(4):
        world.turn()
    world.question(end=True)
    world.call([3] * 5, max_tokens=2, ignore_eos=True)
    world.run()
    told = world.told()
    assert (told["requests"], told["prompt_tokens"], told["output_tokens"]) == (1, 5, 2)
    world.expect(old)
    assert world.end()["released_tokens"] == 6, "the old one's path was not kept"


def test_of_too_many_idle_programs_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    world = ProgramWorld()
    for name in "abc":
        world.done([2] * 5, name, max_tokens=1)
    assert len(world.state.programs) == 2
    with pytest.raises(LookupError, match="program_not_found"):
        world.told("a")
    assert world.told("b")["requests"] == world.told("c")["requests"] == 1


def test_of_too_many_idle_programs_those_of_who_has_most_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 3)
    world = ProgramWorld()
    world.done([2] * 5, "work", tenant="alice", max_tokens=1)
    for i in range(8):
        world.done([3] * 5, f"{i}", tenant="mallory", max_tokens=1)
    names = [(program.key.tenant, program.key.name) for program in world.state.programs]
    assert names == [("alice", "work"), ("mallory", "6"), ("mallory", "7")]


def test_too_many_programs_that_lose_their_requests_at_once_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    world = ProgramWorld()
    for name in "abcde":
        world.call([2] * 5, name, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.turn()
    world.scheduler.rebuild(SapwoodError("broken").info())
    assert [program.key.name for program in world.scheduler.state.programs] == ["d", "e"]


def test_without_a_cache_programs_are_counted_all_the_same() -> None:
    world = ProgramWorld(disable_radix_cache=True)
    for _ in range(2):
        world.done([2] * 10, max_tokens=2, ignore_eos=True)
    told = world.end()
    assert (told["requests"], told["computed_tokens"], told["released_tokens"]) == (2, 20, 0)


@pytest.mark.parametrize("how", ["worker", "state"])
def test_programs_outlive_what_is_lost(how: str) -> None:
    world = ProgramWorld(num_slots=256, max_running_requests=1, program_timeout=10.0)
    path = world.done([2] * 20, max_tokens=2, ignore_eos=True)
    world.call([*path, 3], max_tokens=50, ignore_eos=True)
    world.call([*path, 4], max_tokens=3, ignore_eos=True)
    for _ in range(4):
        world.turn()
    world.question("gone", end=True)
    before = world.told()
    if how == "worker":
        world.scheduler.lose_worker("it died")
    else:
        world.scheduler.rebuild(SapwoodError("broken").info())
    world.state = world.scheduler.state
    world.state.clock = world.state.programs._clock = world.time
    assert world.state.tree.pinned_tokens == 0
    told = world.told()
    assert told == {**before, "output_tokens": told["output_tokens"]}, "only the outputs have ended since"
    program = world.state.programs.find(ProgramKey("", "", "p"))
    assert program is not None
    assert program.live == (1 if how == "worker" else 0)
    if how == "state":
        world.pass_time(10.0)
        assert len(world.state.programs) == 0


@pytest.mark.parametrize("policy", ["lpm", "lof", "priority", "fair"])
def test_siblings_go_next_to_each_other(policy: str) -> None:
    """Requests that share nothing, of three programs, in turns: each program's go together."""
    world = ProgramWorld(
        num_slots=2048, max_running_requests=1, chunked_prefill_size=256, schedule_policy=policy
    )
    world.call([2] * 5, "", max_tokens=6, ignore_eos=True)
    world.turn()
    names = ["a", "b", "c"] * 3
    keys = [world.call([3 + i] * 5, name, max_tokens=2, ignore_eos=True) for i, name in enumerate(names)]
    assert order_of(world, keys) == [keys[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


@pytest.mark.parametrize("policy", ["fcfs"])
def test_by_arrival_programs_are_nothing_special(policy: str) -> None:
    world = ProgramWorld(
        num_slots=2048, max_running_requests=1, chunked_prefill_size=256, schedule_policy=policy
    )
    world.call([2] * 5, "", max_tokens=6, ignore_eos=True)
    world.turn()
    keys = [world.call([3 + i] * 5, "ab"[i % 2], max_tokens=2, ignore_eos=True) for i in range(6)]
    assert order_of(world, keys) == keys


def test_a_program_that_goes_on_and_on_overtakes_no_further_than_anything_else() -> None:
    """Each of its requests is followed by another one, of which none shares anything."""
    world = ProgramWorld(num_slots=4096, max_running_requests=1, chunked_prefill_size=16)
    world.call([2] * 5, max_tokens=2, ignore_eos=True)
    world.turn()
    stranger = world.call([49] * 10, "", max_tokens=2, ignore_eos=True)
    ahead = 0
    while world.clients[stranger].admitted is None:
        world.call([3 + ahead % 40, 3 + ahead // 40] * 5, max_tokens=2, ignore_eos=True)
        ahead += 1
        for _ in range(3):
            world.turn()
    # It has found nobody waiting. Each of them is LEAST tokens of work.
    assert 1 < ahead <= (world.state.budget + LEAST) // LEAST
    world.run()


def order_of(world: ProgramWorld, keys: list[int]) -> list[int]:
    """Run to the end; the keys in the order in which they were admitted."""
    order: list[int] = []
    for _ in range(5000):
        world.turn()
        order += [key for key in keys if world.clients[key].admitted is not None and key not in order]
        if not world.sent and not world.state.requests:
            break
    return order
