"""Quantised weights: the documented arithmetic to the bit, and a row's bits never depend on its batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import (
    FORMATS,
    PackedWeight,
    embed,
    linear,
    linear_reference,
    pack,
    pack_codes,
)

QUANTISED = ("q8", "q4", "q8w", "q4w")
SHAPES = ((16, 32), (1, 1), (33, 7), (100, 301), (577, 64), (48, 1025), (96, 576))
LARGEST_CODE = np.float32(32767)


def parts(n: int, k: int, format: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, scales and lows; the codes' ends are among them."""
    generator, chosen = torch.Generator().manual_seed(seed + n * k), FORMATS[format]
    low, high = (0, 16) if chosen.bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (n, k), generator=generator).to(torch.int8)
    codes[0, 0], codes[-1, -1] = low, high - 1
    shape = (n, -(-k // chosen.group))
    scales = torch.randn(shape, generator=generator) / high / k**0.5
    lows = torch.randn(shape, generator=generator) / k**0.5 if chosen.lows else None
    return codes, scales, lows


def weight(n: int, k: int, format: str, seed: int = 0) -> PackedWeight:
    return pack_codes(*parts(n, k, format, seed), format)


def inputs(m: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 3


def apply(x: Tensor, w: PackedWeight) -> Tensor:
    out = torch.full((x.shape[0], w.n), float("nan"))
    linear(x, w, out)
    return out


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as 16-bit codes [m, groups, group] and scales [m, groups]."""
    m, k = x.shape
    groups = -(-k // group)
    padded = np.zeros((m, groups * group), np.float32)
    padded[:, :k] = x
    cut = padded.reshape(m, groups, group)
    largest = np.abs(cut).max(2)
    some = largest >= np.float32(1e-30)
    inverse = np.divide(LARGEST_CODE, largest, out=np.zeros_like(largest), where=some)
    codes = np.rint(cut * inverse[..., None]).astype(np.int64)
    return codes, np.where(some, largest / LARGEST_CODE, np.float32(0))


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, fused: bool) -> np.ndarray:
    wide = np.longdouble if fused else np.float32
    return np.asarray(a.astype(wide) * b.astype(wide) + c, np.float32)


def documented(x: Tensor, n: int, k: int, format: str, fused: bool) -> np.ndarray:
    """What ops/gemm.py and csrc/qgemm.hpp promise, group by group."""
    codes, scales, lows = parts(n, k, format)
    chosen = FORMATS[format]
    x_codes, x_scales = rounded(x.numpy(), chosen.group)
    groups = x_codes.shape[1]
    padded = np.zeros((n, groups * chosen.group), np.int64)
    padded[:, :k] = codes.numpy()
    cut = padded.reshape(n, groups, chosen.group)
    stored = scales.to(chosen.scale).float().numpy()
    out = np.zeros((len(x_codes), n), np.float32)
    for g in range(groups):
        dots = (x_codes[:, g] @ cut[:, g].T).astype(np.float32)
        out = multiply_add(dots, stored[None, :, g] * x_scales[:, g, None], out, fused)
        if lows is not None:
            sums = x_scales[:, g] * x_codes[:, g].sum(1).astype(np.float32)
            out = multiply_add(lows.to(chosen.scale).float().numpy()[None, :, g], sums[:, None], out, fused)
    return out


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpacking_gives_scale_times_code_plus_low(n: int, k: int, format: str) -> None:
    codes, scales, lows = parts(n, k, format)
    chosen = FORMATS[format]
    each = scales.to(chosen.scale).float().repeat_interleave(chosen.group, 1)[:, :k]
    expected = each * codes
    if lows is not None:
        expected += lows.to(chosen.scale).float().repeat_interleave(chosen.group, 1)[:, :k]
    packed = pack_codes(codes, scales, lows, format)
    assert packed.nbytes == -(-n // 16) * chosen.panel_bytes(k)
    assert torch.equal(packed.unpack(), expected)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_is_the_documented_one_to_the_bit(isa: str, n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    for m in (1, 2, 5, 26, 40):
        x = inputs(m, k, m)
        x[0, : k // 2] = 1e-31  # groups too small to have a scale
        expected = torch.from_numpy(documented(x, n, k, format, fused=isa != "portable"))
        assert torch.equal(apply(x, w), expected), m


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_activations_of_16_bits_are_as_good_as_floats(n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    x = inputs(31, k)
    expected = torch.empty(31, n)
    linear_reference(x, w, expected)
    assert (apply(x, w) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("n", "k"), [(100, 301), (77, 600), (192, 96)])
def test_a_row_alone_equals_the_row_in_any_batch(n: int, k: int, format: str) -> None:
    w = weight(n, k, format)
    x = inputs(70, k, 2)
    alone = torch.cat([apply(row[None], w) for row in x])
    for m in range(2, 71):
        assert torch.equal(apply(x[:m], w), alone[:m]), m
        assert torch.equal(apply(x[70 - m :], w), alone[70 - m :]), m


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("k", [530, 2048])
def test_a_long_batch_equals_its_rows(format: str, k: int) -> None:
    w = weight(40, k, format)
    x = inputs(1030, k, 3)
    together = apply(x, w)
    for row in (0, 1, 11, 12, 127, 513, 1023, 1024, 1029):
        assert torch.equal(together[row], apply(x[row : row + 1], w)[0]), row


@pytest.mark.parametrize("format", QUANTISED)
def test_threads_change_nothing(isa: str, format: str) -> None:
    codes = parts(700, 300, format)
    x = inputs(37, 300, 4)
    results = []
    for threads in (1, 2, 3, 5):
        native.load(isa, threads)
        w = pack_codes(*codes, format)
        results.append((w.data, w.unpack(), apply(x, w), apply(x[:1], w)))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("format", QUANTISED)
def test_avx512_equals_avx2(format: str) -> None:
    if not {"avx512", "avx2"} <= set(native.available()):
        pytest.skip("this CPU has not both")
    results = []
    for isa in ("avx512", "avx2"):
        native.load(isa)
        w = weight(150, 413, format)
        results.append([w.data, *(apply(inputs(m, 413, m), w) for m in (1, 3, 8, 14, 30, 150))])
    native.load()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("m", [1, 20, 60])
def test_accumulate_adds_the_finished_sum_once(m: int, format: str) -> None:
    w = weight(50, 700, format)
    x = inputs(m, 700, 5)
    before = inputs(m, 50, 6)
    out = before.clone()
    linear(x, w, out, accumulate=True)
    assert torch.equal(out, before + apply(x, w))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("m", [1, 9, 40])
def test_strided_rows_are_read_and_written_in_place(m: int, format: str) -> None:
    w = weight(21, 40, format)
    wide = inputs(m, 64, 7)
    out = torch.full((m, 30), 7.0)
    linear(wide[:, 3:43], w, out[:, 4:25])
    assert torch.equal(out[:, 4:25], apply(wide[:, 3:43].contiguous(), w))
    assert torch.equal(out[:, :4], torch.full((m, 4), 7.0))
    assert torch.equal(out[:, 25:], torch.full((m, 5), 7.0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_only(format: str, wrong: float) -> None:
    w = weight(37, 100, format)
    for m in (1, 9, 40):
        x = inputs(m, 100, 8)
        clean = apply(x, w)
        for row, column in ((0, 0), (m // 2, 99), (m - 1, 50)):
            spoilt = x.clone()
            spoilt[row, column] = wrong
            result = apply(spoilt, w)
            assert result[row].isnan().all()
            others = torch.arange(m) != row
            assert torch.equal(result[others], clean[others])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
def test_the_largest_products_do_not_overflow(format: str) -> None:
    chosen, k = FORMATS[format], 96
    code = 15 if chosen.bits == 4 else -128
    groups = (3, k // chosen.group)
    lows = torch.zeros(groups) if chosen.lows else None
    w = pack_codes(torch.full((3, k), code, dtype=torch.int8), torch.ones(groups), lows, format)
    for m in (1, 40):
        expected = torch.full((m, 3), -1e3 * k * code)
        torch.testing.assert_close(apply(torch.full((m, k), -1e3), w), expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
def test_embedding_reads_rows_of_the_packed_weight(format: str) -> None:
    w = weight(83, 37, format)
    ids = torch.tensor([0, 15, 16, 82, 0, 41], dtype=torch.int32)
    out = torch.empty(6, 37)
    embed(ids, w, out)
    assert torch.equal(out, w.unpack()[ids.long()])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", QUANTISED)
def test_no_rows_is_no_work(format: str) -> None:
    linear(torch.empty(0, 40), weight(16, 40, format), torch.empty(0, 16))


@pytest.mark.usefixtures("isa")
def test_every_half_survives_packing() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    floats = pack(halves.view(256, 256), "float16").unpack().view(-1)
    assert torch.equal(floats.nan_to_num(1.5), halves.nan_to_num(1.5))
    assert torch.equal(floats.signbit(), halves.signbit())


@pytest.mark.usefixtures("isa")
def test_floats_are_rounded_to_halves_as_torch_does() -> None:
    halves = torch.arange(0, 0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middle = (halves[:-1] + halves[1:]) / 2
    near = torch.cat([middle, middle.nextafter(halves[1:]), middle.nextafter(halves[:-1])])
    edges = torch.tensor([65504.0, 65519.9, 65520.0, 1e30, float("inf"), 1e-8, 2.9e-8, 2.98e-8, 3e-8, 0.0])
    values = torch.cat([near, edges, -near, -edges])
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(-1, 16)
    assert torch.equal(pack(values, "float16").unpack(), values.half().float())


def test_impossible_parts_are_refused() -> None:
    codes, scales, lows = parts(5, 40, "q4")
    with pytest.raises(ValueError, match="q4 weights have lows"):
        pack_codes(codes, scales, None, "q4")
    with pytest.raises(ValueError, match="q8 weights have no lows"):
        pack_codes(codes, scales, lows, "q8")
    with pytest.raises(ValueError, match="codes must be"):
        pack_codes(codes.float(), scales, lows, "q4")
    with pytest.raises(ValueError, match="scales must be"):
        pack_codes(codes, scales[:, :1], lows, "q4")
    with pytest.raises(ValueError, match="lows must be"):
        pack_codes(codes, scales, scales.double(), "q4")
