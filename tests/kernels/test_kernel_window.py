"""Sliding windows: right against torch, and a query's result depends on nothing but what it sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.attention import attend, attend_reference
from tests.kernels.test_kernel_attention import DTYPES, Pool

WINDOWS = (1, 5, 63, 64, 65, 100)
HEADS = ((9, 3, 64), (4, 4, 18), (4, 1, 256))


class Windowed(Pool):
    """A pool whose calls go through one window."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, window: int
    ) -> None:
        super().__init__(lengths, heads, dtype)
        self.window = window

    def call(self, parts: list[tuple[int, int, int]], run=attend) -> list[Tensor]:  # type: ignore[no-untyped-def]
        return super().call(parts, lambda *args: run(*args, window=self.window))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", WINDOWS)
def test_equals_torch_within_rounding(window: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool = Windowed([1, 64, 65, 300], heads, dtype, window)
    parts = [(0, 0, 1), (1, 10, 54), (2, 64, 1), (3, 0, 300)]
    for got, expected in zip(pool.call(parts), pool.call(parts, attend_reference), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", WINDOWS)
def test_one_extend_equals_as_many_decodes(
    window: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    pool = Windowed([300], heads, dtype, window)
    decodes = torch.cat([pool.call([(0, position, 1)])[0] for position in range(300)])
    assert torch.equal(decodes, pool.whole())


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_equal_the_whole(window: int, dtype: torch.dtype) -> None:
    pool = Windowed([300], (9, 3, 64), dtype, window)
    whole = pool.whole()
    for chunk in (2, 7, 16, 64, 100, 299):
        parts = [(0, at, min(chunk, 300 - at)) for at in range(0, 300, chunk)]
        assert torch.equal(torch.cat([pool.call([part])[0] for part in parts]), whole)
        assert torch.equal(torch.cat(pool.call(parts)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [5, 65, 300])
def test_threads_change_nothing(isa: str, window: int, dtype: torch.dtype) -> None:
    pool = Windowed([700, 90], (9, 3, 64), dtype, window)
    parts = [(0, 699, 1), (1, 0, 90)]
    results = []
    for threads in (1, 2, 3, 16):
        native.load(isa, threads)
        results.append([pool.whole(), *pool.call(parts), *pool.call(parts[:1])])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert torch.equal(results[0][1], results[0][3])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", [150, 1000])
def test_a_window_that_hides_nothing_changes_nothing(window: int) -> None:
    pool = Windowed([150], (6, 2, 32), torch.float32, window)
    assert torch.equal(pool.whole(), super(Windowed, pool).call([(0, 0, 150)])[0])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("window", WINDOWS)
def test_what_a_window_hides_is_as_if_it_were_not_there(window: int) -> None:
    """Values that would spoil any sum they came into, in tiles that are read for other positions."""
    pool = Windowed([300], (6, 2, 32), torch.float32, window)
    before = pool.whole()
    hidden = pool.sequences[0].slots[: 300 - window - 50].long()
    pool.k[hidden], pool.v[hidden] = float("inf"), float("nan")
    after = pool.whole()
    assert torch.equal(after[-51:], before[-51:])
    assert after[: 300 - window - 50].isnan().all()
    assert torch.equal(pool.call([(0, 299, 1)])[0], before[-1:])


@pytest.mark.usefixtures("isa")
def test_values_of_minus_zero_stay() -> None:
    """A chain of sums begins with the first position that a query sees, wherever the block begins."""
    pool = Windowed([70], (2, 1, 16), torch.float32, 3)
    pool.v.fill_(-0.0)
    decodes = torch.cat([pool.call([(0, position, 1)])[0] for position in range(70)])
    whole = pool.whole()
    assert torch.equal(whole.signbit(), decodes.signbit())


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 position, or 0 for all, not -1"):
        Windowed([3], (2, 1, 16), torch.float32, -1).whole()
