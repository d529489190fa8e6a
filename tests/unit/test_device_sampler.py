"""The device's sampler draws, counts and tells what the CPU's does, step after step, and never waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sapwood.srt.worker.device.columns import DeviceColumns
from sapwood.srt.worker.device.sampler import DeviceSampler
from sapwood.srt.worker.sampler import Places
from tests.gpu import sampling_double
from tests.sampler_twins import (
    CPU,
    KINDS,
    ROWS,
    SAMPLINGS,
    VOCAB,
    Twins,
    compare,
    new_pool,
    pinned,
    start_of,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other, on a busy machine far longer than these tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("drafts", "forks", "masks"), KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_the_device_draws_what_the_cpu_draws(seed: int, drafts: bool, forks: bool, masks: bool) -> None:
    compare(Twins(np.random.default_rng(seed)), drafts, forks, masks)


@pytest.mark.parametrize(("drafts", "forks", "masks"), KINDS)
def test_it_does_with_flashinfers_filters_too(
    drafts: bool, forks: bool, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []

    def filtered(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
        assert is_deterministic
        lines.append(len(probs))
        return inner(probs, top_p, is_deterministic)

    inner = sampling_double.top_p_renorm_probs
    monkeypatch.setattr(sampling_double, "top_p_renorm_probs", filtered)
    compare(Twins(np.random.default_rng(9), flashinfer=sampling_double), drafts, forks, masks)
    assert sum(lines) > 40


class Remote(TorchDispatchMode):
    """A device whose values nobody can wait for: `meta` tensors, with copies to the host that bring nothing.
    Whatever needs a value, or mixes the two, raises."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            assert (args[2:] or (kwargs.get("non_blocking"),))[0], "a copy that waits"
            self.copies += 1
            return args[0]
        if func is torch.ops.aten._to_copy.default and not args[0].is_meta:
            assert kwargs.get("non_blocking") or kwargs.get("device") != torch.device("meta"), "it waits"
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype != torch.bool for index in indices), "its shape is in its values"
            assert all(index.device == args[0].device for index in indices)
        result = func(*args, **kwargs)
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        first = result if isinstance(result, Tensor) else result[0]
        self.launches += first.is_meta and not all(views)
        return result


def on_meta(steps: int, drafts: bool, forks: bool, masks: bool) -> Remote:
    twins = Twins(np.random.default_rng(5), torch.device("meta"))
    with Remote() as remote:
        for step in range(steps):
            twins.change_rows()
            places, logits = twins.places(drafts, forks)
            if masks:
                twins.mask(places)
            launched = twins.sampler.launch(logits.to("meta", non_blocking=True), places)
            assert remote.copies == step, "only when it is told to"
            launched.fetch()
            assert remote.copies == step + 1, "all that a step gives comes in one copy"
            ids = torch.full((3,), -1, dtype=torch.int32, device="meta")
            twins.columns.inputs(ids, torch.zeros(3, dtype=torch.int32, device="meta"))
            twins.columns.seat(1, np.arange(4, dtype=np.int32))
    return remote


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_launch_never_waits_for_the_device(drafts: bool, masks: bool) -> None:
    on_meta(25, drafts, drafts, masks)


def plain_launches(params: dict[str, Any]) -> int:
    twins = Twins(np.random.default_rng(1), torch.device("meta"))
    twins.admit([start_of(row, params, twins.rng) for row in range(ROWS)])
    rows = np.arange(ROWS, dtype=np.int32)
    places = Places(rows, rows * 0 + 1, rows + 20, rows * 0, rows[:0])
    with Remote() as remote:
        twins.sampler.launch(torch.empty((ROWS, VOCAB), device="meta"), places).fetch()
    return remote.launches


def test_plain_steps_launch_little() -> None:
    """A decode step of greedy rows, of drawn ones, and of ranked ones."""
    launches = [plain_launches(params) for params in ({"temperature": 0.0}, {}, {"top_p": 0.9})]
    assert launches[0] <= 25
    assert launches[1] <= 50
    assert launches[2] <= 75


def test_a_row_that_has_none_of_its_own_is_drawn_alike_beside_any() -> None:
    """Whatever bunch its line comes into."""
    for k, params in enumerate(SAMPLINGS[:8]):
        results = []
        for others in ([], [0], [2, 9], [11, 12, 4]):
            twins = Twins(np.random.default_rng(k))
            start = start_of(0, params, np.random.default_rng(77))
            beside = [start_of(i + 1, SAMPLINGS[o], np.random.default_rng(i)) for i, o in enumerate(others)]
            twins.admit([start, *beside])
            rows = np.arange(len(others) + 1, dtype=np.int32)[::-1].copy()
            places = Places(rows, rows * 0 + 1, rows + 40, rows * 0, rows[:0])
            logits = torch.from_numpy(twins.taste[rows].astype(np.float32))
            launched = twins.sampler.launch(logits, places)
            launched.fetch()
            results.append(int(launched.read()[0].ids[-1]))
        assert len(set(results)) == 1


class Pair:
    """Two ranks of a group, as two threads."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[Tensor]) -> None:
        self.rank, self._barrier, self._said = rank, barrier, said

    def broadcast(self, values: Tensor) -> None:
        if self.rank == 0:
            self._said.append(values.clone())
            self._barrier.wait(10)
        else:
            self._barrier.wait(10)
            values.copy_(self._said.pop())

    def sum(self, partial: Tensor) -> None: ...

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None: ...

    def smallest(self, value: int) -> int:
        return value


def test_other_ranks_are_told_each_rows_next_input() -> None:
    barrier, said = threading.Barrier(2), list[Tensor]()
    twins = Twins(np.random.default_rng(8))
    first = DeviceSampler(twins.columns, twins.other, pinned, Pair(0, barrier, said))
    pool = new_pool()
    columns = DeviceColumns(pool, CPU, pinned)
    second = DeviceSampler(columns, pool, pinned, Pair(1, barrier, said))
    for _ in range(5):
        twins.change_rows()
        places, logits = twins.places(drafts=True, forks=True)
        other = threading.Thread(target=second.follow, args=(places,))
        other.start()
        first.launch(logits, places)
        other.join(10)
        assert columns.last[places.rows].tolist() == twins.columns.last[places.rows].tolist()
        assert not said


def test_entries_of_released_rows_are_used_again_and_begin_anew() -> None:
    twins = Twins(np.random.default_rng(2))
    for _ in range(30):
        twins.admit([start_of(row, SAMPLINGS[8], twins.rng) for row in range(3)])
        entries = twins.columns.entries[:3].tolist()
        assert len(set(entries)) == 3
        assert twins.columns.seen.counts.shape[0] == 4
        for row, entry in enumerate(entries):
            change = twins.pool.changes[row]
            assert change.output_counts is not None
            assert change.prompt_seen is not None
            assert twins.columns.seen.counts[entry].tolist() == change.output_counts.tolist()
            assert twins.columns.seen.prompt[entry].tolist() == change.prompt_seen.tolist()
            assert twins.other.changes[row].output_counts is None, "the host keeps none"
        if twins.rng.random() < 0.5:  # else they are admitted over themselves
            twins.release([0, 1, 2])
    twins.admit([start_of(row, SAMPLINGS[8], twins.rng) for row in range(ROWS)])
    assert sorted(twins.columns.entries.tolist()) == list(range(ROWS))
