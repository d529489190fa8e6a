"""Programs: what they use is kept while they live, run next to each other, and counted to the token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.errors import SapwoodError
from sapwood.srt.messages import Answer, Ask
from sapwood.srt.params import Scheduling
from sapwood.srt.scheduler import kept_paths, programs
from sapwood.srt.scheduler.preemption import retract
from sapwood.srt.scheduler.programs import Place
from tests.simulation import World
from tests.simulation.rules import Rules


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Programs(World):
    """A world whose requests may say their programs, with a clock of its own; `computed` counts the positions
    that the worker has computed for each program, from the steps alone."""

    def __init__(self, num_slots: int = 512, **options: Any) -> None:
        super().__init__(num_slots, **{"speculative_algorithm": "none", **options})
        self.time = Clock()
        self.state.clock = self.state.programs._clock = self.time
        self.computed: Counter[str] = Counter()
        self.asked: list[Answer] = []
        run = self.run_step

        def counting(step: messages.Step) -> messages.StepResult:
            rows, counts = messages.unpack(step.rows).tolist(), messages.unpack(step.counts).tolist()
            for row, count in zip(rows, counts, strict=True):
                self.computed[self.whose[step.number, row]] += count
            return run(step)

        self.whose: dict[tuple[int, int], str] = {}
        self.run_step = counting

    def _send(self, step: Any) -> bool:
        if isinstance(step, messages.Step):
            for row in messages.unpack(step.rows).tolist():
                client, _ = self.clients.choices[int(self.state.rows.key[row])]
                self.whose[step.number, row] = client.submit.scheduling.program
        return super()._send(step)

    def call(self, prompt: list[int], program: str = "p", **more: Any) -> int:
        place = {name: more.pop(name) for name in ("tenant", "keep", "priority") if name in more}
        return self.submit(prompt, scheduling=Scheduling(program=program, **place), **more)

    def done(self, prompt: list[int], program: str = "p", **more: Any) -> list[int]:
        """Run a request to its end; prompt and output."""
        key = self.call(prompt, program, **more)
        self.run()
        return [*prompt, *self.clients[key].output[0]]

    def collect(self) -> None:
        for message in self.state.outgoing.get(0, []):
            if isinstance(message, Answer):
                self.asked.append(message)
        kept = [m for m in self.state.outgoing.get(0, []) if not isinstance(m, Answer)]
        self.state.outgoing[0] = kept
        super().collect()

    def question(self, program: str = "p", **options: Any) -> None:
        namespace = options.pop("namespace", "")
        self.scheduler.handle(Ask(7, "program", 0, None, namespace, {"program": program, **options}))
        self.collect()

    def told(self, program: str = "p", **options: Any) -> dict[str, Any]:
        """What is told of a program at once."""
        before = len(self.asked)
        self.question(program, **options)
        assert len(self.asked) == before + 1
        answer = self.asked[-1]
        if answer.error is not None:
            raise LookupError(answer.error.code)
        return answer.data

    def end(self, program: str = "p", **options: Any) -> dict[str, Any]:
        return self.told(program, end=True, **options)

    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.scheduler.advance()
        self.collect()
        self.check()

    def crowd(self, tokens: int) -> None:
        """Other prompts come, which take the whole cache."""
        for i in range(0, tokens, 40):
            self.done([2 + i // 40 % 40, *[3 + (i + j) % 40 for j in range(39)]], "", max_tokens=1)

    def cached(self, prompt: list[int], namespace: str = "") -> int:
        return self.state.tree.peek(namespace, messages.pack(prompt), len(prompt))[0]


def run_with_retractions(world: Programs, every: int) -> None:
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


def check_positions(world: Programs) -> None:
    for program, positions in world.computed.items():
        if not program:
            continue
        told = world.told(program)
        sums = told["computed_tokens"] + told["decoded_tokens"] + told["drafted_tokens"]
        assert sums == positions, (program, told)


def test_counts_are_what_was_computed_and_told() -> None:
    world = Programs()
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
    """What Show 3 counts: distinct tokens of the tree, without last ones that nothing needed, and one more
    for each request on a prompt that is wholly cached."""
    world = Programs(num_slots=2048, max_running_requests=4)
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
    world = Programs(
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
    assert (
        sum(told["accepted_tokens"] for told in counts.values()) == world.state.counters.accepted_tokens > 0
    )
    for name, told in counts.items():
        mine = [c for c in world.clients.values() if c.submit.scheduling.program == name]
        assert told["requests"] == len(mine)
        assert told["output_tokens"] == sum(done.n for c in mine for done in c.done.values())
        assert told["prompt_tokens"] == sum(len(c.prompt) for c in mine)
        assert told["cached_tokens"] == sum(c.admitted.verdict.matched for c in mine if c.admitted)
    total = sum(told["output_tokens"] + told["surplus_tokens"] for told in counts.values())
    assert total == world.state.counters.output_tokens + world.state.counters.surplus_tokens
    world.idle()


def test_what_is_computed_again_after_a_retraction_is_counted_apart() -> None:
    world = Programs(max_running_requests=2)
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
    world = Programs()
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


def test_an_end_is_answered_when_the_last_step_is_counted() -> None:
    world = Programs()
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


def test_a_programs_path_outlives_others_and_goes_with_it() -> None:
    world = Programs(num_slots=256)
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


def test_a_program_ends_by_itself_when_none_of_its_requests_is_there_for_a_while() -> None:
    world = Programs(program_timeout=10.0)
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


def test_keep_and_a_program_hold_a_path_each_for_its_own_time() -> None:
    world = Programs(program_timeout=10.0)
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
    world = Programs(num_slots=400, max_running_requests=4)
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
    world = Programs(num_slots=800)
    turns = [2, 3, 4]
    for i in range(20):
        turns = [*world.done(turns, max_tokens=3, ignore_eos=True), 5 + i]
    program = world.state.programs.find(Place("", "", "p"))
    assert program is not None
    assert len(program.paths) <= 2
    world.crowd(2000)
    assert world.cached(turns[:-2]) == len(turns) - 2


def test_the_pins_of_one_program_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_paths, "MAX_PATHS", 3)
    world = Programs()
    for i in range(10):
        world.done([2 + i] * 4, max_tokens=1)
    assert world.state.tree.pinned_tokens == 12
    assert world.end()["released_tokens"] == 12


def test_a_prompt_beyond_what_may_be_pinned_breaks_no_pin() -> None:
    world = Programs(num_slots=256)
    small = world.done([2] * 20, "small", max_tokens=2, ignore_eos=True)[:-1]
    world.done([3] * 100, "large", max_tokens=2, ignore_eos=True)
    assert world.state.tree.pinned_tokens == 21
    world.crowd(1000)
    assert world.cached(small) == 21


def test_pins_give_way_to_requests() -> None:
    world = Programs(num_slots=200, context=200)
    world.done([2] * 30, max_tokens=10, ignore_eos=True)
    key = world.call([3] * 150, "other", max_tokens=50, ignore_eos=True)
    world.run()
    world.expect(key)
    assert world.cached([2] * 30) < 30
    world.end()
    world.check()


def test_namespaces_and_tenants_have_programs_of_their_own() -> None:
    world = Programs()
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
    world = Programs()
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
    world = Programs()
    for name in "abc":
        world.done([2] * 5, name, max_tokens=1)
    assert len(world.state.programs) == 2
    with pytest.raises(LookupError, match="program_not_found"):
        world.told("a")
    assert world.told("b")["requests"] == world.told("c")["requests"] == 1


def test_a_flush_drops_the_pins_and_the_program_goes_on() -> None:
    world = Programs()
    world.done([2] * 10, max_tokens=1)
    world.ask("flush")
    assert world.state.tree.pinned_tokens == 0
    world.done([2] * 10, max_tokens=1)
    assert world.end()["released_tokens"] == 10


def test_without_a_cache_programs_are_counted_all_the_same() -> None:
    world = Programs(disable_radix_cache=True)
    for _ in range(2):
        world.done([2] * 10, max_tokens=2, ignore_eos=True)
    told = world.end()
    assert (told["requests"], told["computed_tokens"], told["released_tokens"]) == (2, 20, 0)


@pytest.mark.parametrize("how", ["worker", "state"])
def test_programs_outlive_what_is_lost(how: str) -> None:
    world = Programs(num_slots=256, max_running_requests=1, program_timeout=10.0)
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
    program = world.state.programs.find(Place("", "", "p"))
    assert program is not None
    assert program.live == (1 if how == "worker" else 0)
    if how == "state":
        world.pass_time(10.0)
        assert len(world.state.programs) == 0


@pytest.mark.parametrize("policy", ["lpm", "lof", "priority", "fair"])
def test_siblings_go_next_to_each_other(policy: str) -> None:
    """Requests that share nothing, of three programs, in turns: each program's go together."""
    world = Programs(num_slots=2048, max_running_requests=1, chunked_prefill_size=256, schedule_policy=policy)
    world.call([2] * 5, "", max_tokens=6, ignore_eos=True)
    world.turn()
    names = ["a", "b", "c"] * 3
    keys = [world.call([3 + i] * 5, name, max_tokens=2, ignore_eos=True) for i, name in enumerate(names)]
    assert order_of(world, keys) == [keys[i] for i in (0, 3, 6, 1, 4, 7, 2, 5, 8)]


@pytest.mark.parametrize("policy", ["fcfs"])
def test_by_arrival_programs_are_nothing_special(policy: str) -> None:
    world = Programs(num_slots=2048, max_running_requests=1, chunked_prefill_size=256, schedule_policy=policy)
    world.call([2] * 5, "", max_tokens=6, ignore_eos=True)
    world.turn()
    keys = [world.call([3 + i] * 5, "ab"[i % 2], max_tokens=2, ignore_eos=True) for i in range(6)]
    assert order_of(world, keys) == keys


def test_a_program_that_goes_on_and_on_overtakes_no_further_than_anything_else() -> None:
    """Each of its requests is followed by another one, of which none shares anything."""
    world = Programs(num_slots=4096, max_running_requests=1, chunked_prefill_size=16)
    world.call([2] * 5, max_tokens=2, ignore_eos=True)
    world.turn()
    stranger = world.call([49] * 10, "", max_tokens=2, ignore_eos=True)
    ahead = 0
    while world.clients[stranger].admitted is None:
        world.call([3 + ahead % 40, 3 + ahead // 40] * 5, max_tokens=2, ignore_eos=True)
        ahead += 1
        for _ in range(3):
            world.turn()
        assert ahead < 10
    assert ahead > 1, "its program's order went first for a while"
    world.run()


def order_of(world: Programs, keys: list[int]) -> list[int]:
    """Run to the end; the keys in the order in which they were admitted."""
    order: list[int] = []
    for _ in range(5000):
        world.turn()
        order += [key for key in keys if world.clients[key].admitted is not None and key not in order]
        if not world.sent and not world.state.requests:
            break
    return order
