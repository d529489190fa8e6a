"""Weights as a device multiplies with them: in floats, or in 8 bits with a scale for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.kernels.ops import dense
from sapwood.kernels.ops.dense import (
    FP8,
    DenseWeight,
    Fp8Linear,
    fp8_linear,
    fp8_weight,
    linear_dense,
    linear_dense_reference,
    linear_fp8_reference,
    quantise_fp8,
    widens,
)
from sapwood.srt.errors import ConfigError
from sapwood.srt.models import device_ops
from sapwood.srt.models.device_ops import DeviceOps
from tests.gpu import ops_double

CPU = torch.device("cpu")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dequantised(weight: DenseWeight) -> Tensor:
    assert weight.scale is not None
    return weight.data.float() * weight.scale[:, None]


def test_each_row_spans_the_range_of_8_bits() -> None:
    rows = values(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 1e30])[:, None]
    codes, scale = quantise_fp8(rows)
    assert codes.dtype is FP8
    assert scale.shape == (5,)
    assert scale.dtype is torch.float32
    assert codes.float().abs().amax(-1).tolist() == [448.0] * 5
    errors = (codes.float() * scale[:, None] - rows).abs()
    # Three bits after the first, but for the values so small that they share the smallest step.
    assert (errors <= rows.abs() / 16 + scale[:, None] * 2**-10).all()


def test_a_row_of_zeros_stays_one_and_of_no_rows_there_are_none() -> None:
    codes, scale = quantise_fp8(torch.zeros(2, 16))
    assert (codes.float() == 0).all()
    assert (scale > 0).all()
    assert quantise_fp8(torch.zeros(0, 16))[0].shape == (0, 16)


def test_a_row_is_rounded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = values(48, 32)
    whole = fp8_weight(data)
    monkeypatch.setattr(dense, "_PIECE", 5 * 32)
    pieces = fp8_weight(data)
    assert pieces.scale is not None
    assert whole.scale is not None
    assert torch.equal(whole.data.view(torch.uint8), pieces.data.view(torch.uint8))
    assert torch.equal(whole.scale, pieces.scale)


@pytest.mark.parametrize("shape", [(24, 32), (32, 24)])
def test_8_bit_weights_have_whole_blocks(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"multiples of 16, not {shape[0]} x {shape[1]}"):
        fp8_weight(torch.zeros(shape))


@pytest.mark.parametrize("m", [1, 5, 32])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_8_bit_product_is_that_of_what_the_bits_stand_for(m: int, kind: torch.dtype) -> None:
    """The call that a GPU gets, on this CPU's kernel for it."""
    x, weight = values(m, 64).to(torch.bfloat16), fp8_weight(values(48, 64, seed=1))
    found, expected = (torch.empty((m, 48), dtype=kind) for _ in range(2))
    Fp8Linear(CPU)(x, weight, found)
    linear_fp8_reference(x, weight, expected)
    # torch's result is bfloat16, whatever is asked for.
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    exact = x.float() @ dequantised(weight).t()
    assert ((expected.float() - exact).norm() / exact.norm()) < 0.05, "activations keep 3 bits"


class Lacking:
    """torch._scaled_mm of a library that scales by rows, of a weight with `k` inputs, only from `least` rows
    on. `refused`: the numbers of rows for which it was asked in vain."""

    def __init__(self, k: int, least: int, told: str = "CUBLAS_STATUS_NOT_SUPPORTED") -> None:
        self._product: Any = torch._scaled_mm
        self._k, self._least, self._told = k, least, told
        self.refused: list[int] = []

    def __call__(self, a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        assert options["use_fast_accum"] is False
        if scale_b.numel() > 1 and a.shape[1] == self._k and len(a) < self._least:
            self.refused.append(len(a))
            raise RuntimeError(f"CUDA error: {self._told} when calling `cublasLtMatmulAlgoGetHeuristic(...)`")
        product: Tensor = self._product(a, b, scale_a=scale_a, scale_b=scale_b, **options)
        return product


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_where_the_library_does_not_scale_by_rows_it_is_done_after_the_product(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper of few rows and a long k; found out once a shape, so that no capture meets the error."""
    library = Lacking(k=96, least=8)
    monkeypatch.setattr(torch, "_scaled_mm", library)
    multiply = Fp8Linear(CPU)
    for n, k in ((48, 96), (32, 96), (48, 64)):
        weight = fp8_weight(values(n, k, seed=1))
        for m in (1, 7, 8, 1, 7):
            x = values(m, k) * torch.logspace(-2, 2, m)[:, None]
            found, expected = (torch.empty((m, n), dtype=kind) for _ in range(2))
            multiply(x.to(torch.bfloat16), weight, found)
            linear_fp8_reference(x.to(torch.bfloat16), weight, expected)
            close = 2**-7 if (m, k) == (8, 96) or k == 64 else 1e-5 if kind is torch.float32 else 2**-8
            torch.testing.assert_close(found.float(), expected.float(), rtol=close, atol=close)
    assert library.refused == [1, 7, 1, 7], "each shape once, and not for other weights"


def test_other_errors_of_a_product_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, out = values(2, 64), fp8_weight(values(16, 64)), torch.empty(2, 16)
    monkeypatch.setattr(torch, "_scaled_mm", Lacking(64, 8, told="an illegal memory access"))
    multiply = Fp8Linear(CPU)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            multiply(x, weight, out)
    monkeypatch.setattr(torch, "_scaled_mm", Lacking(64, 8, told="CUBLAS_STATUS_INVALID_VALUE"))
    multiply(x, weight, out)


def test_a_device_has_one_8_bit_product_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made = gpu(monkeypatch, 9, 0), []
    monkeypatch.setattr(device_ops, "fp8_linear", made.append)
    DeviceOps(device, torch.bfloat16)
    DeviceOps(device, torch.bfloat16, quantization="fp8")
    assert made == [device], "before anything is captured"
    assert fp8_linear(torch.device("cpu", 0)) is fp8_linear(torch.device("cpu", 0))


def test_a_tokens_result_does_not_depend_on_other_tokens_scales() -> None:
    x, weight = values(3, 64), fp8_weight(values(16, 64, seed=1))
    together, alone = torch.empty(3, 16), torch.empty(1, 16)
    x[2] *= 1000
    linear_dense(x, weight, together)
    linear_dense(x[:1], weight, alone)
    torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_summed_in_float32_and_rounded_once(kind: torch.dtype) -> None:
    x, weight = values(4, 300).to(kind), DenseWeight(values(20, 300, seed=1).to(kind))
    exact = (x.double() @ weight.data.double().t()).float()
    wide, own = torch.empty(4, 20), torch.empty((4, 20), dtype=kind)
    linear_dense(x, weight, wide)
    linear_dense(x, weight, own)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, exact.to(kind))
    linear_dense_reference(x, weight, wide)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)


def test_a_device_that_cannot_widen_is_found_out() -> None:
    assert not widens(CPU, torch.bfloat16), "torch has no such product on a CPU"


def test_a_device_without_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, product = torch.device("cpu", 0), torch.mm

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        widens(device, torch.float16)

    def wide(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return product(a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(torch, "mm", wide)
    assert widens(device, torch.float16)
    widens.cache_clear()


def gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> torch.device:
    """One of this compute capability, as far as operations ask when they are made."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(device_ops, "widens", lambda _device, _dtype: True)
    return torch.device("cuda")


def test_bfloat16_is_refused_where_a_gpu_does_not_compute_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, 7, 5)
    with pytest.raises(ConfigError, match=r"capability 8\.0.*is 7\.5: use --dtype float16") as error:
        DeviceOps(device, torch.bfloat16)
    assert error.value.param == "dtype"
    DeviceOps(device, torch.float16)
    DeviceOps(gpu(monkeypatch, 8, 0), torch.bfloat16)


def test_8_bit_weights_are_refused_where_a_gpu_has_no_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"capability 8\.9 or higher; this one's is 8\.0") as error:
        DeviceOps(gpu(monkeypatch, 8, 0), torch.bfloat16, quantization="fp8")
    assert error.value.param == "quantization"


def test_a_bias_has_no_copy_as_a_norm_has() -> None:
    ops = DeviceOps(CPU, torch.bfloat16, ops_double)
    assert torch.equal(ops.bias(torch.ones(8)), torch.ones(8))
    assert not ops._norms
    ops.vector(torch.ones(8))
    assert len(ops._norms) == 1
