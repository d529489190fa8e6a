"""Every kind of step, by each attention that a GPU may have, is what the reference makes of the same pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.srt.errors import ConfigError
from sapwood.srt.worker.attention import gathered
from sapwood.srt.worker.attention.flashinfer import require_supported
from sapwood.srt.worker.attention.gathered import GatheredAttention
from tests.gpu.backends import Backend
from tests.gpu.ops_double import append_paged_kv_cache
from tests.gpu.steps import Step, spec_of

HEADS = [(2, 2), (6, 2), (8, 2), (8, 1)]
"""1, 3, 4 and 8 query heads a KV head."""
GROUPS = [f"{q // kv} a KV head" for q, kv in HEADS]

DECODES = Step.of((3, 0, 1), (0, 64, 1), (5, 63, 1), (1, 200, 1), (7, 17, 1))
CHUNKS = Step.of((2, 0, 40), (6, 100, 7), (1, 64, 65))
DRAFTS = Step.of((4, 30, 5), (2, 0, 3), (7, 255, 2))
MIXED = Step.of((3, 90, 1), (6, 0, 33), (1, 128, 1), (0, 10, 4), (5, 70, 64), (2, 300, 1))
STEPS = {"decodes": DECODES, "chunks": CHUNKS, "drafts": DRAFTS, "mixed": MIXED}


@pytest.mark.parametrize("heads", HEADS, ids=GROUPS)
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_a_step_is_as_the_reference(backend: Backend, step: Step, heads: tuple[int, int]) -> None:
    world = backend.world(*heads)
    assert world.differs(backend.attention(world), step) < backend.tolerance


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("step", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_heads_of_another_size(backend: Backend, step: Step, head_dim: int) -> None:
    world = backend.world(8, 2, head_dim=head_dim)
    assert world.differs(backend.attention(world), step) < backend.tolerance


@pytest.mark.parametrize("start", [0, 1, 63, 64, 200])
def test_a_chunk_sees_its_cached_prefix_and_of_itself_what_came_before(backend: Backend, start: int) -> None:
    world = backend.world()
    assert world.differs(backend.attention(world), Step.of((2, start, 50))) < backend.tolerance


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_prompt_in_chunks_is_the_prompt_at_once(backend: Backend, size: int) -> None:
    world = backend.world()
    attention = backend.attention(world)
    whole = Step.of((4, 0, 150))
    qkv = world.qkv(whole)
    parts = [
        world.run(attention, Step.of((4, at, len(part))), part)
        for at, part in zip(range(0, 150, size), qkv.split(size), strict=True)
    ]
    assert world.error(torch.cat(parts), whole, qkv) < backend.tolerance


def test_a_row_that_comes_back_in_other_slots_is_the_same(backend: Backend) -> None:
    world = backend.world()
    attention = backend.attention(world)
    before, after = Step.of((0, 90, 1), (1, 30, 9)), Step.of((6, 90, 1), (5, 30, 9))
    qkv = world.qkv(before)
    gone = world.run(attention, before, qkv)
    for old, new in ((0, 6), (1, 5)):
        for pool in (*world.k, *world.v):
            bits = pool.view(torch.uint8)  # torch does not index fp8
            slots = world.table.long().to(pool.device)
            bits[slots[new]] = bits[slots[old]]
            bits[slots[old]] = 0
    assert torch.equal(world.run(attention, after, qkv), gone)


@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("window", [1, 16, 65, 400])
def test_a_layer_with_a_window_sees_that_many_positions(backend: Backend, step: Step, window: int) -> None:
    world = backend.world(windows=(window, 0, window, 24))
    assert world.differs(backend.attention(world), step) < backend.tolerance


@pytest.mark.parametrize("step", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_scores_are_scaled_as_the_model_says(backend: Backend, step: Step) -> None:
    world = backend.world(query_scalar=16.0)
    assert world.differs(backend.attention(world), step) < backend.tolerance


def test_one_attention_takes_step_after_step(backend: Backend) -> None:
    world = backend.world(windows=(0, 32))
    attention = backend.attention(world)
    for step in (MIXED, DECODES, CHUNKS, Step.of((1, 5, 1)), DRAFTS, DECODES):
        assert world.differs(attention, step) < backend.tolerance


def test_lanes_do_not_disturb_each_other(backend: Backend) -> None:
    world = backend.world()
    one, two = backend.attention(world), backend.attention(world)
    qkv = world.qkv(MIXED)
    one.plan(world.paged(MIXED))
    two.plan(world.paged(DECODES))
    assert world.error(world.attended(one, qkv), MIXED, qkv) < backend.tolerance


@pytest.mark.parametrize("seed", range(6))
def test_any_step_is_as_the_reference(backend: Backend, seed: int) -> None:
    world = backend.world(8, 2, windows=(0, 20))
    random = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=random))

    rows = torch.randperm(8, generator=random)[: 1 + draw(8)].tolist()
    counts = [1 if draw(2) else 1 + draw(90) for _ in rows]
    step = Step(rows, [draw(200) for _ in rows], counts)
    assert world.differs(backend.attention(world), step) < backend.tolerance


HALF, OTHER, FP8, WHOLE = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "param"),
    [
        (96, HALF, HALF, "attention_backend"),
        (512, HALF, HALF, "attention_backend"),
        (64, WHOLE, WHOLE, "dtype"),
        (64, HALF, OTHER, "kv_cache_dtype"),
    ],
)
def test_what_flashinfer_has_no_kernels_for_is_refused(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, param: str
) -> None:
    spec = replace(spec_of(4, 2), head_dim=head_dim)
    with pytest.raises(ConfigError) as refused:
        require_supported(spec, dtype, kv_dtype)
    assert refused.value.param == param
    require_supported(replace(spec, head_dim=128), OTHER, OTHER)
    require_supported(replace(spec, head_dim=128), HALF, FP8)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "kv_dtype"),
    [(128, 64, HALF), (64, 128, OTHER), (32, 256, HALF), (256, 64, FP8), (128, 128, FP8), (64, 256, FP8)],
)
def test_more_kv_heads_than_one_block_stores_are_refused(
    kv_heads: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    spec = replace(spec_of(2 * kv_heads, kv_heads), head_dim=head_dim)
    dtype = HALF if kv_dtype is FP8 else kv_dtype
    require_supported(spec, dtype, kv_dtype)
    spec = replace(spec, kv_heads=kv_heads + 1)
    with pytest.raises(
        ConfigError, match=f"up to {kv_heads} KV heads of {head_dim} .* not of {kv_heads + 1}"
    ):
        require_supported(spec, dtype, kv_dtype)
    rows, pages = (torch.zeros(*n, kv_heads + 1, head_dim, dtype=kv_dtype) for n in ((1,), (1, 1)))
    zero, two = torch.zeros(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="launch failed"):
        append_paged_kv_cache(rows, rows, zero, zero, (pages, pages), zero, two, zero + 1)
    rows, pages = rows[:, 1:], pages[:, :, 1:]
    append_paged_kv_cache(rows, rows, zero, zero, (pages, pages), zero, two, zero + 1)


def test_gathered_attention_is_not_captured() -> None:
    backend = Backend("gathered", "double float32")
    world = backend.world()
    with pytest.raises(ConfigError, match="disable-cuda-graph"):
        GatheredAttention(world.spec, world, torch.device("cuda")).for_graph(4, 100)
    assert world.differs(backend.attention(world).for_graph(5, 1000), DECODES) < backend.tolerance


@pytest.mark.parametrize("limit", [1, 40_000, 450_000, 1 << 30])
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_what_is_gathered_at_a_time_is_bounded(
    step: Step, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `limit`, unless one row or one query alone needs more."""
    backend = Backend("gathered", "double float32")
    world = backend.world(6, 2, windows=(0, 16))
    real, groups = gathered.scaled_dot_product_attention, 0

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        nonlocal groups
        groups += 1
        decodes = step is DECODES
        needed = k.nbytes + v.nbytes if decodes else q.shape[1] * q.shape[2] * k.shape[2] * 4
        assert needed <= limit or len(q) == q.shape[2 if not decodes else 0] == 1
        return real(q, k, v, **options)

    monkeypatch.setattr(gathered, "scaled_dot_product_attention", watched)
    attention = GatheredAttention(world.spec, world, backend.platform.device, limit)
    assert world.differs(attention, step) < backend.tolerance
    layers, everything = 2, 1 if step is DECODES else len(step.rows)
    if limit in (1, 1 << 30):
        assert (groups > layers * everything) is (limit == 1)
    if step is DECODES and limit == 450_000:
        assert groups == layers * 3, "219 positions: rows of 1, 65 and 64, of 201, and of 18"
