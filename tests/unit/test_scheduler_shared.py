"""Rows that have a prefix in the same slots are named together; every step is checked by the simulation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.messages import Step, StepResult
from sapwood.srt.models.decoder import Batch
from sapwood.srt.scheduler import shared
from sapwood.srt.scheduler.rows import Rows
from sapwood.srt.worker.cpu import make_runner
from tests.models import source_of, tiny_llama
from tests.simulation import VOCAB, World, check_shared
from tests.worker_bench import ids_of

Stretch = tuple[int, int, list[int]]


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=count)


def stretches(step: Step) -> list[Stretch]:
    """Begin, end, and the rows themselves."""
    rows, left, found = messages.unpack(step.rows), messages.unpack(step.shared).tolist(), []
    while left:
        members, end = left[3 : 3 + left[2]], 3 + left[2]
        found.append((left[0], left[1], sorted(int(rows[i]) for i in members)))
        left = left[end:]
    return found


def rows_of(world: World, keys: list[int]) -> list[int]:
    return sorted(world.state.sequences[key].row for key in keys)


def until_all_decode(world: World, keys: list[int]) -> Step:
    """The first step in which all of the sequences decode, and nothing else is done."""
    for _ in range(500):
        world.turn()
        sequences = [world.state.sequences[key] for key in keys]
        rows = messages.unpack(world.steps[-1].rows).tolist()
        running = all(s.row in rows for s in sequences)
        if running and messages.unpack(world.steps[-1].ids).tolist() == [-1] * len(keys):
            return world.steps[-1]
    raise AssertionError("they never decode together")


def test_questions_over_one_system_prompt() -> None:
    world = World(num_slots=8192, context=1300, max_running_requests=16, chunked_prefill_size=256)
    system = text(0, 1024)
    keys = [world.submit([*system, *text(i + 1, 64)], max_tokens=40, ignore_eos=True) for i in range(16)]
    step = until_all_decode(world, keys)
    assert stretches(step) == [(0, 1024, rows_of(world, keys))]
    world.run()
    for key in keys:
        world.expect(key)
    world.idle()


def test_a_tree_of_examples() -> None:
    world = World(num_slots=8192, context=900, max_running_requests=32, chunked_prefill_size=256)
    top, examples = text(0, 512), [text(i + 1, 256) for i in range(4)]
    keys = [
        world.submit([*top, *examples[i % 4], *text(10 + i, 32)], max_tokens=60, ignore_eos=True)
        for i in range(32)
    ]
    step = until_all_decode(world, keys)
    first, *rest = stretches(step)
    assert first == (0, 512, rows_of(world, keys))
    assert sorted(rest) == sorted((512, 768, rows_of(world, keys[group::4])) for group in range(4))
    world.run()
    for key in keys:
        world.expect(key)


@pytest.mark.parametrize("disabled", [False, True])
def test_choices_share_their_prompt(disabled: bool) -> None:
    world = World(num_slots=2048, context=400, disable_radix_cache=disabled)
    key = world.submit(text(0, 200), n=5, max_tokens=40, ignore_eos=True)
    while len(world.state.sequences) < 5:
        world.turn()
    step = until_all_decode(world, [key + i for i in range(5)])
    assert stretches(step) == [(0, 192, rows_of(world, [key + i for i in range(5)]))]
    world.run()
    world.expect(key)


def test_a_prompt_under_way_shares_with_rows_that_decode() -> None:
    world = World(num_slots=2048, context=600, chunked_prefill_size=32)
    system = text(0, 130)
    first = world.submit([*system, 3], max_tokens=60, ignore_eos=True)
    until_all_decode(world, [first])
    second = world.submit([*system, *text(1, 100)], max_tokens=4, ignore_eos=True)
    while world.clients[second].admitted is None:
        world.turn()
    step = world.steps[-1]
    assert messages.unpack(step.counts).tolist() == [1, 31]
    assert messages.unpack(step.starts)[1] == 130
    assert stretches(step) == [(0, 128, rows_of(world, [first, second]))]
    world.run()


def test_what_a_row_computed_twice_is_its_own() -> None:
    """One that reads its prompt computes what the tree has, and so do others at the same time."""
    world = World(num_slots=4096, context=400, chunked_prefill_size=64)
    prompt = text(0, 256)
    first = world.submit([*prompt, 2], max_tokens=60, ignore_eos=True)
    until_all_decode(world, [first])
    twice = world.submit([*prompt, 3, 4], max_tokens=40, ignore_eos=True, logprobs=0, logprob_start=129)
    third = world.submit([*prompt, 3, 5], max_tokens=40, ignore_eos=True)
    step = until_all_decode(world, [first, twice, third])
    rows = rows_of(world, [first, twice, third])
    without = rows_of(world, [first, third])
    assert stretches(step) == [(0, 128, rows), (128, 256, without)]
    world.run()
    for key in (first, twice, third):
        world.expect(key)


def test_a_row_that_comes_or_goes_changes_the_stretches() -> None:
    world = World(num_slots=4096, context=400, chunked_prefill_size=64)
    prompt = text(0, 128)
    keys = [world.submit([*prompt, i], max_tokens=60, ignore_eos=True) for i in range(2, 5)]
    until_all_decode(world, keys)
    world.cancel(keys[1])
    left = [keys[0], keys[2]]
    assert stretches(until_all_decode(world, left)) == [(0, 128, rows_of(world, left))]
    # It takes the row that was given up, and shares nothing.
    other = world.submit(text(1, 140), max_tokens=60, ignore_eos=True)
    step = until_all_decode(world, [*left, other])
    assert stretches(step) == [(0, 128, rows_of(world, left))]
    world.cancel(keys[0])
    assert until_all_decode(world, [keys[2], other]).shared == b""
    world.run()


def test_a_row_that_is_given_to_another_at_once_is_not_taken_for_the_old_one() -> None:
    world = World(num_slots=4096, context=400, chunked_prefill_size=256)
    prompt = text(0, 128)
    keys = [world.submit([*prompt, i], max_tokens=60, ignore_eos=True) for i in range(2, 4)]
    before = until_all_decode(world, keys)
    world.cancel(keys[1])
    world.submit(text(1, 140), max_tokens=60, ignore_eos=True)
    planned = len(world.steps)
    world.turn()
    after = world.steps[planned]
    assert (after.rows, after.shared) == (before.rows, b"")
    world.run()


def test_a_retracted_row_shares_again_when_it_is_resumed() -> None:
    world = World(num_slots=420, context=400, chunked_prefill_size=64)
    prompt, lengths = text(0, 192), [40, 60, 80, 100, 110]
    keys = [world.submit([*prompt, 2 + i], max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
    shared_again = 0
    while world.state.requests:
        world.turn()
        resumed = {s.row for s in world.state.sequences.values() if s.resumed and s.row >= 0}
        shared_again += any(resumed & set(rows) for _, _, rows in stretches(world.steps[-1]))
    assert world.state.counters.retracted > 0
    assert shared_again > 10
    for key in keys:
        world.expect(key)
    world.idle()


def test_less_than_a_tile_is_not_named() -> None:
    world = World(num_slots=2048, context=200)
    prompt = text(0, 63)
    keys = [world.submit([*prompt, i], max_tokens=40, ignore_eos=True) for i in range(2, 5)]
    assert until_all_decode(world, keys).shared == b""


def test_stretches_are_found_once_for_all_plain_decodes_of_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_slots=2048, context=400)
    keys = [world.submit([*text(0, 128), i], max_tokens=100, ignore_eos=True) for i in range(2, 6)]
    until_all_decode(world, keys)
    monkeypatch.setattr(shared.SharedPrefixes, "_find", lambda *_: pytest.fail("looked for again"))
    before = len(world.steps)
    for _ in range(40):
        world.turn(check=False)
    assert len(world.steps) == before + 40
    assert all(stretches(step) == [(0, 128, rows_of(world, keys))] for step in world.steps[before:])


def test_rows_that_are_in_every_second_step_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those with drafts are, each in the steps where the other one is not."""
    rows = Rows(8, 300)
    rows.active[:6], rows.order[:], rows.prompt_end[:] = True, range(8), 200
    rows.slots[:, :200] = range(200)

    def step(members: list[int]) -> list[Stretch]:
        chosen = np.array(members, dtype=np.int32)
        named = messages.unpack(prefixes.of(rows, chosen, np.full(len(members), 200, np.int32))).tolist()
        begin, end, count, *indices = named
        assert count == len(indices)
        return [(begin, end, [members[i] for i in indices])]

    prefixes = shared.SharedPrefixes()
    first, second = [0, 1, 2, 4], [5, 0, 3, 2]
    for members in (first, second):
        assert step(members) == [(0, 192, members)]
    monkeypatch.setattr(shared.SharedPrefixes, "_add", lambda *_: pytest.fail("compared again"))
    assert step([4, 3]) == [(0, 192, [4, 3])]
    step(first)
    step(second)
    monkeypatch.setattr(shared.SharedPrefixes, "_find", lambda *_: pytest.fail("looked for again"))
    for members in (first, second, first, second):
        assert step(members) == [(0, 192, members)]


@pytest.mark.parametrize("seed", range(200))
def test_stretches_of_any_slots(seed: int) -> None:
    """Rows that copy parts of others' slots, at places that are no multiples of a tile, in any order."""
    rng = random.Random(seed)
    capacity, longest = 12, 64 * 5 + 30
    rows, fresh = Rows(capacity, longest), iter(range(10**6))
    for row in range(capacity):
        slots = [next(fresh) for _ in range(longest)]
        if row and rng.random() < 0.8:
            matched = rng.randrange(longest)
            slots[:matched] = rows.slots[rng.randrange(row), :matched].tolist()
            rows.seated[row] = matched
            if rng.random() < 0.3:
                # As of a row that computed some of it at the same time as another one.
                own = rng.randrange(longest)
                slots[own] = next(fresh)
        rows.slots[row, :longest] = slots
    members = np.array(rng.sample(range(capacity), rng.randint(1, capacity)), dtype=np.int32)
    starts = np.array([rng.randint(rows.seated[row], longest) for row in members], dtype=np.int32)
    rows.active[:], rows.order[:], rows.prompt_end[:] = True, range(capacity), longest
    prefixes = shared.SharedPrefixes()
    for _ in range(4):
        found = prefixes.of(rows, members, starts)
        step = Step(
            number=0, released=b"", admitted=[], rows=messages.pack(members), starts=messages.pack(starts),
            counts=b"", ids=b"", slots=b"", samples=b"", shared=found,
        )  # fmt: skip
        check_shared(step, rows.slots)
        # In the next step some rows are missing or new, some have gone on, and one is another's now.
        members = np.array(rng.sample(range(capacity), rng.randint(1, capacity)), dtype=np.int32)
        starts = np.array([rng.randint(rows.seated[row], longest) for row in members], dtype=np.int32)
        row = int(members[0])
        rows.order[row] += capacity
        rows.slots[row, rows.seated[row] : longest] = [next(fresh) for _ in range(longest - rows.seated[row])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


class Served(World):
    """The simulation with a real model in the worker's place, which is told of shared prefixes or not."""

    def __init__(self, folder: Path, told: bool) -> None:
        config = make(
            model_path=str(folder), max_total_tokens=2000, max_running_requests=8, num_threads=1,
            random_seed=1, chunked_prefill_size=48,
        )  # fmt: skip
        source = source_of(folder)
        runner, _pool, _facts = make_runner(config, source)
        self.named = self.told = 0
        forward = runner._forward

        def count(batch: Batch) -> torch.Tensor:
            self.told += batch.shared is not None
            return forward(batch)

        def run(step: Step) -> StepResult:
            self.named += len(step.shared) > 0
            if not told:
                step.shared = b""
            return runner.run(step)

        runner._forward = count

        self.begin(config, source, 2000, run)

    def answers(self) -> Any:
        top = ids_of(150, 1)
        below = [ids_of(70, 2), ids_of(70, 3)]
        for i in range(9):
            self.submit(
                [*top, *below[i % 2], *ids_of(9, 4 + i)], max_tokens=10, ignore_eos=True, logprobs=2,
                n=1 + i % 3 // 2, temperature=0.8,
            )  # fmt: skip
        self.run(check=False)
        return [(client.output, client.logprobs) for client in self.clients.values()]


def test_a_real_model_answers_alike_whether_it_is_told_or_not(folder: Path) -> None:
    told, untold = Served(folder, True), Served(folder, False)
    assert told.answers() == untold.answers()
    assert told.told == told.named == untold.named > 5
    assert untold.told == 0
