"""AMX tiles are a matter of speed only: every bit is that of AVX-512."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import FORMATS, PANEL, PackedWeight, linear
from tests.kernels.test_kernel_quant import inputs, weight

SHAPES = ((1, 1), (16, 32), (33, 7), (48, 1025), (577, 64), (97, 520))
ROWS = (63, 64, 65, 72, 97, 130)
TILED = ("q8", "q4", "q4w")  # q8w has groups half as deep as a tile, and goes without


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    if "amx" not in native.available():
        pytest.skip("this CPU, system or build has no AMX")
    yield
    native.load()


def computed(isa: str, x: Tensor, w: PackedWeight, threads: int = 1, accumulate: bool = False) -> Tensor:
    native.load(isa, threads)
    out = torch.linspace(-1, 1, x.shape[0] * w.n).view(x.shape[0], w.n)
    linear(x, w, out, accumulate)
    return out


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("format", TILED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_equals_avx512(n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    for m in ROWS:
        x = inputs(m, k, seed=m)
        assert torch.equal(bits(computed("amx", x, w)), bits(computed("avx512", x, w))), m


@pytest.mark.parametrize("format", TILED)
@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_avx512_with_threads_and_into_what_is_there(format: str, accumulate: bool) -> None:
    w, x = weight(150, 576, format), inputs(140, 576)
    expected = bits(computed("avx512", x, w, 1, accumulate))
    for threads in (1, 2, 5):
        assert torch.equal(bits(computed("amx", x, w, threads, accumulate)), expected), threads


@pytest.mark.parametrize("format", TILED)
def test_equals_avx512_at_the_ends_of_what_codes_can_be(format: str) -> None:
    w = weight(64, 96, format)
    few = FORMATS[format].bits == 4
    w.data[:, -96 * PANEL * FORMATS[format].bits // 8 :] = 0xFF if few else 0x80  # all 15, or -128
    x = torch.ones(80, 96)
    x[1::4] *= -1
    x[2::4, ::2] *= -1
    x[3::4] = 1e-38
    x[:, 5] *= 0.99
    out = computed("amx", x, w)
    assert out.isfinite().all()
    assert torch.equal(bits(out), bits(computed("avx512", x, w)))


@pytest.mark.parametrize("format", TILED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(format: str, wrong: float) -> None:
    w, x = weight(70, 200, format), inputs(66, 200)
    fine = computed("amx", x, w)
    x[13, 33] = x[40, 0] = wrong
    out = computed("amx", x, w)
    assert out[[13, 40]].isnan().all()
    others = [row for row in range(66) if row not in (13, 40)]
    assert torch.equal(bits(out[others]), bits(fine[others]))
    assert torch.equal(out.isnan(), computed("avx512", x, w).isnan())


@pytest.mark.parametrize("format", TILED)
def test_a_row_is_the_same_in_any_batch(format: str) -> None:
    w, x = weight(100, 301, format), inputs(1030, 301)
    together = computed("amx", x, w, 2)
    for first, count in ((0, 1), (3, 63), (5, 64), (1, 130), (960, 70), (500, 64)):
        part = computed("amx", x[first : first + count], w)
        assert torch.equal(bits(part), bits(together[first : first + count])), (first, count)


def test_rows_too_long_for_the_cache_equal_avx512() -> None:
    w, x = weight(40, 32 * 200, "q4"), inputs(150, 32 * 200)
    assert torch.equal(bits(computed("amx", x, w, 2)), bits(computed("avx512", x, w, 2)))
