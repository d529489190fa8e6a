"""Stretches that several rows share are read once, and every row gets the bits that it gets without."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.attention import attend, attend_reference
from tests.kernels.test_kernel_attention import DTYPES, Pool

Stretch = tuple[int, int, list[int]]
"""Begin and end in positions, and the rows that have the same slots between them."""

TILE = 64
LENGTHS = [700, 641, 640, 639, 513, 400, 385, 330, 129, 64, 1]
COUNTS = [1, 1, 100, 3, 1, 40, 1, 0, 1, 1, 1]
HEADS = ((9, 3, 64), (4, 4, 18), (8, 1, 128), (16, 1, 32), (4, 2, 256), (6, 3, 24))


class Forest(Pool):
    """Rows of which some have the same slots in some stretches; the last `counts` tokens of each are new."""

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        stretches: list[Stretch],
        heads: tuple[int, int, int] = (9, 3, 64),
        dtype: torch.dtype = torch.float16,
        window: int = 0,
    ) -> None:
        super().__init__(lengths, heads, dtype)
        self.window = window
        for begin, end, rows in stretches:
            for row in rows[1:]:
                self.sequences[row].slots[begin:end] = self.sequences[rows[0]].slots[begin:end]
        self.parts = [(i, n - c, c) for i, (n, c) in enumerate(zip(lengths, counts, strict=True))]
        self.stretches = stretches

    def run(self, shared: list[int] | None, kernel=attend) -> list[Tensor]:  # type: ignore[no-untyped-def]
        """One result for each row, with the stretches as the message has them."""
        told = None if shared is None else torch.tensor(shared, dtype=torch.int32)
        return self.call(self.parts, lambda *args: kernel(*args, window=self.window, shared=told))

    def grouped(self) -> list[Tensor]:
        return self.run([number for b, e, rows in self.stretches for number in (b, e, len(rows), *rows)])


def random_stretches(seed: int) -> list[Stretch]:
    """Of `LENGTHS` and `COUNTS`: nested groups, some after a gap that each of their rows has alone."""
    chance = random.Random(seed)
    starts = [n - c for n, c in zip(LENGTHS, COUNTS, strict=True)]

    def grow(rows: list[int], begin: int) -> Iterator[Stretch]:
        rows = [row for row in rows if starts[row] // TILE > begin]
        if len(rows) < 2:
            return
        end = chance.randint(begin + 1, min(starts[row] // TILE for row in rows))
        yield begin * TILE, end * TILE, rows
        chance.shuffle(rows)
        cut = chance.randint(0, len(rows))
        for part in (rows[:cut], rows[cut:]):
            yield from grow(part, end + chance.randint(0, 1))

    return list(grow(list(range(len(LENGTHS))), chance.randint(0, 1)))


def equal(results: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_grouped_equals_torch_within_rounding(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    forest = Forest(LENGTHS, COUNTS, random_stretches(1), heads, dtype)
    for got, expected in zip(forest.grouped(), forest.run(None, attend_reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 50, 200, 350])
@pytest.mark.parametrize("heads", HEADS)
def test_grouped_equals_ungrouped(heads: tuple[int, int, int], window: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        forest = Forest(LENGTHS, COUNTS, random_stretches(seed), heads, dtype, window)
        assert equal(forest.grouped(), forest.run(None))


@pytest.mark.parametrize("window", [0, 200])
def test_threads_change_nothing(isa: str, window: int) -> None:
    for seed in range(2, 6):
        forest = Forest(LENGTHS, COUNTS, random_stretches(seed), window=window)
        results = []
        for threads in (1, 2, 5):
            native.load(isa, threads)
            results += [forest.grouped(), forest.run(None)]
        assert all(equal(result, results[0]) for result in results[1:])


@pytest.mark.usefixtures("isa")
def test_a_large_group_equals_its_rows_alone() -> None:
    """More queries than a block has, at different places of their sequences."""
    lengths = [200 + 7 * i for i in range(40)]
    forest = Forest(lengths, [1 + i % 3 for i in range(40)], [(0, 192, list(range(40)))])
    alone = [forest.call([part])[0] for part in forest.parts]
    assert equal(forest.grouped(), alone)


@pytest.mark.usefixtures("isa")
def test_a_stretch_is_read_through_one_of_its_rows() -> None:
    spoilt = []
    for poisoned in (0, 1):
        forest = Forest([200, 200], [1, 1], [(0, 128, [0, 1])])
        slots = forest.sequences[0].slots[:128].long()
        forest.sequences[poisoned].slots[:128] = forest.sequences[poisoned].slots[199]
        forest.k[slots], forest.v[slots] = float("nan"), float("nan")
        results = forest.grouped()
        spoilt.append([bool(result.isnan().any()) for result in results])
    assert sorted(spoilt) == [[False, False], [True, True]]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("shared", "error", "match"),
    [
        ([0], ValueError, "a stretch is begin, end"),
        ([0, 64], ValueError, "a stretch is begin, end"),
        ([0, 64, 2, 0], ValueError, "a stretch is begin, end"),
        ([0, 64, 0], ValueError, "a stretch is begin, end"),
        ([0, 64, -1, 0, 1], ValueError, "a stretch is begin, end"),
        ([0, 64, 2**31 - 1, 0, 1], ValueError, "a stretch is begin, end"),
        ([0, 60, 2, 0, 1], ValueError, "not whole tiles"),
        ([1, 64, 2, 0, 1], ValueError, "not whole tiles"),
        ([64, 64, 2, 0, 1], ValueError, "not whole tiles"),
        ([-64, 64, 2, 0, 1], ValueError, "not whole tiles"),
        ([0, 64, 2, 0, 2], IndexError, "row 2 of the call does not exist"),
        ([0, 64, 2, -1, 1], IndexError, "row -1 of the call does not exist"),
        ([0, 64, 2, 1, 1], ValueError, "new tokens of row 1"),
        ([0, 192, 2, 0, 1], ValueError, "new tokens of row 1"),
        ([64, 128, 2, 0, 1, 0, 64, 2, 0, 1], ValueError, r"shared\[5\].*row 0"),
        ([0, 128, 2, 0, 1, 64, 128, 2, 0, 1], ValueError, r"shared\[5\].*row 0"),
    ],
)
def test_stretches_that_cannot_be_are_refused(shared: list[int], error: type[Exception], match: str) -> None:
    forest = Forest([200, 150], [1, 1], [])
    with pytest.raises(error, match=match):
        forest.run(shared)


def test_stretches_are_int32() -> None:
    forest = Forest([200, 150], [1, 1], [])
    with pytest.raises(ValueError, match="shared must be"):
        forest.call(forest.parts, lambda *args: attend(*args, shared=torch.tensor([0, 64, 2, 0, 1])))
