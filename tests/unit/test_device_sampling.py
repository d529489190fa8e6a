"""Draws on tensors alone: what C++ and the references give, whatever else is in the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels.ops import device_sampling, philox, sampling
from sapwood.kernels.ops.device_sampling import Filters, draw, verify, verify_reference
from sapwood.kernels.ops.philox import uniforms
from sapwood.kernels.ops.sampling import NOT_FINITE, NOTHING_LEFT, OK
from tests.gpu import sampling_double

FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    {"top_p": 0.999, "temperature": 3.0},
)
INF = float("inf")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other, on a busy machine far longer than these tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_logits(n: int, v: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * spread


def tied_logits(n: int, v: int, seed: int = 0) -> Tensor:
    """Of few values, so that every border lies within a tie."""
    return torch.randint(-4, 4, (n, v), generator=torch.Generator().manual_seed(seed)).float()


def columns_of(options: list[dict[str, Any]]) -> dict[str, Tensor]:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([one.get(name, default) for one in options], dtype=dtype)

    return {
        "temperature": column("temperature", 1.0, torch.float32),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0, torch.float32),
        "min_p": column("min_p", 0.0, torch.float32),
    }


def filters_of(options: list[dict[str, Any]]) -> Filters:
    columns = columns_of(options)
    return Filters(
        **columns,
        by_k=bool((columns["top_k"] > 0).any()),
        by_p=bool((columns["top_p"] < 1).any()),
        floors=bool((columns["min_p"] > 0).any()),
    )


def keys(n: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(n)
    seeds = rng.integers(-(2**63), 2**63, n)
    return (
        torch.from_numpy(seeds),
        torch.from_numpy(rng.integers(0, 2**31, n).astype(np.int32)),
        torch.arange(n, dtype=torch.int32),
    )


def sampled(logits: Tensor, options: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """By C++, at `keys`."""
    n = len(logits)
    seeds, choices, positions = keys(n)
    ids, errors = torch.zeros(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    temperature, top_k, top_p, min_p = columns_of(options).values()
    source = torch.arange(n, dtype=torch.int32)
    sampling.sample(logits, source, temperature, top_k, top_p, min_p, seeds, choices, positions, ids, errors)
    return ids, errors


def uniforms_of(n: int) -> Tensor:
    """float64 [n], at `keys`."""
    return torch.from_numpy(uniforms(*(key.numpy() for key in keys(n))))


def drawn(logits: Tensor, options: list[dict[str, Any]], **others: Any) -> tuple[Tensor, Tensor]:
    u = uniforms_of(len(logits))
    ids, errors = draw(logits, filters_of(options), u[:, None], **others)
    return ids[:, 0], errors


def test_uniforms_are_those_of_philox_to_the_bit() -> None:
    edges = [0, 1, -1, 2**32, 2**63 - 1, -(2**63)]
    seeds = np.array([*edges, *keys(60)[0].tolist()])
    choices = np.array([(7 * i**5) % 2**31 for i in range(66)], dtype=np.int32)
    positions = np.array([2**31 - 1 - 3 * i for i in range(66)], dtype=np.int32)
    expected = [
        philox.uniform(*key) for key in zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True)
    ]
    assert uniforms(seeds, choices, positions).tolist() == expected
    together = uniforms(*(key.reshape(6, 11) for key in (seeds, choices, positions)))
    assert together.reshape(-1).tolist() == expected


@pytest.mark.parametrize("v", [1, 5, 32, 300, 5000])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_equal_those_in_cpp(v: int, options: dict[str, Any]) -> None:
    logits = random_logits(60, v, seed=v)
    logits[::3, ::4] = -INF
    logits[:, 0] = 0.5
    expected, _ = sampled(logits, [options] * 60)
    ids, errors = drawn(logits, [options] * 60)
    assert ids.dtype == errors.dtype == torch.int32
    assert errors.tolist() == [OK] * 60
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_of_ties_the_lowest_ids_are_kept(options: dict[str, Any]) -> None:
    for v in (7, 130):
        logits = tied_logits(100, v, seed=v)
        assert drawn(logits, [options] * 100)[0].tolist() == sampled(logits, [options] * 100)[0].tolist()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_what_is_drawn_follows_the_references_distribution(options: dict[str, Any]) -> None:
    """At every u: the borders between ids are the reference's, and what is dropped is never drawn."""
    logits = random_logits(1, 40, seed=4)
    u = (torch.arange(20_000, dtype=torch.float64)[None] + 0.5) / 20_000
    ids, _ = draw(logits, filters_of([options]), u)
    counts = torch.bincount(ids[0].long(), minlength=40).numpy() / 20_000
    greedy = options.get("temperature") == 0.0 or options.get("top_k") == 1
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    settings |= {"temperature": 1.0, "top_k": 1} if greedy else {}
    weights = sampling.filtered(logits[0].double().numpy(), **settings)
    assert np.abs(counts - weights / weights.sum()).max() < 1e-4
    assert (ids[0].diff() >= 0).all()


def test_a_draw_does_not_depend_on_the_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [FILTERS[i % len(FILTERS)] for i in range(50)]
    logits = random_logits(50, 700, seed=2)
    logits[::2] = tied_logits(25, 700)
    expected = drawn(logits, options)[0].tolist()
    u = uniforms_of(50)[:, None]
    for i in range(50):
        alone, _ = draw(logits[i : i + 1], filters_of(options[i : i + 1]), u[i : i + 1])
        assert alone.tolist() == [[expected[i]]]
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    moved, _ = draw(logits, filters_of(options).part(order), u[order], lines=order)  # type: ignore[arg-type]
    assert moved[:, 0].tolist() == [expected[i] for i in order.tolist()]
    monkeypatch.setattr(device_sampling, "WORKSPACE", 3 * 700 * 64)
    assert drawn(logits, options)[0].tolist() == expected


def test_several_are_drawn_from_one_line() -> None:
    options: list[dict[str, Any]] = [{"top_k": 30}, {"temperature": 0.0}, {}]
    logits = random_logits(3, 200)
    u = uniforms_of(12).view(3, 4)
    together, errors = draw(logits, filters_of(options), u)
    assert together.shape == (3, 4)
    assert errors.tolist() == [OK] * 3
    for k in range(4):
        one, _ = draw(logits, filters_of(options), u[:, k : k + 1].contiguous())
        assert one[:, 0].tolist() == together[:, k].tolist()
    assert len(set(together[0].tolist())) > 1


@pytest.mark.parametrize("v", [1, 5, 255, 256, 257, 5000])
def test_a_share_is_found_where_a_plain_sum_finds_it(v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    counted = torch.randint(0, 2**44, (30, v), generator=generator)
    counted *= torch.rand(30, v, generator=generator) < 0.3
    counted[:, v // 2] += 1
    u = torch.rand(30, 6, dtype=torch.float64, generator=generator)
    u[:, 0], u[:, 1] = 0.0, 1.0 - 2.0**-53
    sums = counted.cumsum(-1)
    expected = torch.searchsorted(sums, (u * sums[:, -1:]).long(), right=True)
    ids, totals = device_sampling._at_share(counted, u)
    assert torch.equal(ids, expected)
    assert torch.equal(totals, sums[:, -1])


def test_the_largest_vocabulary_still_has_a_sum() -> None:
    v = device_sampling.MAX_VOCAB
    u = torch.tensor([[0.0, 0.5, 1.0 - 2.0**-53]], dtype=torch.float64)
    ids, errors = draw(torch.zeros(1, v), filters_of([{}]), u)
    assert errors.tolist() == [OK]
    assert ids.tolist() == [[0, v // 2, v - 1]]


def test_a_share_on_the_border_belongs_to_the_next_id_of_any_weight() -> None:
    logits = torch.tensor([[-INF, 1.0, 1.0, -INF, 1.0, 1.0, -INF]])
    u = torch.tensor([[0.0, 0.25 - 2.0**-53, 0.25, 0.5, 0.75, 1.0 - 2.0**-53]], dtype=torch.float64)
    assert draw(logits, filters_of([{}]), u)[0].tolist() == [[1, 1, 2, 4, 5, 5]]


@pytest.mark.parametrize("v", [257, 1024, 3000, 200_003])
def test_the_last_share_lies_within_the_whole(v: int) -> None:
    """However large its sum, which a double does not hold."""
    u = torch.tensor([[0.0, 1.0 - 2.0**-53]], dtype=torch.float64).expand(20, 2).contiguous()
    ids, _ = draw(random_logits(20, v, 1e-3), filters_of([{}] * 20), u)
    assert ids.tolist() == [[0, v - 1]] * 20


def test_the_last_share_is_the_last_id_of_any_weight() -> None:
    logits = random_logits(1, 300)
    logits[0, 250:] = -INF
    u = torch.tensor([[0.0, 1.0 - 2.0**-53]])
    assert draw(logits, filters_of([{}]), u)[0].tolist() == [[0, 249]]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5, "top_k": 3}], ids=str)
def test_bad_lines_are_told_and_the_others_drawn(options: dict[str, Any]) -> None:
    logits = random_logits(6, 50)
    expected = drawn(logits, [options] * 6)[0].tolist()
    logits[1, 7], logits[2, 8], logits[3], logits[4, :9] = INF, float("nan"), -INF, -INF
    logits[2, 9] = INF
    ids, errors = drawn(logits, [options] * 6)
    assert errors.tolist() == [OK, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, OK, OK]
    assert errors.tolist() == sampled(logits, [options] * 6)[1].tolist()
    assert ids.tolist()[1:4] == [0, 0, 0]
    assert [ids[0], ids[5]] == [expected[0], expected[5]]


def test_a_greedy_step_needs_neither_filters_nor_numbers() -> None:
    logits = tied_logits(9, 80)
    logits[3] = -INF
    ids, errors = draw(logits, None, None)
    expected, wrong = sampled(logits, [{"temperature": 0.0}] * 9)
    assert ids.tolist() == expected[:, None].tolist()
    assert errors.tolist() == wrong.tolist()
    lines = torch.tensor([5, 1, 1])
    assert draw(logits, None, None, lines=lines)[0].tolist() == ids[lines].tolist()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_flashinfers_filters_differ_in_ties_alone(options: dict[str, Any]) -> None:
    logits = random_logits(60, 300, seed=9)
    assert (
        drawn(logits, [options] * 60, renorm=sampling_double)[0].tolist()
        == drawn(logits, [options] * 60)[0].tolist()
    )
    tied = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]])
    every = (torch.arange(1000, dtype=torch.float64)[None] + 0.5) / 1000
    keep_three = filters_of([{"top_k": 3}])
    assert set(draw(tied, keep_three, every)[0][0].tolist()) == {0, 1, 3}
    assert set(draw(tied, keep_three, every, renorm=sampling_double)[0][0].tolist()) == {0, 1, 2, 3, 4}


def test_flashinfers_filters_get_numbers_from_bad_lines_too() -> None:
    options: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 2, "top_p": 0.9}, {}]
    logits = random_logits(4, 30)
    logits[0, 3], logits[1] = float("nan"), -INF
    ids, errors = drawn(logits, options, renorm=sampling_double)
    assert errors.tolist() == [NOT_FINITE, NOTHING_LEFT, OK, OK]
    assert ids.tolist() == drawn(logits, options)[0].tolist()


class Dropping:
    """FlashInfer's filters, were they to drop all of some lines."""

    def __init__(self, lines: list[int]) -> None:
        self._lines = lines

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor, is_deterministic: bool) -> Tensor:
        kept = sampling_double.top_k_renorm_probs(probs, top_k, is_deterministic)
        kept[self._lines] = 0.0
        return kept

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor, is_deterministic: bool) -> Tensor:
        return sampling_double.top_p_renorm_probs(probs, top_p, is_deterministic)


@pytest.mark.parametrize("v", [5, 256, 300])
def test_a_line_of_which_a_filter_keeps_nothing_is_told(v: int) -> None:
    """No id beyond the vocabulary comes of it; greedy lines do not ask the filters."""
    options: list[dict[str, Any]] = [{"top_k": 3}, {"top_k": 3}, {"top_k": 1}, {"top_k": 3, "temperature": 0}]
    logits = random_logits(4, v)
    expected = drawn(logits, options)[0].tolist()
    ids, errors = drawn(logits, options, renorm=Dropping([1, 2, 3]))
    assert errors.tolist() == [OK, NOTHING_LEFT, OK, OK]
    assert errors.dtype == torch.int32
    assert ids.tolist() == [expected[0], 0, *expected[2:]]
    logits[1, 0] = float("nan")
    assert drawn(logits, options, renorm=Dropping([1]))[1].tolist() == [OK, NOT_FINITE, OK, OK]


def test_verify_keeps_what_the_reference_keeps() -> None:
    rng = np.random.default_rng(3)
    for width in range(6):
        ids = torch.from_numpy(rng.integers(0, 4, (300, width + 1)).astype(np.int32))
        drafts = torch.from_numpy(rng.integers(-1, 4, (300, width)).astype(np.int32))
        right = torch.from_numpy(rng.random((300, width)) < 0.8)
        drafts = torch.where(right & (drafts >= 0), ids[:, :-1], drafts)
        errors = torch.from_numpy((rng.random((300, width + 1)) < 0.1).astype(np.int32))
        for ends in ([], [3], [0, 3]):
            given = ids, errors, drafts, torch.tensor(ends, dtype=torch.int32)
            assert verify(*given).tolist() == verify_reference(*given).tolist()


def test_drafts_are_kept_up_to_an_end_an_error_or_a_wrong_one() -> None:
    ids = torch.tensor([[5, 6, 7, 8]] * 6, dtype=torch.int32)
    drafts = torch.tensor(
        [[5, 6, 7], [5, 9, 7], [5, 6, -1], [9, 6, 7], [5, 6, 7], [5, 6, 7]], dtype=torch.int32
    )
    errors = torch.zeros((6, 4), dtype=torch.int32)
    errors[4, 2], errors[5, 0] = NOT_FINITE, NOTHING_LEFT
    none = torch.tensor([], dtype=torch.int32)
    assert verify(ids, errors, drafts, none).tolist() == [4, 2, 3, 1, 2, 1]
    assert verify(ids, errors, drafts, torch.tensor([6, 99], dtype=torch.int32)).tolist() == [
        2,
        2,
        2,
        1,
        2,
        1,
    ]
