"""What rows share is read once, and the result is the reference's all the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sapwood.srt.worker.attention.cascade import Cascade, cascade_of, spared_of
from sapwood.srt.worker.attention.flashinfer import CASCADE_BYTES, FlashInferAttention
from sapwood.srt.worker.attention.paged import Paged, indptr_of
from tests.gpu import flashinfer_double
from tests.gpu.backends import flashinfer_attention, platform_of
from tests.gpu.recorder import Recorder
from tests.gpu.steps import Platform, Step, World, spec_of

Shared = list[tuple[int, int, list[int]]]
Make = Callable[..., tuple[World, FlashInferAttention, Recorder]]


def shared_step(starts: list[int], counts: list[int], shared: Shared) -> Step:
    """Row i of the step is row i of the table."""
    return Step(range(len(starts)), starts, counts, shared)


FOUR = [130, 200, 150, 129]
CASES: dict[str, tuple[Step, int]] = {
    "all share": (shared_step(FOUR, [1, 1, 1, 1], [(0, 128, [0, 1, 2, 3])]), 2),
    "chunks and drafts": (shared_step(FOUR, [1, 40, 3, 9], [(0, 128, [0, 1, 2, 3])]), 2),
    "not neighbours": (shared_step(FOUR, [2, 1, 30, 1], [(0, 128, [0, 2]), (0, 64, [1, 3])]), 2),
    "new tokens right after what is shared": (shared_step([64, 64], [1, 5], [(0, 64, [0, 1])]), 2),
    "some share nothing": (
        shared_step([130, 0, 150, 5, 129], [1, 20, 1, 1, 1], [(0, 128, [0, 2, 4])]), 2,
    ),
    "a tree of two levels": (
        shared_step(
            [200] * 5, [1, 1, 3, 1, 1], [(0, 64, [0, 1, 2, 3, 4]), (64, 128, [0, 3]), (64, 192, [2, 4])]
        ), 3,
    ),
    "a row shares at the first level only, and goes on at once": (
        shared_step([200, 64, 200, 64], [1, 2, 1, 1], [(0, 64, [0, 1, 2, 3]), (64, 192, [0, 2])]), 3,
    ),
    "a tree of four levels": (
        shared_step(
            [300] * 5, [1, 2, 1, 1, 1],
            [(0, 64, [0, 1, 2, 3, 4]), (64, 128, [0, 1, 3, 4]), (128, 192, [1, 3, 4]), (192, 256, [1, 4])],
        ), 3,
    ),
    "two trees": (
        shared_step([200] * 6, [1] * 6, [(0, 64, [0, 2, 4]), (64, 192, [0, 4]), (0, 128, [1, 3])]), 3,
    ),
}  # fmt: skip


@pytest.fixture
def make(platform: Platform) -> Make:
    def made(heads: tuple[int, int] = (6, 2), shared: Any = (), **options: Any) -> Any:
        windows = options.pop("windows", (0,))
        world = World(spec_of(*heads, windows=windows), platform)
        world.share(shared)
        recorder = Recorder(platform.flashinfer)
        options.setdefault("cascade_bytes", 1)
        options.setdefault("uncaptured_bytes", 0)
        return world, flashinfer_attention(world, recorder, **options), recorder

    return made


def check(world: World, attention: FlashInferAttention, step: Step) -> bool:
    return world.differs(attention, step) < world.platform.tolerance


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=["1 a KV head", "3 a KV head", "8 a KV head"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_rows_share_is_read_once_to_the_same_result(
    make: Make, case: tuple[Step, int], heads: tuple[int, int]
) -> None:
    step, levels = case
    world, attention, recorder = make(heads, step.shared)
    assert attention.shares(world.paged(step))
    assert check(world, attention, step)
    (plan,) = recorder.planned("MultiLevel")
    assert len(plan["qo_indptr_arr"]) == levels
    assert all((indptr.diff() > 0).all() for indptr in plan["paged_kv_indptr_arr"]), "a group without KV"


def test_rows_that_share_need_not_be_neighbours(make: Make) -> None:
    shared = [(0, 128, [0, 2, 4]), (0, 192, [1, 3, 5])]
    step = shared_step([200] * 6, [1] * 6, shared)
    world, attention, recorder = make(shared=shared)
    assert check(world, attention, step)
    (plan,) = recorder.planned("MultiLevel")
    assert plan["qo_indptr_arr"][0].tolist() == [0, 3, 6]
    assert plan["paged_kv_indptr_arr"][0].tolist() == [0, 128, 320]


def test_at_every_level_what_rows_share_is_read_by_one_group() -> None:
    cascade = built(CASES["two trees"][0], worth=1)
    assert cascade is not None
    lengths = [sorted(level.kv_indptr.diff().tolist()) for level in cascade.levels[:-1]]
    assert lengths == [[64, 128], [1, 1, 1, 128]]


def test_rows_that_share_nothing_stay_out_of_the_cascade(make: Make) -> None:
    shared = [(0, 128, [0, 2])]
    world, attention, recorder = make(shared=shared)
    assert check(world, attention, shared_step([130, 20, 140, 9], [1, 1, 1, 1], shared))
    (plan,) = recorder.planned("MultiLevel")
    (rest,) = recorder.planned("BatchDecode")
    assert (len(plan["qo_indptr_arr"][-1]), len(rest["indptr"])) == (3, 3)


def test_layers_with_a_window_have_no_cascade(make: Make) -> None:
    shared = [(0, 128, [0, 1, 2])]
    step = shared_step([200, 150, 160], [1, 9, 1], shared)
    world, attention, recorder = make(shared=shared, windows=(16, 0, 16, 150))
    assert check(world, attention, step)
    assert [plan["window_left"] for plan in recorder.planned("MultiLevel")] == [-1]
    assert [plan["window_left"] for plan in recorder.planned("BatchPrefill")] == [15, 149]


def test_step_after_step_with_and_without(make: Make) -> None:
    shared = [(0, 128, [0, 1, 2])]
    world, attention, _ = make(shared=shared)
    for starts, counts in (
        ([130, 128, 200], [1, 50, 1]),
        ([131, 178, 201], [1, 1, 1]),
        ([132, 179, 202], [1, 4, 1]),
    ):
        assert check(world, attention, shared_step(starts, counts, shared))
        assert check(world, attention, shared_step(starts, counts, []))


def test_a_cascade_must_spare_enough_bytes(make: Make) -> None:
    shared = [(0, 128, [0, 1, 2])]
    step = shared_step([130, 140, 150], [1, 1, 1], shared)
    itemsize = make()[0].k[0].element_size()
    spared = 2 * 128 * 2 * 2 * 128 * itemsize  # twice 128 positions of K and V of 2 heads of 128
    for enough, limit in ((True, spared), (False, spared + 1), (False, None)):
        world, attention, recorder = make(shared=shared, cascade_bytes=limit)
        assert attention.shares(world.paged(step)) is enough
        assert check(world, attention, step)
        assert len(recorder.planned("MultiLevel")) == enough


@pytest.mark.parametrize("windows", [(0,), (0, 16, 16)], ids=["full layers", "one full layer of three"])
def test_a_step_that_a_graph_could_take_must_spare_more(make: Make, windows: tuple[int, ...]) -> None:
    shared = [(0, 128, [0, 1, 2])]
    step = shared_step([130, 140, 150], [1, 1, 1], shared)
    itemsize = make()[0].k[0].element_size()
    spared = 2 * 128 * 2 * 2 * 128 * itemsize  # in a layer without a window
    mean = spared // len(windows)
    for enough, limit in ((True, mean), (False, mean + 1)):
        world, attention, recorder = make(shared=shared, windows=windows, uncaptured_bytes=limit)
        assert attention.shares(world.paged(step)) is enough
        assert check(world, attention, step)
        assert len(recorder.planned("MultiLevel")) == 1, "without a graph it is worth it"


@pytest.mark.parametrize(("rows", "enough"), [(9, False), (64, True)])
def test_a_system_prompt_of_few_rows_is_not_worth_a_graph(rows: int, enough: bool) -> None:
    """2048 tokens, in 32 layers of 8 KV heads of 128 channels in 16 bits."""
    spec = spec_of(32, 8, windows=(0,) * 32)
    k = torch.empty(1, 8, 128, dtype=torch.bfloat16)
    pool = SimpleNamespace(k=[k] * 32, v=[k] * 32)
    attention = FlashInferAttention(
        flashinfer_double, spec, pool, torch.bfloat16, k.device, torch.zeros(1, dtype=torch.uint8)
    )
    starts, counts = np.full(rows, 2100, np.int32), np.ones(rows, np.int32)
    indptr = indptr_of(starts + counts)
    indices = torch.zeros(int(indptr[-1]), dtype=torch.int32)
    shared = np.array([0, 2048, rows, *range(rows)], np.int32)
    paged = Paged(starts, counts, indptr_of(counts), indptr, torch.ones(rows).int(), indices, shared)
    assert attention.shares(paged) is enough
    assert cascade_of(paged, CASCADE_BYTES // 4096, 4) is not None, "without a graph it is"


@pytest.mark.parametrize(("q_heads", "enough"), [(64, True), (66, False)])
def test_more_heads_than_one_block_can_merge_have_no_cascade(make: Make, q_heads: int, enough: bool) -> None:
    shared = [(0, 128, [0, 1])]
    step = shared_step([130, 140], [1, 2], shared)
    world, attention, recorder = make((q_heads, 2), shared=shared)
    assert attention.shares(world.paged(step)) is enough
    attention.warm_up()
    assert check(world, attention, step)
    assert len(recorder.planned("MultiLevel")) == enough


def test_deterministic_has_no_cascade(make: Make) -> None:
    shared = [(0, 128, [0, 1, 2])]
    step = shared_step([130, 140, 150], [1, 1, 1], shared)
    world, attention, recorder = make(shared=shared, deterministic=True)
    assert not attention.shares(world.paged(step))
    assert check(world, attention, step)
    assert not recorder.planned("MultiLevel")


def built(step: Step, worth: int, group: int = 1) -> Cascade | None:
    world = World(spec_of(2, 2), platform_of("double float32"))
    return cascade_of(world.paged(step), worth, group)


def test_of_many_levels_those_remain_that_spare_most() -> None:
    step = CASES["a tree of four levels"][0]
    cascade = built(step, worth=1)
    assert cascade is not None
    # [0, 64) of 5 rows and [64, 128) of 4 of them spare 256 and 192 reads, the next two levels 128 and 64.
    assert [level.kv_indptr.diff().tolist() for level in cascade.levels] == [
        [64],
        [64, 1],
        [173, 174, 173, 173, 236],
    ]


def test_what_a_level_does_not_share_any_more_the_next_one_reads() -> None:
    shared = [(0, 64, [0, 1, 2, 3]), (64, 256, [0, 1]), (64, 256, [2, 3])]
    step = shared_step([300] * 4, [1] * 4, shared)
    cascade = built(step, worth=300)
    assert cascade is not None
    # The first level spares 192 reads only, as it is short. Two groups read it then, and spare 512.
    assert [level.kv_indptr.diff().tolist() for level in cascade.levels] == [[256, 256], [45] * 4]
    assert built(step, worth=513) is None


def test_a_groups_queries_are_read_for_tile_by_tile() -> None:
    """Of 4 query heads a KV head, 64 rows are 256 queries. Alone these are two tiles of 128; among 40 rows of
    which each is a group of its own the mean is small, and they are 16 tiles of 16."""
    together = [(0, 64, [*range(104)]), (64, 128, [*range(64)])]
    assert spared(128, together[:1], rows=104) == 64 * (104 - 4)
    assert spared(128, [(0, 64, [*range(64)])], rows=64) == 64 * (64 - 2)
    assert spared(192, together, rows=104) == 64 * (104 - 4) + 64 * (64 - 16)


def spared(start: int, shared: Shared, rows: int) -> int:
    world = World(spec_of(2, 2), platform_of("double float32"), rows=rows, room=start + 1)
    step = shared_step([start] * rows, [1] * rows, shared)
    return spared_of(world.paged(step), worth=1, group=4)


def test_tokens_in_order_are_not_gathered() -> None:
    step = shared_step([130, 140, 150], [1, 3, 1], [(0, 64, [0, 1, 2])])
    cascade = built(step, worth=1)
    assert cascade is not None
    assert cascade.tokens == slice(0, 5)
    mixed = built(shared_step([130] * 4, [1, 3, 1, 2], [(0, 64, [0, 2]), (0, 128, [1, 3])]), worth=1)
    assert mixed is not None
    assert isinstance(mixed.tokens, torch.Tensor)
    assert mixed.tokens.tolist() == [0, 4, 1, 2, 3, 5, 6]


def test_a_stretch_that_leaves_a_gap_is_not_shared() -> None:
    assert built(shared_step([200, 200], [1, 1], [(64, 128, [0, 1])]), worth=1) is None
