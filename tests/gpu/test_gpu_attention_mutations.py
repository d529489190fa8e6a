"""The contract tests can fail: each way to get a plan wrong makes results differ from the reference.

A way is a change of what FlashInfer is told, or of what it does with it: the step is the same. On a GPU these
would read what is not theirs; so they run with the double only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.srt.worker.attention.paged import Paged, indptr_of
from tests.gpu import flashinfer_double, wide_double
from tests.gpu.backends import flashinfer_attention, platform_of
from tests.gpu.steps import Platform, Step, World, spec_of

DECODES = Step.of((3, 90, 1), (0, 64, 1), (5, 10, 1))
CHUNKS = Step.of((3, 90, 30), (0, 0, 7), (5, 10, 1))
SHARED = [(0, 64, [0, 1, 2, 3]), (64, 192, [0, 2]), (64, 128, [1, 3])]
TREE = Step([0, 1, 2, 3], [200, 150, 210, 130], [1, 20, 1, 3], SHARED)
STEPS = {"decodes": DECODES, "chunks": CHUNKS, "tree": TREE}

FAR = 0.02
"""What is wrong differs by much more than rounding: by this at least, in float32 and bfloat16."""


@pytest.fixture(params=["double float32", "double bfloat16"])
def platform(request: pytest.FixtureRequest) -> Platform:
    return platform_of(request.param)


def world_of(platform: Platform, step: Step) -> World:
    world = World(spec_of(6, 2, windows=(0,) if step is TREE else (0, 16), query_scalar=64.0), platform)
    if step is TREE:
        world.share(SHARED)
    return world


def difference(platform: Platform, step: Step, flashinfer: Any = None, paged: Any = None) -> float:
    """From the reference, with a plan of `paged(world)` instead of the step's own."""
    world = world_of(platform, step)
    attention = flashinfer_attention(world, flashinfer, cascade_bytes=1)
    qkv = world.qkv(step)
    attention.plan(world.paged(step) if paged is None else paged(world))
    return max(
        world.error(world.attended(attention, qkv, layer), step, qkv, layer)
        for layer in range(world.spec.layers)
    )


def mutant(wrapper: str, **changes: Callable[[Any], Any]) -> Any:
    """The double with one wrapper whose plans get other arguments: `changes` by their names."""

    class Mutant(getattr(wide_double, wrapper)):  # type: ignore[misc]
        def plan(self, *args: Any, **kwargs: Any) -> None:
            method = "_plan_impl" if "Decode" in wrapper else "plan"
            given = flashinfer_double.bind(f"{wrapper}.{method}", *args, **kwargs)
            del given["self"]
            super().plan(**given | {name: change(given[name]) for name, change in changes.items()})

    class Module:
        def __getattr__(self, name: str) -> Any:
            return Mutant if name == wrapper else getattr(wide_double, name)

    return Module()


DECODE, PREFILL, CASCADE = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
)
WHERE = {DECODE: "decodes", PREFILL: "chunks", CASCADE: "tree"}


def shifted(values: Tensor) -> Tensor:
    return values.roll(1)


def none_left(values: Tensor) -> Tensor:
    return torch.zeros_like(values)


PLANS: dict[str, tuple[str, dict[str, Callable[[Any], Any]]]] = {
    "decode: last_page_len": (DECODE, {"last_page_len": none_left}),
    "decode: indices": (DECODE, {"indices": shifted}),
    "decode: window_left one more": (DECODE, {"window_left": lambda left: left + (left >= 0)}),
    "decode: window_left one less": (DECODE, {"window_left": lambda left: left - (left >= 0)}),
    "decode: no window": (DECODE, {"window_left": lambda _: -1}),
    "decode: sm_scale left out": (DECODE, {"sm_scale": lambda _: None}),
    "prefill: not causal": (PREFILL, {"causal": lambda _: False}),
    "prefill: last_page_len": (PREFILL, {"paged_kv_last_page_len": none_left}),
    "prefill: indices": (PREFILL, {"paged_kv_indices": shifted}),
    "prefill: window_left one more": (PREFILL, {"window_left": lambda left: left + (left >= 0)}),
    "prefill: window_left one less": (PREFILL, {"window_left": lambda left: left - (left >= 0)}),
    "prefill: sm_scale left out": (PREFILL, {"sm_scale": lambda _: None}),
    "cascade: not causal": (CASCADE, {"causal": lambda _: False}),
    "cascade: sm_scale left out": (CASCADE, {"sm_scale": lambda _: None}),
    "cascade: last_page_len": (
        CASCADE, {"paged_kv_last_page_len": lambda all: [*all[:-1], none_left(all[-1])]},
    ),
    "cascade: indices of a level": (
        CASCADE, {"paged_kv_indices_arr": lambda all: [all[0], shifted(all[1]), all[2]]},
    ),
    "cascade: groups of other queries": (
        CASCADE, {"qo_indptr_arr": lambda all: [all[0], all[1] + torch.tensor([0, 1, 0]).int(), all[2]]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_without_a_mutation_there_is_no_difference(platform: Platform, step: Step) -> None:
    assert difference(platform, step) < platform.tolerance
    for wrapper in WHERE:
        assert difference(platform, step, mutant(wrapper)) < platform.tolerance


@pytest.mark.parametrize("mutation", PLANS.values(), ids=list(PLANS))
def test_a_wrong_argument_shows(platform: Platform, mutation: tuple[str, dict[str, Any]]) -> None:
    wrapper, changes = mutation
    assert difference(platform, STEPS[WHERE[wrapper]], mutant(wrapper, **changes)) > FAR + platform.tolerance


def with_lengths(step: Step, change: Callable[[Any, Any], Any]) -> Callable[[World], Paged]:
    """A plan in which rows have other KV than positions 0 to start + count."""

    def paged(world: World) -> Paged:
        given = world.paged(step)
        starts, counts = (np.array(column, np.int32) for column in (step.starts, step.counts))
        lengths = change(starts, counts).astype(np.int32)
        longer = world.paged(Step(step.rows, (lengths - counts).tolist(), step.counts))
        return replace(given, kv_indptr=indptr_of(lengths), kv_indices=longer.kv_indices)

    return paged


LENGTHS: dict[str, Callable[[Any, Any], Any]] = {
    "one position more": lambda starts, counts: starts + counts + 1,
    "one position less": lambda starts, counts: np.maximum(starts + counts - 1, 1),
    "the cached prefix only": lambda starts, _: np.maximum(starts, 1),
    "the new tokens only": lambda _, counts: counts,
}


@pytest.mark.parametrize("change", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize("step", [DECODES, CHUNKS], ids=["decodes", "chunks"])
def test_a_wrong_kv_length_shows(platform: Platform, step: Step, change: Callable[[Any, Any], Any]) -> None:
    assert difference(platform, step, paged=with_lengths(step, change)) > FAR + platform.tolerance


def test_the_plan_of_the_step_before_shows(platform: Platform) -> None:
    before = Step(DECODES.rows, [start - 1 for start in DECODES.starts], DECODES.counts)
    assert difference(platform, DECODES, paged=lambda world: world.paged(before)) > FAR + platform.tolerance


def test_a_plan_of_other_tokens_is_refused(platform: Platform) -> None:
    with pytest.raises(ValueError, match="does not match qo_indptr"):
        difference(platform, CHUNKS, paged=lambda world: world.paged(DECODES))


def test_rows_in_another_order_show(platform: Platform) -> None:
    turned = Step(DECODES.rows[::-1], DECODES.starts[::-1], DECODES.counts)
    assert difference(platform, DECODES, paged=lambda world: world.paged(turned)) > FAR + platform.tolerance


def cascade_of_level_order(order: list[int]) -> Any:
    arrays = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    return mutant(CASCADE, **{name: lambda levels: [levels[i] for i in order] for name in arrays})


def test_levels_above_the_own_one_may_change_places_but_not_with_it(platform: Platform) -> None:
    assert difference(platform, TREE, cascade_of_level_order([1, 0, 2])) < platform.tolerance
    assert difference(platform, TREE, cascade_of_level_order([2, 1, 0])) > FAR + platform.tolerance


def halves(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    return (a + b) / 2, torch.logaddexp2(a_lse, b_lse)


def natural(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(a_lse - b_lse)[..., None].to(a.dtype)
    return a * share + b * (1 - share), torch.logaddexp(a_lse, b_lse)


@pytest.mark.parametrize("merge", [halves, natural, lambda a, a_lse, _b, _b_lse: (a, a_lse)])
def test_levels_merged_in_another_way_show(
    platform: Platform, merge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_double, "merged", merge)
    assert difference(platform, TREE) > FAR + platform.tolerance


def test_results_that_stay_in_the_cascades_order_show(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "index_copy_", lambda out, _dim, _index, values: out.copy_(values))
    assert difference(platform, TREE) > FAR + platform.tolerance


def test_a_level_too_few_shows(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    real = flashinfer_double.MultiLevelCascadeAttentionWrapper.run

    def without_the_first(self: Any, *args: Any) -> Any:
        levels, self.levels = self.levels, self.levels[1:]
        try:
            return real(self, *args)
        finally:
            self.levels = levels

    monkeypatch.setattr(flashinfer_double.MultiLevelCascadeAttentionWrapper, "run", without_the_first)
    assert difference(platform, TREE) > FAR + platform.tolerance
