"""What programs use is kept while they live: which paths are pinned, and which make room for others."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.cache import pins
from sapwood.srt.scheduler import kept_paths
from sapwood.srt.scheduler.programs import ProgramKey
from tests.simulation.program_world import ProgramWorld


def kept(world: ProgramWorld, name: str = "p", tenant: str = "") -> list[tuple[int, bool]]:
    """The depths of what is pinned for a program, in the order of their last use, and whether they were used
    again."""
    program = world.state.programs.find(ProgramKey("", tenant, name))
    assert program is not None
    return [(path.node.depth, path.again) for path in program.paths.values()]


def use_again(world: ProgramWorld, prompt: list[int], program: str, **more: Any) -> None:
    """Cache the prompt for nobody, and begin a request of the program with it."""
    world.done(prompt, "", max_tokens=1)
    world.done([*prompt, 49], program, max_tokens=1, **more)


def test_a_programs_path_outlives_others_and_goes_with_it() -> None:
    world = ProgramWorld(num_slots=256)
    path = world.done([2] * 20, max_tokens=10, ignore_eos=True)[:-1]
    lost = world.done([3] * 20, "", max_tokens=10, ignore_eos=True)[:-1]
    world.crowd(1000)
    assert (world.cached(path), world.cached(lost)) == (29, 0)
    told = world.end()
    assert told["released_tokens"] == 29
    assert world.state.tree.pinned_tokens == 0
    world.crowd(1000)
    assert world.cached(path) == 0
    with pytest.raises(LookupError, match="program_not_found"):
        world.end()


def test_keep_and_a_program_hold_a_path_each_for_its_own_time() -> None:
    world = ProgramWorld(program_timeout=10.0)
    world.done([2] * 20, keep=50.0, max_tokens=2, ignore_eos=True)
    assert world.end()["released_tokens"] == 0
    world.pass_time(49.0)
    assert world.state.tree.pinned_tokens == 21
    world.done([3] * 20, keep=5.0, max_tokens=2, ignore_eos=True)
    world.pass_time(6.0)
    assert world.state.tree.pinned_tokens == 21, "the second one's program lives yet, and keeps it"
    assert world.end()["released_tokens"] == 21


def test_the_prefix_that_branches_share_is_kept_and_dead_branches_make_room() -> None:
    """100 branches, each more than the pins may take in all: what they share stays, and the last of them."""
    world = ProgramWorld(num_slots=400, max_running_requests=4)
    shared = list(range(2, 42))
    ends = [
        world.done([*shared, 2 + i % 40, 2 + i // 40], max_tokens=12, ignore_eos=True) for i in range(100)
    ]
    assert world.state.tree.pinned_tokens <= 100
    world.crowd(2000)
    assert world.cached(shared) == 40
    assert world.cached(ends[-1]) == 53
    assert world.cached(ends[0]) <= 41


def test_a_chat_needs_few_pins() -> None:
    world = ProgramWorld(num_slots=800)
    turns = [2, 3, 4]
    for i in range(20):
        turns = [*world.done(turns, max_tokens=3, ignore_eos=True), 5 + i]
    program = world.state.programs.find(ProgramKey("", "", "p"))
    assert program is not None
    assert len(program.paths) <= 2
    world.crowd(2000)
    assert world.cached(turns[:-2]) == len(turns) - 2


def test_pins_give_way_to_requests() -> None:
    world = ProgramWorld(num_slots=200, context=200)
    world.done([2] * 30, max_tokens=10, ignore_eos=True)
    key = world.call([3] * 150, "other", max_tokens=50, ignore_eos=True)
    world.run()
    world.expect(key)
    assert world.cached([2] * 30) < 30
    world.end()
    world.check()


def test_a_flush_drops_the_pins_and_the_program_goes_on() -> None:
    world = ProgramWorld()
    world.done([2] * 10, max_tokens=1)
    world.ask("flush")
    assert world.state.tree.pinned_tokens == 0
    world.done([2] * 10, max_tokens=1)
    assert world.end()["released_tokens"] == 10


def test_a_path_that_finds_no_room_costs_nobody_anything() -> None:
    """100 tokens may be pinned, of which 50 were used again, and an end is 60."""
    world = ProgramWorld(num_slots=400)
    use_again(world, [3] * 50, "q")
    for i in range(4):
        world.done([10 + i] * 10, f"r{i}", max_tokens=1)
    before = {name: kept(world, name) for name in ("q", "r0", "r1", "r2", "r3")}
    assert world.state.tree.pinned_tokens == 51 + 40
    world.done([30] * 60, "late", max_tokens=1)
    assert {name: kept(world, name) for name in before} == before
    assert kept(world, "late") == []
    world.done([31] * 101, "long", max_tokens=1)
    assert {name: kept(world, name) for name in before} == before


def test_a_program_that_cannot_keep_more_keeps_what_it_had() -> None:
    world = ProgramWorld(num_slots=400)
    use_again(world, list(range(2, 42)), "p")
    world.done([3] * 50, "", keep=1000.0, max_tokens=1)
    longer = [*range(2, 42), *[44] * 30]
    use_again(world, longer, "p")
    assert kept(world) == [(40, True), (41, False)]
    assert world.state.tree.pinned_tokens == 91
    world.crowd(2000)
    assert world.cached(longer) == 40


def test_what_was_used_again_makes_room_after_all_ends_by_its_last_use() -> None:
    world = ProgramWorld(num_slots=400)
    for name, token in (("a", 3), ("b", 4), ("c", 5)):
        use_again(world, [token] * 25, name)
    world.done([6] * 24, "end", max_tokens=1)
    world.done([3] * 25 + [48], "a", max_tokens=1)  # once more
    use_again(world, [7] * 25, "d")
    assert (kept(world, "end"), kept(world, "b")) == ([], [(25, True)]), "an end goes before"
    use_again(world, [8] * 25, "e")
    assert [bool(kept(world, name)) for name in "abcde"] == [True, False, True, True, True]


def test_an_end_takes_the_room_of_older_ends_alone() -> None:
    world = ProgramWorld(num_slots=400)
    use_again(world, [3] * 50, "q")
    for i in range(5):
        world.done([10 + i] * 20, f"r{i}", max_tokens=1)
    assert kept(world, "q") == [(50, True)]
    assert [len(kept(world, f"r{i}")) for i in range(5)] == [0, 0, 0, 1, 1]


def test_no_tenant_keeps_all_for_itself() -> None:
    """One path of 97 of the 100 tokens that may be pinned, and a program that never ends."""
    world = ProgramWorld(num_slots=400)
    large, small = [3] * 97, list(range(2, 32))
    use_again(world, large, "x", tenant="mallory")
    for _ in range(5):
        world.pass_time(50.0)
        world.done([5], "x", tenant="mallory", max_tokens=1)
    use_again(world, small, "y", tenant="alice")
    assert (30, True) in kept(world, "y", "alice")
    world.done([*large, 9], "x", tenant="mallory", max_tokens=1)
    assert (30, True) in kept(world, "y", "alice"), "nobody makes room for who would keep more"
    world.crowd(2000)
    assert world.cached(small) == 30


def test_who_keeps_most_makes_room_first() -> None:
    world = ProgramWorld(num_slots=400)
    world.done([2] * 30, "work", tenant="alice", max_tokens=1)
    for i in range(7):
        world.done([10 + i] * 10, f"{i}", tenant="mallory", max_tokens=1)
    world.done([40] * 20, "bob's", tenant="bob", max_tokens=1)
    assert kept(world, "work", "alice") == [(30, False)], "older than all of the others"
    assert [len(kept(world, f"{i}", "mallory")) for i in range(7)] == [0, 0, 1, 1, 1, 1, 1]
    assert kept(world, "bob's", "bob") == [(20, False)]


def test_the_pins_of_one_program_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_paths, "MAX_PATHS", 3)
    world = ProgramWorld()
    for i in range(10):
        world.done([2 + i] * 4, max_tokens=1)
    assert world.state.tree.pinned_tokens == 12
    for i in range(3):
        use_again(world, [20 + i] * 5, "p")
    world.done([30] * 6, max_tokens=1)
    assert kept(world) == [(5, True), (5, True), (6, False)], "the last end has its place"
    assert world.end()["released_tokens"] == 16


def test_the_pins_of_all_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more, one of those goes that has most of them, and not who has the longest."""
    monkeypatch.setattr(kept_paths, "MAX_IN_ALL", 4)
    world = ProgramWorld()
    world.done([2] * 30, "work", tenant="alice", max_tokens=1)
    for i in range(8):
        world.done([10 + i] * 2, f"{i}", tenant="mallory", max_tokens=1)
    assert len(world.state.programs._kept) == 4
    assert kept(world, "work", "alice") == [(30, False)]
    assert [len(kept(world, f"{i}", "mallory")) for i in range(8)] == [0] * 5 + [1] * 3


def test_many_ends_that_make_room_cost_one_look_at_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ProgramWorld(num_slots=400)
    for i in range(40):
        world.done([2 + i], f"{i}", max_tokens=1)
    looks = 0
    missing = pins.Pins._missing

    def counted(self: Any, node: Any) -> int:
        nonlocal looks
        looks += 1
        return missing(self, node)

    monkeypatch.setattr(pins.Pins, "_missing", counted)
    world.done([45] * 99, "large", max_tokens=1)
    assert [bool(kept(world, f"{i}")) for i in range(40)] == [False] * 39 + [True]
    assert looks == 3


def test_ends_last_for_a_while_and_what_was_used_again_as_long_as_its_program() -> None:
    world = ProgramWorld(program_timeout=10.0, max_running_requests=2)
    use_again(world, [2] * 10, "p")
    world.done([3] * 20, max_tokens=1)
    runs = world.call([4] * 5, max_tokens=200, ignore_eos=True)
    world.turn()
    world.pass_time(9.0)
    assert kept(world) == [(10, True), (11, False), (20, False)]
    world.pass_time(1.0)
    for _ in range(2):
        world.turn()
    assert kept(world) == [(10, True)]
    assert world.state.tree.pinned_tokens == 10
    world.cancel(runs)


def test_under_need_an_end_goes_before_what_is_to_be_kept_for_longer() -> None:
    """Also while its program lives."""
    world = ProgramWorld(num_slots=200, context=200, max_running_requests=2)
    world.done([2] * 20, "", keep=1000.0, max_tokens=1)
    world.done([3] * 20, max_tokens=1)
    live = world.call([4] * 5, max_tokens=150, ignore_eos=True)
    world.turn()
    need = world.call([5] * 150, "", max_tokens=2, ignore_eos=True)
    world.run()
    world.expect(live)
    world.expect(need)
    assert world.cached([2] * 20) == 20
    assert world.cached([3] * 20) < 20


@pytest.mark.parametrize("how", ["flush", "need"])
def test_a_pin_that_is_gone_is_forgotten(how: str) -> None:
    world = ProgramWorld(num_slots=200, context=200)
    world.done([2] * 30, max_tokens=1)
    if how == "flush":
        world.ask("flush")
    else:
        world.done([3] * 150, "", max_tokens=50, ignore_eos=True)
    assert kept(world) == []
    assert len(world.state.programs._kept) == 0
    assert world.end()["released_tokens"] == 0
