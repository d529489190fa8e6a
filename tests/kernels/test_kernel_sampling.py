"""Draws: the right distribution, the same draw in any batch, and bad logits told instead of drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.philox import philox, uniform
from sapwood.kernels.ops.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    OK,
    Change,
    change_reference,
    filtered,
    sample,
    sample_reference,
)


def draw(
    logits: Tensor, n: int = 1, run: Any = sample, changes: list[Change] | None = None, **columns: Any
) -> tuple[Tensor, Tensor]:
    """Ids and errors of n samples; each column is one value for all or a list of n."""
    defaults: dict[str, Any] = {
        "source": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "choices": 0,
        "positions": list(range(n)),
    }  # fmt: skip
    types = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32) | {"seeds": torch.int64}
    given = [
        torch.tensor(value if isinstance(value, list) else [value] * n, dtype=types.get(name, torch.int32))
        for name, value in (defaults | columns).items()
    ]
    ids, errors = torch.full((n,), -7, dtype=torch.int32), torch.full((n,), -7, dtype=torch.int32)
    changed = (
        ()
        if changes is None
        else (
            torch.tensor([change.fields for change in changes]),
            torch.tensor([change.penalties for change in changes]),
        )
    )
    run(logits.view(-1, logits.shape[-1]), *given, ids, errors, *changed)
    return ids, errors


def random_logits(rows: int, v: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, v, generator=torch.Generator().manual_seed(seed)) * spread


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_k": 1000},
)


def test_philox_matches_the_papers_known_answers() -> None:
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    digits_of_pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*digits_of_pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("v", [1, 5, 17, 300, 5000])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_equal_the_reference(v: int, options: dict[str, Any]) -> None:
    n = 40
    logits = random_logits(n, v, seed=v)
    seeds = [(-1) ** i * i**9 for i in range(n)]
    columns = {"source": list(range(n)), "seeds": seeds, "choices": [3] * n} | options
    ids, errors = draw(logits, n, **columns)
    expected, _ = draw(logits, n, sample_reference, **columns)
    assert errors.tolist() == [OK] * n
    # The reference is float64: a draw within float32's rounding of a border may fall on its other side.
    assert (ids == expected).float().mean() >= 0.97


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_distribution_is_right(options: dict[str, Any]) -> None:
    n = 20_000
    logits = random_logits(1, 50, spread=2.0, seed=9)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    weights = filtered(logits[0].double().numpy(), **full)
    expected = weights / weights.sum() * n
    ids, _ = draw(logits, n, seeds=1234, **options)
    counts = np.bincount(ids.numpy(), minlength=50)
    assert not counts[expected == 0].any()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    predicted = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - predicted) ** 2 / np.maximum(predicted, 1e-9)).sum()
    # Mean and deviation of chi-square; five deviations above the mean is far beyond p = 1e-4.
    freedom = max(1, len(predicted) - 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_draw_does_not_depend_on_its_batch(isa: str) -> None:
    n = 23
    logits = random_logits(n, 3001, seed=4)
    columns: dict[str, list[Any]] = {
        "source": list(range(n)), "temperature": [0.0, 0.5, 1.0, 2.0] * 5 + [1.0] * 3,
        "top_k": [0, 1, 20] * 7 + [0] * 2, "top_p": [1.0, 0.8] * 11 + [0.5],
        "min_p": [0.0, 0.05] * 11 + [0.0],
        "seeds": [7**i for i in range(n)], "choices": [i % 3 for i in range(n)],
        "positions": [100 * i for i in range(n)],
    }  # fmt: skip
    together, _ = draw(logits, n, **columns)
    for threads in (1, 2, 4):
        native.load(isa, threads)
        assert torch.equal(draw(logits, n, **columns)[0], together)
        backwards, _ = draw(logits, n, **{name: column[::-1] for name, column in columns.items()})
        assert torch.equal(backwards.flip(0), together)
        for i in range(n):
            own = {name: [column[i]] for name, column in columns.items()} | {"source": 0}
            alone, _ = draw(logits[i], 1, **own)
            assert alone[0] == together[i]


@pytest.mark.usefixtures("isa")
def test_seed_choice_and_position_each_change_the_draw() -> None:
    n = 400
    logits = torch.zeros(1, 4096)
    draws = [
        draw(logits, n, seeds=list(range(n)), positions=0)[0],
        draw(logits, n, seeds=[i << 32 for i in range(n)], positions=0)[0],
        draw(logits, n, choices=list(range(n)), positions=0)[0],
        draw(logits, n)[0],
    ]
    for ids in draws:
        assert len(set(ids.tolist())) > n * 0.9


@pytest.mark.usefixtures("isa")
def test_filters_that_keep_all_change_nothing() -> None:
    logits = random_logits(1, 999, seed=6)
    plain, _ = draw(logits, 200)
    for options in ({"top_k": 999}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 1e-30}):
        assert torch.equal(draw(logits, 200, **options)[0], plain)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1e-6}, {"top_k": 1}])
@pytest.mark.parametrize("v", [1, 7, 64, 1000])
def test_greedy_takes_the_lowest_id_of_the_maxima(options: dict[str, Any], v: int) -> None:
    logits = random_logits(1, v).round()
    ids, _ = draw(logits, 1, **options)
    assert int(ids[0]) == int(np.argmax(logits[0].numpy()))
    assert int(draw(torch.zeros(1, v), 1, **options)[0]) == 0
    only_last = torch.full((1, v), float("-inf"))
    only_last[0, -1] = -5.0
    assert int(draw(only_last, 1, **options)[0]) == v - 1


@pytest.mark.usefixtures("isa")
def test_ties_are_kept_by_lowest_id() -> None:
    ids, _ = draw(torch.zeros(1, 3000), 300, top_k=3)
    assert set(ids.tolist()) == {0, 1, 2}
    ids, _ = draw(torch.zeros(1, 1000), 3000, top_p=0.0105)
    assert set(ids.tolist()) == set(range(11))
    signed = torch.zeros(1, 64)
    signed[0, ::2] = -0.0
    assert set(draw(signed, 500, top_k=2)[0].tolist()) == {0, 1}


@pytest.mark.usefixtures("isa")
def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    logits = random_logits(1, 9000, spread=0.01)
    ids, _ = draw(logits, 400, top_p=0.9)
    weights = filtered(logits[0].double().numpy(), 1.0, 0, 0.9, 0.0)
    assert (weights[ids.numpy()] > 0).mean() > 0.99


@pytest.mark.usefixtures("isa")
def test_the_smallest_top_p_keeps_the_best() -> None:
    logits = random_logits(1, 500, seed=8)
    ids, _ = draw(logits, 50, top_p=1e-9)
    assert set(ids.tolist()) == {int(logits.argmax())}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    logits = torch.full((1, 777), float("-inf"))
    allowed = [3, 300, 776]
    logits[0, allowed] = torch.tensor([-1e30, -1e30, -1e30])
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.5}):
        ids, errors = draw(logits, 300, temperature=temperature, **options)
        assert set(ids.tolist()) == (set(allowed) if temperature else {3})
        assert not errors.any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("place", [0, 100, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_told_and_harm_no_other_row(temperature: float, place: int) -> None:
    logits = random_logits(4, 1001, seed=2)
    logits[0, place] = float("nan")
    logits[1, place] = float("inf")
    logits[2] = float("-inf")
    ids, errors = draw(logits, 4, source=[0, 1, 2, 3], temperature=temperature)
    assert errors.tolist() == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT, OK]
    alone, _ = draw(logits[3], 1, temperature=temperature, positions=3)
    assert ids[3] == alone[0]


@pytest.mark.usefixtures("isa")
def test_a_source_outside_the_logits_is_an_error() -> None:
    with pytest.raises(IndexError, match="source 4"):
        draw(random_logits(4, 8), 2, source=[0, 4])


@pytest.mark.usefixtures("isa")
def test_uniform_is_the_same_number_in_python_and_c() -> None:
    # Over equal weights the drawn id is floor(u * v): 12 bits of the number are seen.
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789012345):
        ids, _ = draw(torch.zeros(1, 4096), 50, seeds=seed, choices=5)
        assert ids.tolist() == [int(uniform(seed, 5, position) * 4096) for position in range(50)]


def change_of(v: int, seed: int, **parts: Any) -> Change:
    """Penalties, biases, bans and a mask; parts given as None are left out."""
    random = np.random.default_rng(seed)
    everything: dict[str, Any] = {
        "prompt_seen": random.integers(0, 2, v, dtype=np.uint8),
        "output_counts": random.integers(0, 4, v, dtype=np.int32),
        "bias_ids": random.permutation(v)[: v // 5].astype(np.int32),
        "biases": random.normal(size=v // 5).astype(np.float32),
        "banned": random.permutation(v)[: v // 4].astype(np.int32),
        "mask": random.integers(-(2**31), 2**31, -(-v // 32), dtype=np.int64).astype(np.int32),
    }
    return Change(**{k: x for k, x in (everything | parts).items() if x is not None})


PARTS: tuple[dict[str, Any], ...] = (
    {"repetition": 1.3, "mask": None, "banned": None},
    {"repetition": 0.8, "presence": 0.5, "bias_ids": None, "biases": None},
    {"repetition": 1.1, "presence": -0.3, "frequency": 0.7},
    {"prompt_seen": None, "output_counts": None},
    {"prompt_seen": None, "output_counts": None, "mask": None},
)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("v", [5, 32, 333, 2000])
@pytest.mark.parametrize("parts", PARTS, ids=range(len(PARTS)))
def test_changes_equal_the_formulas(parts: dict[str, Any], v: int) -> None:
    """Every token is drawn greedily in turn: what has been drawn before is banned, so the order shows."""
    logits = random_logits(1, v, seed=v)
    logits[0, 3] = float("-inf")
    before, change = logits.clone(), change_of(v, v, **parts)
    expected = change_reference(logits[0], change)
    order = [i for i in torch.argsort(-expected, stable=True).tolist() if expected[i] > float("-inf")]
    counts, banned = change.output_counts, change.banned.tolist()
    for best in order:
        if counts is not None:
            change.output_counts = counts.copy()
        change.banned = np.array(banned, dtype=np.int32)
        ids, errors = draw(logits, 1, temperature=0.0, changes=[change])
        assert errors.tolist() == [OK]
        # Two logits within a rounding of each other may be drawn in either order.
        torch.testing.assert_close(expected[ids[0]], expected[best], rtol=1e-5, atol=1e-5)
        banned.append(int(ids[0]))
    change.banned = np.array(banned, dtype=np.int32)
    assert draw(logits, 1, temperature=0.0, changes=[change])[1].tolist() == [NOTHING_LEFT]
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("isa")
def test_a_rows_first_draw_is_counted_and_no_other() -> None:
    v = 40
    changes = [change_of(v, i, mask=None, banned=None) for i in range(3)]
    before = [change.output_counts.copy() for change in changes if change.output_counts is not None]
    changes[1].output_counts = changes[1].prompt_seen = None
    logits = random_logits(3, v)
    logits[2] = float("nan")
    ids, errors = draw(logits, 6, source=[0, 0, 0, 1, 1, 2], seeds=list(range(6)), changes=changes)
    assert errors.tolist() == [OK] * 5 + [NOT_FINITE]
    assert changes[0].output_counts is not None
    assert np.flatnonzero(changes[0].output_counts != before[0]).tolist() == [int(ids[0])]
    assert changes[2].output_counts is not None
    assert np.array_equal(changes[2].output_counts, before[2])


def test_changes_do_not_depend_on_the_batch(isa: str) -> None:
    n, v = 9, 3001
    logits = random_logits(n, v, seed=4)

    def changes() -> list[Change]:
        return [change_of(v, i, **PARTS[i % len(PARTS)]) if i % 3 else Change() for i in range(n)]

    columns: dict[str, Any] = {"source": list(range(n)), "seeds": list(range(n)), "top_p": 0.9}
    together, _ = draw(logits, n, **columns, changes=changes())
    for threads in (1, 2, 4):
        native.load(isa, threads)
        assert torch.equal(draw(logits, n, **columns, changes=changes())[0], together)
    for i, change in enumerate(changes()):
        alone, _ = draw(logits[i], 1, seeds=i, top_p=0.9, positions=i, changes=[change])
        assert alone[0] == together[i]


@pytest.mark.usefixtures("isa")
def test_a_change_of_a_token_that_is_not_there_is_an_error() -> None:
    wrong = Change(banned=np.array([8], dtype=np.int32))
    with pytest.raises(IndexError, match="row 1 is changed at a token that is not from 0 to 7"):
        draw(random_logits(2, 8), 2, source=[0, 1], changes=[Change(), wrong])
