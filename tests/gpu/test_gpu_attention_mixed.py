"""In a step of decodes and of longer rows, each kind is run by the kernels made for it."""

from __future__ import annotations

import pytest

from tests.gpu.backends import flashinfer_attention
from tests.gpu.recorder import Recorder
from tests.gpu.steps import Platform, Step, World, spec_of

IN_ORDER = Step.of((3, 90, 1), (1, 128, 1), (2, 300, 1), (6, 0, 33), (0, 10, 4), (5, 70, 64))
OUT_OF_ORDER = Step.of((6, 0, 33), (3, 90, 1), (0, 10, 4), (1, 128, 1), (5, 70, 64), (2, 300, 1))
WINDOWS = (0, 16)


@pytest.mark.parametrize("q_heads", [2, 6, 8])
@pytest.mark.parametrize("step", [IN_ORDER, OUT_OF_ORDER], ids=["decodes first", "in any order"])
def test_decodes_have_the_decode_kernel_and_others_prefill(
    platform: Platform, step: Step, q_heads: int
) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(q_heads, 2, windows=WINDOWS), platform)
    attention = flashinfer_attention(world, recorder, mixed_bytes=1)
    assert world.differs(attention, step) < platform.tolerance
    assert [plan["indptr"].diff().tolist() for plan in recorder.planned("BatchDecode")] == [
        [91, 129, 301]
    ] * 2
    assert [plan["qo_indptr"].diff().tolist() for plan in recorder.planned("BatchPrefill")] == [
        [33, 4, 64]
    ] * 2


def test_decodes_that_come_first_are_a_stretch_of_the_step_and_copied_nowhere(platform: Platform) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(6, 2), platform)
    paged = world.paged(IN_ORDER)
    flashinfer_attention(world, recorder, mixed_bytes=1).plan(paged)
    (decode,), (prefill,) = recorder.planned("BatchDecode"), recorder.planned("BatchPrefill")
    begin = paged.kv_indices.data_ptr()
    assert decode["indices"].data_ptr() == begin
    assert prefill["paged_kv_indices"].data_ptr() == begin + 4 * (91 + 129 + 301)


def test_decodes_that_read_little_go_with_the_others(platform: Platform) -> None:
    world = World(spec_of(6, 2), platform)
    positions = 91 + 129 + 301
    read = positions * 2 * 2 * 128 * platform.kv_dtype.itemsize
    for limit, kernels in ((read, ["BatchDecode", "BatchPrefill"]), (2 * read, ["BatchPrefill"])):
        recorder = Recorder(platform.flashinfer)
        attention = flashinfer_attention(world, recorder, mixed_bytes=limit)
        assert world.differs(attention, IN_ORDER) < platform.tolerance
        assert [name.split("With")[0] for name, _ in recorder.plans] == kernels


LONG = Step.of((3, 90, 1), (1, 128, 1), (2, 300, 1), (6, 200, 33), (0, 10, 4), (5, 70, 64), (4, 30, 65))
LONG_FIRST = Step.of((4, 30, 65), (3, 90, 1), (0, 10, 4), (7, 0, 80), (1, 128, 1), (5, 70, 64))


@pytest.mark.parametrize("q_heads", [2, 6, 8])
@pytest.mark.parametrize("step", [LONG, LONG_FIRST], ids=["the long one last", "in any order"])
def test_short_rows_are_apart_from_long_ones(platform: Platform, step: Step, q_heads: int) -> None:
    """More than 64 tokens of one row change FlashInfer's kernel for all that are planned together."""
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(q_heads, 2, windows=WINDOWS), platform)
    attention = flashinfer_attention(world, recorder, mixed_bytes=1)
    assert world.differs(attention, step) < platform.tolerance
    counts = [count for count in step.counts if count > 1]
    kinds = [[n for n in counts if n <= 64], [n for n in counts if n > 64]]
    assert [plan["qo_indptr"].diff().tolist() for plan in recorder.planned("BatchPrefill")] == kinds * 2
    assert len(recorder.planned("BatchDecode")) == 2
    assert len({name for name, _ in recorder.made}) == 2
    assert len(recorder.made) == 6, "no two parts of a step share a wrapper"


def test_shorter_rows_that_read_little_go_with_the_next_longer(platform: Platform) -> None:
    step = Step.of((3, 90, 1), (1, 128, 1), (6, 200, 33), (0, 10, 4), (5, 70, 80))
    world = World(spec_of(6, 2), platform)
    decodes, short = 91 + 129, 233 + 14
    position = 2 * 2 * 128 * platform.kv_dtype.itemsize
    for read, prefills in (
        (decodes, [[33, 4], [80]]),
        (decodes + 1, [[1, 1, 33, 4], [80]]),
        (decodes + short, [[1, 1, 33, 4], [80]]),
        (decodes + short + 1, [[1, 1, 33, 4, 80]]),
    ):
        recorder = Recorder(platform.flashinfer)
        attention = flashinfer_attention(world, recorder, mixed_bytes=read * position)
        assert world.differs(attention, step) < platform.tolerance
        assert [plan["qo_indptr"].diff().tolist() for plan in recorder.planned("BatchPrefill")] == prefills
        assert len(recorder.planned("BatchDecode")) == (read == decodes)


def test_draft_rows_are_no_decodes(platform: Platform) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(6, 2), platform)
    attention = flashinfer_attention(world, recorder, mixed_bytes=1)
    assert world.differs(attention, Step.of((4, 30, 5), (2, 0, 3), (7, 255, 2))) < platform.tolerance
    assert not recorder.planned("BatchDecode")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_decode_step_is_planned_from_the_steps_own_page_table(
    platform: Platform, deterministic: bool
) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(6, 2, windows=WINDOWS), platform)
    paged = world.paged(Step.of((3, 90, 1), (0, 64, 1), (5, 63, 1)))
    flashinfer_attention(world, recorder, deterministic=deterministic).plan(paged)
    assert [plan["indices"] is paged.kv_indices for plan in recorder.planned("BatchDecode")] == [True, True]


def test_classes_of_rows_are_copied_once_for_all_windows(platform: Platform) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(6, 2, windows=WINDOWS), platform)
    paged = world.paged(Step.of((3, 90, 1), (6, 0, 33), (1, 128, 1), (0, 10, 4)))
    flashinfer_attention(world, recorder, deterministic=True).plan(paged)
    tables = [plan["indices"].data_ptr() for plan in recorder.planned("BatchDecode")]
    assert len(tables) == 2
    assert len(set(tables)) == 1
