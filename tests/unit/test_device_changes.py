"""What is done to lines on tensors alone, before draws and beside them: what the references do to one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels.ops import device_changes, device_logprobs, device_sampling, sampling

INF = float("inf")


def random_logits(n: int, v: int, seed: int = 0) -> Tensor:
    return torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * 3.0


def random_change(rng: np.random.Generator, v: int, kind: str) -> sampling.Change:
    change = sampling.Change()
    if kind in ("penalties", "all"):
        change.prompt_seen = (rng.random(v) < 0.3).astype(np.uint8)
        change.output_counts = rng.poisson(0.5, v).astype(np.int32)
        change.repetition, change.presence, change.frequency = 1.37, 0.41, -0.83
    if kind in ("bias", "all"):
        change.bias_ids = rng.choice(v, 3, replace=False).astype(np.int32)
        change.biases = rng.normal(size=3).astype(np.float32)
    if kind in ("banned", "all"):
        change.banned = rng.choice(v, 2, replace=False).astype(np.int32)
    if kind in ("mask", "all"):
        change.mask = rng.integers(-(2**31), 2**31, -(-v // 32)).astype(np.int32)
    return change


def changed(logits: Tensor, changes: list[sampling.Change]) -> Tensor:
    """By the ops, all lines in one call each."""
    v, result = logits.shape[1], logits.clone()
    counting = [i for i, change in enumerate(changes) if change.output_counts is not None]
    entries = torch.tensor(counting[::-1], dtype=torch.int64).argsort()
    seen = device_changes.Seen(
        torch.from_numpy(np.stack([changes[i].output_counts for i in reversed(counting)])),  # type: ignore[misc]
        torch.from_numpy(np.stack([changes[i].prompt_seen for i in reversed(counting)])),  # type: ignore[misc]
    )
    penalties = torch.tensor([changes[i].penalties for i in counting])
    ahead = torch.empty((len(counting), 0), dtype=torch.int32)
    device_changes.penalise(result, torch.tensor(counting), seen, entries, penalties, ahead)
    biased = [i * v + token for i, change in enumerate(changes) for token in change.bias_ids.tolist()]
    biases = np.concatenate([change.biases for change in changes])
    device_changes.add_biases(result, torch.tensor(biased), torch.from_numpy(biases))
    held = [i * v + token for i, change in enumerate(changes) for token in change.banned.tolist()]
    device_changes.hold_back(result, torch.tensor(held))
    masks = [change.mask for change in changes if change.mask is not None]
    which = np.cumsum([change.mask is not None for change in changes]) - 1
    which[[change.mask is None for change in changes]] = -1
    device_changes.apply_masks(
        result, torch.from_numpy(np.stack(masks)), torch.from_numpy(which.astype(np.int32))
    )
    return result


@pytest.mark.parametrize("v", [32, 45, 1000])
def test_changes_equal_the_reference_to_the_bit(v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(v)
    kinds = ["penalties", "bias", "banned", "mask", "all", "none", "all", "penalties"]
    logits = random_logits(len(kinds), v, seed=v)
    changes = [random_change(rng, v, kind) for kind in kinds]
    expected = torch.stack(
        [sampling.change_reference(row, change) for row, change in zip(logits, changes, strict=True)]
    )
    assert torch.equal(changed(logits, changes), expected)
    monkeypatch.setattr(device_sampling, "WORKSPACE", 1)
    assert torch.equal(changed(logits, changes), expected)


def test_drafts_ahead_are_penalised_as_if_they_were_output() -> None:
    v = 20
    logits = random_logits(3, v)
    counts = torch.randint(0, 3, (1, v), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    prompt = torch.zeros((1, v), dtype=torch.uint8)
    drafts = [[], [4], [4, 4, 9]]
    ahead = torch.tensor([[*some, -1, -1, -1][:3] for some in drafts], dtype=torch.int32)
    seen, entries = device_changes.Seen(counts, prompt), torch.zeros(3, dtype=torch.int64)
    penalties = torch.tensor([[1.2, 0.3, 0.9]] * 3)
    result = logits.clone()
    device_changes.penalise(result, torch.arange(3), seen, entries, penalties, ahead)
    for i, some in enumerate(drafts):
        more = counts[0].numpy() + np.bincount(some, minlength=v).astype(np.int32)
        change = sampling.Change(prompt[0].numpy(), more, 1.2, 0.3, 0.9)
        assert torch.equal(result[i], sampling.change_reference(logits[i], change))


def test_what_is_counted_once_is_counted_where_it_belongs() -> None:
    seen = device_changes.Seen(torch.zeros((3, 6), dtype=torch.int32), torch.zeros((3, 6), dtype=torch.uint8))
    ids = torch.tensor([[5, 5, 1], [0, 2, 2]], dtype=torch.int32)
    seen.add(torch.tensor([2, 0]), ids, torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.int32))
    assert seen.counts.tolist() == [[1, 0, 0, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 2]]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("v", [3, 40, 2000])
def test_logprobs_equal_the_references(v: int, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(12, v, seed=v)
    logits[3], logits[4] = random_logits(2, v).round()
    logits[5, 0], logits[6, 1], logits[7], logits[8, 2] = float("nan"), INF, -INF, -INF
    logits[9, :3] = torch.tensor([0.0, -0.0, 0.0])
    logits[10, 0] = 40.0
    source = torch.tensor([*range(12), 3, 3])
    ids = torch.arange(14) % v
    out: dict[str, Tensor] = {
        "value": torch.zeros(14), "top_ids": torch.zeros((14, top), dtype=torch.int32),
        "top_values": torch.zeros((14, top)), "norms": torch.zeros(14, dtype=torch.float64),
    }  # fmt: skip
    tops = torch.full((14,), top, dtype=torch.int32)
    sampling.logprobs_reference(logits, source.int(), ids.int(), tops, *out.values())
    found = device_logprobs.logprobs(logits, source, ids, top)
    wrong = torch.tensor([5, 6, 7])
    out["value"][wrong], out["norms"][wrong] = float("nan"), float("nan")
    out["top_ids"][wrong], out["top_values"][wrong] = -1, -INF
    assert found.top_ids.tolist() == out["top_ids"].tolist()
    # Both round once what they know to about 1e-12 and 1e-8.
    torch.testing.assert_close(found.values, out["value"], rtol=2e-7, atol=1e-10, equal_nan=True)
    torch.testing.assert_close(found.top_values, out["top_values"], rtol=2e-7, atol=1e-10)
    torch.testing.assert_close(found.norms, out["norms"], rtol=0.0, atol=1e-10, equal_nan=True)
    monkeypatch.setattr(device_sampling, "WORKSPACE", 1)
    for one, other in zip(device_logprobs.logprobs(logits, source, ids, top), found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
