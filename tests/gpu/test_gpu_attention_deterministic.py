"""--deterministic: a row's attention has the same bits whatever it is computed with."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.backends import flashinfer_attention
from tests.gpu.recorder import Recorder
from tests.gpu.steps import Platform, Step, World, spec_of

ROWS = [(3, 90, 1), (6, 0, 13), (1, 128, 1), (0, 10, 4), (5, 70, 64), (2, 300, 1), (4, 5, 2), (7, 100, 130)]
WINDOWS = (0, 24)


@pytest.mark.parametrize("q_heads", [2, 6, 8])
def test_a_row_alone_and_in_any_company_has_the_same_bits(platform: Platform, q_heads: int) -> None:
    world = World(spec_of(q_heads, 2, windows=WINDOWS), platform)
    attention = flashinfer_attention(world, deterministic=True)
    qkv = {row: world.qkv(Step.of(row)) for row in ROWS}
    alone = {row: [world.run(attention, Step.of(row), qkv[row], layer) for layer in (0, 1)] for row in ROWS}
    for company in (ROWS, ROWS[::-1], ROWS[:4], ROWS[::2], [row for row in ROWS if row[2] == 1]):
        step = Step.of(*company)
        counts = [row[2] for row in company]
        together = torch.cat([qkv[row] for row in company])
        assert world.differs(attention, step, together) < platform.tolerance
        for layer in (0, 1):
            for row, found in zip(
                company, world.attended(attention, together, layer).split(counts), strict=True
            ):
                assert torch.equal(found, alone[row][layer]), (row, layer)


def test_a_row_in_a_graph_and_without_has_the_same_bits(platform: Platform) -> None:
    world = World(spec_of(6, 2, windows=WINDOWS), platform)
    attention = flashinfer_attention(world, deterministic=True)
    step = Step.of((3, 90, 1), (1, 128, 1), (2, 300, 1))
    qkv = world.qkv(step)
    decode = attention.for_graph(3, 2000)
    for layer in (0, 1):
        assert torch.equal(world.run(decode, step, qkv, layer), world.run(attention, step, qkv, layer))


@pytest.mark.parametrize("q_heads", [2, 6, 8])
def test_nothing_is_planned_that_depends_on_the_batch(platform: Platform, q_heads: int) -> None:
    recorder = Recorder(platform.flashinfer)
    world = World(spec_of(q_heads, 2, windows=WINDOWS), platform)
    attention = flashinfer_attention(world, recorder, deterministic=True)
    attention.plan(world.paged(Step.of(*ROWS)))
    attention.for_graph(1, 400).plan(world.paged(Step.of((2, 300, 1))))
    assert all(arguments["backend"] == "fa2" for _, arguments in recorder.made)
    assert all(arguments["disable_split_kv"] for _, arguments in recorder.plans)
    assert all(arguments["fixed_split_size"] is None for _, arguments in recorder.plans)
    decodes = [arguments for name, arguments in recorder.made if name.startswith("BatchDecode")]
    assert all(arguments["use_tensor_cores"] for arguments in decodes)
    group = q_heads // 2
    for plan in recorder.planned("BatchPrefill"):
        lengths = plan["qo_indptr"].diff()
        assert (lengths > 1).all()
        tiles = {tile(int(length), group) for length in lengths}
        assert tiles == {tile(int(lengths.sum()) // len(lengths), group)}, "a row has another tile than alone"


def tile(queries: int, group: int) -> int:
    """The tile of queries times heads that flashinfer 0.7.4 chooses for rows of that many, on the mean."""
    return next((size for size in (16, 64) if queries * group <= size), 128)
