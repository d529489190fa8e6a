"""Decode in fixed buffers, which a CUDA graph may capture: replanned before each replay, and padded."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.backends import flashinfer_attention
from tests.gpu.recorder import Recorder
from tests.gpu.steps import Platform, Step, World, spec_of

WINDOWS = (0, 16, 0)


def world_of(platform: Platform, windows: tuple[int, ...] = WINDOWS, q_heads: int = 6) -> World:
    return World(spec_of(q_heads, 2, windows=windows), platform)


def padded(world: World, step: Step, rows: int) -> Step:
    """With dummy rows at position 0, whose slot is nobody's: here the table's last row has it."""
    world.table[-1, 0] = world.dummy
    pad = rows - len(step.rows)
    return Step([*step.rows, *[world.rows - 1] * pad], [*step.starts, *[0] * pad], [*step.counts, *[1] * pad])


STEPS = [
    Step.of((0, 10, 1), (3, 200, 1), (5, 63, 1)),
    Step.of((3, 201, 1), (0, 11, 1)),
    Step.of((1, 0, 1), (2, 255, 1), (4, 64, 1), (6, 300, 1)),
    Step.of((5, 64, 1)),
]


@pytest.mark.parametrize("q_heads", [2, 6, 8])
def test_a_decode_is_replanned_for_other_rows_and_lengths(platform: Platform, q_heads: int) -> None:
    world = world_of(platform, q_heads=q_heads)
    decode = flashinfer_attention(world).for_graph(4, 2000)
    for step in STEPS:
        full = padded(world, step, 4)
        assert world.differs(decode, full) < platform.tolerance


def test_sizes_share_their_buffers_and_take_turns(platform: Platform) -> None:
    world = world_of(platform)
    attention = flashinfer_attention(world)
    decodes = {rows: attention.for_graph(rows, 2000) for rows in (4, 2, 1)}
    for step in (*STEPS, *STEPS[::-1]):
        rows = min(size for size in decodes if size >= len(step.rows))
        assert world.differs(decodes[rows], padded(world, step, rows)) < platform.tolerance
        assert world.differs(attention, step) < platform.tolerance


def test_a_captured_decode_reads_what_was_planned_last(platform: Platform) -> None:
    """On a CPU a replay is a call."""
    world = world_of(platform)
    decode = flashinfer_attention(world).for_graph(4, 2000)
    qkv = world.qkv(padded(world, STEPS[0], 4))
    out = torch.zeros(3, 4, world.spec.q_heads * world.spec.head_dim, dtype=qkv.dtype, device=qkv.device)

    def attend() -> None:
        for layer in range(3):
            decode.attend(layer, qkv, out[layer])

    replay = attend
    decode.plan(world.paged(padded(world, Step([], [], []), 4)))
    if platform.device.type == "cuda":
        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        replay = graph.replay
    for step in STEPS:
        full = padded(world, step, 4)
        decode.plan(world.paged(full))
        replay()
        assert max(world.error(out[layer], full, qkv, layer) for layer in range(3)) < platform.tolerance


def test_the_sizes_of_a_lane_have_one_room_for_schedules_a_window(platform: Platform) -> None:
    """8 MiB each: a server has tens of sizes."""
    recorder = Recorder(platform.flashinfer)
    attention = flashinfer_attention(world_of(platform), recorder)
    decodes = [attention.for_graph(rows, 2000) for rows in (4, 2)]
    rooms = [
        [part.wrapper._int_workspace_buffer.data_ptr() for (part,) in decode._parts.values()]
        for decode in decodes
    ]
    assert rooms[0] == rooms[1]
    assert len(set(rooms[0])) == 2, "layers without a window, and of 16"


def test_the_sizes_of_a_lane_have_one_pinned_room_a_window(platform: Platform) -> None:
    """8 MiB each, which no other process has then. Another lane has its own: its copy may not be over."""
    world = world_of(platform)
    lanes = [flashinfer_attention(world) for _ in range(2)]
    rooms = [
        {
            window: part.wrapper._pin_memory_int_workspace_buffer.data_ptr()
            for window, (part,) in attention.for_graph(rows, 2000)._parts.items()
        }
        for attention in lanes
        for rows in (4, 2, 1)
    ]
    assert rooms[:3] == [rooms[0]] * 3
    assert rooms[3:] == [rooms[3]] * 3
    assert len({*rooms[0].values(), *rooms[3].values()}) == 4


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=["1 a KV head", "3 a KV head"])
def test_a_window_is_read_alone_which_only_tensor_cores_do(
    platform: Platform, heads: tuple[int, int]
) -> None:
    for window in (0, 16):
        recorder = Recorder(platform.flashinfer)
        world = World(spec_of(*heads, windows=(window,)), platform)
        attention = flashinfer_attention(world, recorder)
        assert world.differs(attention, STEPS[0]) < platform.tolerance
        assert world.differs(attention.for_graph(3, 2000), STEPS[0]) < platform.tolerance
        fp8 = platform.kv_dtype.itemsize == 1
        assert [made["use_tensor_cores"] for _, made in recorder.made] == [window > 0 or fp8] * 2


def test_another_number_of_rows_is_refused(platform: Platform) -> None:
    world = world_of(platform)
    decode = flashinfer_attention(world).for_graph(4, 2000)
    with pytest.raises(ValueError, match="batch size"):
        decode.plan(world.paged(STEPS[0]))


def test_more_slots_than_there_is_room_for_are_refused(platform: Platform) -> None:
    world = world_of(platform)
    decode = flashinfer_attention(world).for_graph(2, 300)
    decode.plan(world.paged(Step.of((0, 198, 1), (1, 100, 1))))
    with pytest.raises(ValueError, match="buffer"):
        decode.plan(world.paged(Step.of((0, 199, 1), (1, 100, 1))))


def test_graphs_take_the_kernels_that_decodes_have_without_them(platform: Platform) -> None:
    """The same rows, the same bits or nearly: a server changes over while it runs."""
    for q_heads, kv_heads, cores in ((6, 2, False), (8, 2, True)):
        recorder = Recorder(platform.flashinfer)
        world = World(spec_of(q_heads, kv_heads), platform)
        attention = flashinfer_attention(world, recorder)
        attention.plan(world.paged(STEPS[0]))
        attention.for_graph(3, 2000).plan(world.paged(STEPS[0]))
        (_, eager), (_, graph) = recorder.made
        cores = cores or platform.kv_dtype.itemsize == 1
        assert eager["use_tensor_cores"] is graph["use_tensor_cores"] is cores
        assert eager["backend"] == graph["backend"] == "fa2"
