"""Log-probabilities: right against torch, ordered alternatives, and each row on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.sampling import logprobs, logprobs_reference


def ask(
    logits: Tensor, source: list[int], ids: list[int], top: list[int], run: Any = logprobs
) -> list[Tensor]:
    n, kmax = len(source), max(top)
    out = [torch.zeros(n), torch.zeros(n, kmax, dtype=torch.int32), torch.zeros(n, kmax)]
    out.append(torch.zeros(n, dtype=torch.float64))
    run(logits, *(torch.tensor(column, dtype=torch.int32) for column in (source, ids, top)), *out)
    return out


def random_logits(rows: int, v: int) -> Tensor:
    return torch.randn(rows, v, generator=torch.Generator().manual_seed(v)) * 3


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("v", [1, 20, 321, 49152])
def test_equals_torch_within_rounding(v: int) -> None:
    logits = random_logits(6, v)
    arguments = ([0, 5, 2, 2, 1], [0, v - 1, v // 2, 0, v // 3], [0, 1, 20, 5, 3])
    got, expected = ask(logits, *arguments), ask(logits, *arguments, run=logprobs_reference)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[2], expected[2], rtol=1e-6, atol=1e-6)


def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    logits = random_logits(9, 3001)
    arguments = [[i, 17 * i, i] for i in range(9)]
    together = ask(logits, *map(list, zip(*arguments, strict=True)))
    for threads in (1, 2):
        native.load(isa, threads)
        for i, (source, token, top) in enumerate(arguments):
            alone = ask(logits[source : source + 1], [0], [token], [top])
            assert alone[0][0] == together[0][i]
            assert torch.equal(alone[1][0], together[1][i, :top])
            assert torch.equal(alone[2][0], together[2][i, :top])


@pytest.mark.usefixtures("isa")
def test_the_norm_gives_every_other_value_to_the_bit() -> None:
    logits = random_logits(2, 3001)
    norms = ask(logits, [0, 1], [0, 0], [1, 1])[3]
    for row in (0, 1):
        values = (logits[row].double() - norms[row]).float()
        tokens = list(range(0, 3001, 37))
        assert torch.equal(ask(logits, [row] * len(tokens), tokens, [1] * len(tokens))[0], values[tokens])


@pytest.mark.usefixtures("isa")
def test_ties_are_ordered_by_id() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, [700, 1999]] = 1.0
    _, ids, values, _ = ask(logits, [0], [3], [6])
    assert ids[0].tolist() == [700, 1999, 0, 1, 2, 3]
    assert values[0].tolist() == sorted(values[0].tolist(), reverse=True)


@pytest.mark.usefixtures("isa")
def test_fewer_tokens_than_alternatives() -> None:
    _, ids, values, _ = ask(random_logits(1, 3), [0], [0], [5])
    assert ids[0].tolist()[3:] == [-1, -1]
    assert sorted(ids[0].tolist()[:3]) == [0, 1, 2]
    assert values[0, 3:].isneginf().all()


@pytest.mark.usefixtures("isa")
def test_masked_and_bad_logits() -> None:
    logits = random_logits(3, 100)
    logits[0, 1:] = float("-inf")
    logits[1, 50] = float("nan")
    logits[2] = float("-inf")
    chosen, ids, _, norms = ask(logits, [0, 0, 1, 2], [0, 1, 0, 0], [1, 1, 1, 1])
    assert chosen[0] == 0.0
    assert chosen[1] == float("-inf")
    assert chosen[2:].isnan().all()
    assert norms.isnan().tolist() == [False, False, True, True]
    assert ids[:, 0].tolist() == [0, 0, -1, -1]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("source", "token", "top"), [(3, 0, 1), (0, 100, 1), (0, -1, 1)])
def test_what_does_not_exist_is_an_error(source: int, token: int, top: int) -> None:
    with pytest.raises(IndexError, match="must be from 0"):
        ask(random_logits(3, 100), [source], [token], [top])
