"""The double itself: what its wrappers document, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import flashinfer_double as strict
from tests.gpu.flashinfer_double import merge_state_in_place, merged
from tests.gpu.host_accelerator import HostAccelerator, opaque
from tests.gpu.wide_double import (
    BatchDecodeWithPagedKVCacheWrapper as Decode,
    BatchPrefillWithPagedKVCacheWrapper as Prefill,
    MultiLevelCascadeAttentionWrapper as Cascade,
)

D = 16
WORKSPACE = torch.zeros(strict.WORKSPACE, dtype=torch.uint8)
INTS = torch.zeros(8 << 20, dtype=torch.uint8)
RANDOM = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(12, heads, D, generator=RANDOM) for heads in (4, 2, 2))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(size: int) -> tuple[Tensor, Tensor]:
    """K and V of 12 positions in pages of this size."""
    return tuple(part.view(-1, size, 2, D) for part in (K, V))  # type: ignore[return-value]


def prefill(size: int = 1, **options: Any) -> Prefill:
    """Rows of 3 and 2 queries at the end of 7 and 4 positions, the second row's from position 8 on."""
    wrapper = Prefill(WORKSPACE)
    pages = torch.arange(12 // size, dtype=torch.int32)
    per_row = [math.ceil(7 / size), math.ceil(4 / size)]
    last = [7 - (per_row[0] - 1) * size, 4 - (per_row[1] - 1) * size]
    indices = torch.cat([pages[: per_row[0]], pages[8 // size :][: per_row[1]]])
    indptr = ints(0, per_row[0], sum(per_row))
    wrapper.plan(
        ints(0, 3, 5), indptr, indices, ints(*last), 4, 2, D, size, q_data_type=torch.float32, **options
    )
    return wrapper


def by_hand(query: int, head: int, keys: list[int], scale: float) -> Tensor:
    k, v = K[keys, head // 2], V[keys, head // 2]
    return torch.softmax(k @ Q[query, head] * scale, 0) @ v


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_last_query_is_at_the_last_key(size: int) -> None:
    out = prefill(size, causal=True, sm_scale=0.5).run(Q[:5], paged(size))
    seen = [range(5), range(6), range(7), range(8, 11), range(8, 12)]
    for query, keys in enumerate(seen):
        for head in range(4):
            assert torch.allclose(out[query, head], by_hand(query, head, list(keys), 0.5), atol=1e-5)


def test_without_causal_every_query_sees_every_key() -> None:
    out = prefill(sm_scale=0.5).run(Q[:5], paged(1))
    assert torch.allclose(out[0, 0], by_hand(0, 0, list(range(7)), 0.5), atol=1e-5)


def test_window_left_is_how_many_keys_before_its_own_a_query_sees() -> None:
    out = prefill(causal=True, sm_scale=0.5, window_left=2).run(Q[:5], paged(1))
    assert torch.allclose(out[1, 3], by_hand(1, 3, [3, 4, 5], 0.5), atol=1e-5)


def test_the_scale_left_out_is_that_of_the_head() -> None:
    out = prefill().run(Q[:5], paged(1))
    assert torch.equal(out, prefill(sm_scale=1 / math.sqrt(D)).run(Q[:5], paged(1)))


def test_the_states_of_two_sets_of_keys_merge_to_that_of_all() -> None:
    def over(keys: range) -> tuple[Tensor, Tensor]:
        wrapper = Prefill(WORKSPACE)
        tables = (ints(0, 5), ints(0, len(keys)), ints(*keys), ints(1))
        wrapper.plan(*tables, 4, 2, D, 1, q_data_type=torch.float32)
        found: tuple[Tensor, Tensor] = wrapper.run(Q[:5], paged(1), return_lse=True)
        return found

    out, lse = merged(*over(range(4)), *over(range(4, 12)))
    whole, whole_lse = over(range(12))
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse, atol=1e-5)


def test_a_cascade_is_causal_on_its_last_level() -> None:
    cascade = Cascade(2, WORKSPACE)
    cascade.plan(
        [ints(0, 5), ints(0, 3, 5)], [ints(0, 4), ints(0, 3, 5)], [ints(0, 1, 2, 3), ints(4, 5, 6, 8, 9)],
        [ints(1), ints(1, 1)], 4, 2, D, 1, causal=True, sm_scale=0.5, q_data_type="float32",
    )  # fmt: skip
    out = cascade.run(Q[:5], paged(1))
    assert torch.allclose(out[1, 0], by_hand(1, 0, [0, 1, 2, 3, 4, 5], 0.5), atol=1e-5)
    assert torch.allclose(out[4, 2], by_hand(4, 2, [0, 1, 2, 3, 8, 9], 0.5), atol=1e-5)


def decode(rows: int = 2, **options: Any) -> Decode:
    wrapper = Decode(WORKSPACE, **options)
    plan_decode(wrapper, rows)
    return wrapper


def plan_decode(wrapper: Decode, rows: int = 2, **options: Any) -> None:
    indptr = torch.arange(0, 3 * rows + 1, 3, dtype=torch.int32)
    indices = torch.arange(3 * rows, dtype=torch.int32) % 12
    last = torch.ones(rows, dtype=torch.int32)
    wrapper.plan(indptr, indices, last, 4, 2, D, 1, q_data_type=torch.float32, **options)


def fixed(rows: int = 2, size: int = 8) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.zeros(size, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=torch.int32),
    }


def test_out_is_filled_and_returned() -> None:
    out = torch.empty(2, 4, D)
    assert decode().run(Q[:2], paged(1), out=out) is out
    assert torch.equal(out, decode().run(Q[:2], paged(1)))


def test_a_graphs_plan_goes_into_its_buffers() -> None:
    buffers = fixed()
    wrapper = decode(**buffers)
    assert buffers["paged_kv_indptr_buffer"].tolist() == [0, 3, 6]
    assert buffers["paged_kv_indices_buffer"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    before = wrapper.run(Q[:2], paged(1))
    buffers["paged_kv_indices_buffer"][0] = 9
    assert not torch.equal(wrapper.run(Q[:2], paged(1)), before)


def test_a_plan_overwrites_another_one_in_the_same_integers() -> None:
    one, other = decode(**fixed()), decode(**fixed())
    for wrapper in (one, other):
        wrapper.reset_workspace_buffer(WORKSPACE, INTS)
        plan_decode(wrapper)
    other.run(Q[:2], paged(1))
    with pytest.raises(RuntimeError, match="another plan"):
        one.run(Q[:2], paged(1))
    plan_decode(one)
    one.run(Q[:2], paged(1))


def test_a_plan_is_copied_from_the_host() -> None:
    wrapper = decode()
    host = wrapper._pin_memory_int_workspace_buffer[:8].view(torch.int64)
    assert host == wrapper._schedule
    other = decode()
    other._pin_memory_int_workspace_buffer = wrapper._pin_memory_int_workspace_buffer
    plan_decode(other)
    assert host != wrapper._schedule
    wrapper.run(Q[:2], paged(1))
    other.run(Q[:2], paged(1))


def captured(wrapper: Decode) -> Callable[[], None]:
    """A replay of its run."""
    run, out = opaque(Decode.run), torch.empty(2, 4, D)
    return HostAccelerator().capture(lambda: run(wrapper, Q[:2], paged(1), out=out), None)


def test_a_wrapper_that_was_not_made_for_graphs_is_not_captured() -> None:
    with pytest.raises(RuntimeError, match="not made for graphs"):
        captured(decode())


def test_a_capture_keeps_what_it_was_launched_with() -> None:
    wrapper = decode(**fixed())
    replay = captured(wrapper)
    plan_decode(wrapper)
    replay()
    plan_decode(wrapper, window_left=1)
    with pytest.raises(RuntimeError, match=r"captured with .* and replayed with"):
        replay()
    plan_decode(wrapper)
    replay()
    wrapper.reset_workspace_buffer(WORKSPACE, INTS)
    plan_decode(wrapper)
    with pytest.raises(RuntimeError, match=r"captured with .* and replayed with"):
        replay()


def state(
    n: int = 2, heads: int = 4, d: int = 64, kind: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, heads, d, dtype=kind), torch.zeros(n, heads)


@pytest.mark.parametrize(("heads", "d"), [(128, 64), (64, 128), (32, 256)])
def test_as_many_heads_are_merged_as_a_block_has_threads_for(heads: int, d: int) -> None:
    merge_state_in_place(*state(heads=heads, d=d), *state(heads=heads, d=d))
    with pytest.raises(RuntimeError, match="launch failed"):
        merge_state_in_place(*state(heads=heads + 1, d=d), *state(heads=heads + 1, d=d))


REFUSED: dict[str, tuple[Any, Any]] = {
    "run before plan": (lambda: Decode(WORKSPACE).run(Q[:2], paged(1)), AttributeError),
    "an unknown keyword": (lambda: plan_decode(Decode(WORKSPACE), windows=3), TypeError),
    "an argument that we do not use": (
        lambda: plan_decode(Decode(WORKSPACE), logits_soft_cap=30.0), NotImplementedError,
    ),
    "a positional argument after page_size": (
        lambda: Decode(WORKSPACE).plan(ints(0, 1), ints(0), ints(1), 4, 2, D, 1, "NONE"), DeprecationWarning,
    ),
    "a graph without buffers": (lambda: Decode(WORKSPACE, use_cuda_graph=True), ValueError),
    "more rows than the graph has": (lambda: plan_decode(decode(**fixed()), 3), ValueError),
    "fewer rows": (lambda: plan_decode(decode(**fixed()), 1), ValueError),
    "more indices than the graph has": (lambda: decode(**fixed(size=5)), ValueError),
    "fixed_split_size without tensor cores": (
        lambda: plan_decode(Decode(WORKSPACE), fixed_split_size=64), ValueError,
    ),
    "5 query heads a KV head without tensor cores": (
        lambda: Decode(WORKSPACE).plan(ints(0, 1), ints(0), ints(1), 5, 1, D, 1), RuntimeError,
    ),
    "int64": (
        lambda: Decode(WORKSPACE).plan(ints(0, 1).long(), ints(0), ints(1), 4, 2, D, 1), ValueError,
    ),
    "fewer indices than the indptr says": (
        lambda: Decode(WORKSPACE).plan(ints(0, 3), ints(0, 1), ints(1), 4, 2, D, 1), IndexError,
    ),
    "queries of another type": (lambda: decode().run(Q[:2].half(), paged(1)), ValueError),
    "K and V of another type": (
        lambda: decode().run(Q[:2], tuple(part.half() for part in paged(1))), ValueError,
    ),
    "16-bit K and V of another type than the queries": (
        lambda: plan_decode(Decode(WORKSPACE), kv_data_type=torch.float16), NotImplementedError,
    ),
    "more queries than planned": (lambda: decode().run(Q[:3], paged(1)), ValueError),
    "out of another type": (
        lambda: decode().run(Q[:2], paged(1), out=torch.empty(2, 4, D).half()), ValueError,
    ),
    "a page that does not exist": (
        lambda: decode(4).run(Q[:4], tuple(part[:9] for part in paged(1))), IndexError,
    ),
    "queries in float32": (
        lambda: plan_decode(strict.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)), ValueError,
    ),
    "out with gaps": (
        lambda: decode().run(Q[:2], paged(1), out=torch.empty(2, 8, D)[:, ::2]), ValueError,
    ),
    "a plan of no rows": (lambda: plan_decode(Decode(WORKSPACE), 0), ValueError),
    "a small workspace": (lambda: plan_decode(Decode(WORKSPACE[: 1 << 20])), RuntimeError),
    "heads of 16 channels": (
        lambda: strict.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).plan(
            ints(0, 1), ints(0), ints(1), 4, 2, D, 1, q_data_type=torch.float16
        ), ValueError,
    ),
    "merging float32": (
        lambda: merge_state_in_place(*state(kind=torch.float32), *state(kind=torch.float32)), ValueError,
    ),
    "merging what has gaps": (
        lambda: merge_state_in_place(state(heads=8)[0][:, ::2], state()[1], *state()), ValueError,
    ),
    "merging sums in 16 bits": (
        lambda: merge_state_in_place(state()[0], state()[1].half(), *state()), ValueError,
    ),
    "deterministic where the backend is not": (lambda: prefill(disable_split_kv=True), NotImplementedError),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=list(REFUSED))
def test_what_flashinfer_does_not_take_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
