"""Attention over slots: right against torch, and one algorithm: extends and decodes agree to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.attention import attend, attend_reference

DTYPES = (torch.float32, torch.float16)
HEADS = ((9, 3, 64), (4, 4, 32), (8, 2, 80), (8, 1, 128), (3, 1, 6), (2, 1, 300))


@dataclass
class Sequence:
    """A sequence whose K and V are in the pool; `q` is [length, hq * d]."""

    q: Tensor
    slots: Tensor

    def __len__(self) -> int:
        return self.q.shape[0]


class Pool:
    """Sequences of one shape in one pool, and calls on parts of them."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, permuted: bool = True
    ) -> None:
        self.hq, self.hkv, self.d = heads
        generator = torch.Generator().manual_seed(sum(lengths))
        total = sum(lengths)
        k, v = (torch.randn(total, self.hkv, self.d, generator=generator).to(dtype) for _ in range(2))
        queries = torch.randn(total, self.hq * self.d, generator=generator) * 2
        order = torch.randperm(total, generator=generator) if permuted else torch.arange(total)
        self.k, self.v = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
        self.k[order], self.v[order] = k, v
        self.sequences = [
            Sequence(q, slots)
            for q, slots in zip(queries.split(lengths), order.int().split(lengths), strict=True)
        ]

    def call(self, parts: list[tuple[int, int, int]], run=attend) -> list[Tensor]:  # type: ignore[no-untyped-def]
        """One result for each (sequence, start, count)."""
        table = torch.full((len(self.sequences), max(map(len, self.sequences))), -1, dtype=torch.int32)
        for i, sequence in enumerate(self.sequences):
            table[i, : len(sequence)] = sequence.slots
        queries = torch.cat([self.sequences[i].q[start : start + count] for i, start, count in parts])
        kv = torch.full((len(queries), 2 * self.hkv * self.d), float("nan"))
        rows, starts, counts = torch.tensor(parts, dtype=torch.int32).T.contiguous()
        out = torch.full_like(queries, float("nan"))
        run(
            torch.cat([queries, kv], dim=1).contiguous(), self.k, self.v, table, rows, starts, counts,
            self.hq, self.hkv, self.d, self.d**-0.5, out,
        )  # fmt: skip
        return list(out.split([count for _, _, count in parts]))

    def whole(self, i: int = 0) -> Tensor:
        return self.call([(i, 0, len(self.sequences[i]))])[0]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_equals_torch_within_rounding(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = Pool([1, 2, 63, 64, 65, 150], heads, dtype)
    parts = [(0, 0, 1), (1, 0, 2), (2, 10, 53), (3, 63, 1), (4, 64, 1), (5, 0, 150)]
    for got, expected in zip(pool.call(parts), pool.call(parts, attend_reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS[:4])
def test_one_extend_equals_as_many_decodes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = Pool([140], heads, dtype)
    decodes = torch.cat([pool.call([(0, position, 1)])[0] for position in range(140)])
    assert torch.equal(decodes, pool.whole())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [7, 16, 64, 100])
def test_chunks_equal_the_whole(chunk: int, dtype: torch.dtype) -> None:
    pool = Pool([330], (9, 3, 64), dtype)
    parts = [(0, at, min(chunk, 330 - at)) for at in range(0, 330, chunk)]
    whole = pool.whole()
    assert torch.equal(torch.cat([pool.call([part])[0] for part in parts]), whole)
    assert torch.equal(torch.cat(pool.call(parts)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(isa: str, dtype: torch.dtype) -> None:
    pool = Pool([700, 90], (9, 3, 64), dtype)
    parts = [(0, 699, 1), (1, 0, 90)]
    results = []
    for threads in (1, 2, 3, 16):
        native.load(isa, threads)
        results.append([pool.whole(), *pool.call(parts), *pool.call(parts[:1])])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert torch.equal(results[0][1], results[0][3])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_equals_the_row_among_others(dtype: torch.dtype) -> None:
    lengths = [400, 1, 64, 129, 33, 250, 200, 77]
    pool = Pool(lengths, (8, 2, 32), dtype)
    parts = [(i, max(0, n - 1 - 5 * i), min(n, 1 + 5 * i)) for i, n in enumerate(lengths)]
    together = pool.call(parts)
    backwards = pool.call(parts[::-1])[::-1]
    for part, one, other in zip(parts, together, backwards, strict=True):
        assert torch.equal(pool.call([part])[0], one)
        assert torch.equal(one, other)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_places_of_slots_change_nothing(dtype: torch.dtype) -> None:
    permuted, in_order = (Pool([300], (9, 3, 64), dtype, permuted) for permuted in (True, False))
    assert torch.equal(permuted.whole(), in_order.whole())


@pytest.mark.usefixtures("isa")
def test_later_tokens_are_not_read() -> None:
    pool = Pool([130], (6, 2, 32), torch.float32)
    before = pool.whole()
    for slots in (pool.sequences[0].slots[100:].long(),):
        pool.k[slots], pool.v[slots] = float("inf"), float("nan")
    after = pool.whole()
    assert torch.equal(after[:100], before[:100])
    assert after[100:].isnan().all()


@pytest.mark.usefixtures("isa")
def test_rows_without_tokens_are_skipped() -> None:
    pool = Pool([70, 20], (4, 2, 32), torch.float32)
    empty, full = pool.call([(0, 12, 0), (1, 0, 20)])
    assert empty.shape == (0, 128)
    assert torch.equal(full, pool.whole(1))


@pytest.mark.usefixtures("isa")
def test_extreme_scores_stay_finite() -> None:
    pool = Pool([200], (2, 1, 32), torch.float32)
    pool.k *= 1000
    got, expected = pool.whole(), pool.call([(0, 0, 200)], attend_reference)[0]
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("row", "start", "count", "slot"), [(1, 0, 1, 0), (0, 8, 1, 0), (0, -1, 1, 0), (0, 0, 2, 0), (0, 0, 1, 9)]
)
def test_what_does_not_exist_is_an_error(row: int, start: int, count: int, slot: int) -> None:
    pool = torch.zeros(9, 1, 4)
    columns = (torch.tensor([value], dtype=torch.int32) for value in (row, start, count))
    table = torch.full((1, 8), slot, dtype=torch.int32)
    with pytest.raises(IndexError, match="does not exist"):
        attend(torch.zeros(1, 12), pool, pool, table, *columns, 1, 1, 4, 1.0, torch.zeros(1, 4))


@pytest.mark.usefixtures("isa")
def test_a_long_context_equals_its_reference() -> None:
    pool = Pool([5000], (2, 1, 16), torch.float32)
    part = (0, 4998, 2)
    expected = pool.call([part], attend_reference)[0]
    torch.testing.assert_close(pool.call([part])[0], expected, rtol=1e-4, atol=1e-5)
