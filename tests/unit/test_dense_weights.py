"""Weights as a device holds them: rows in order, in the type asked for, or in 8 bits with a scale a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.kernels.ops import dense
from sapwood.kernels.ops.dense import (
    FP8,
    DenseWeight,
    fp8_weight,
    linear_dense,
    linear_dense_reference,
    linear_fp8,
    linear_fp8_reference,
    quantise_fp8,
    widens,
)
from sapwood.srt.errors import ConfigError, ModelError
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models import device_ops
from sapwood.srt.models.decoder import Decoder
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, HEAD
from sapwood.srt.models.weights import Part, WeightSource
from tests.gpu import ops_double
from tests.models import source_of, tiny_llama

CPU = torch.device("cpu")
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dequantised(weight: DenseWeight) -> Tensor:
    assert weight.scale is not None
    return weight.data.float() * weight.scale[:, None]


class Made:
    """A source whose matrices are given; `pieces` rows come at a time."""

    def __init__(self, pieces: int = 3, **matrices: Tensor) -> None:
        self._pieces, self._matrices = pieces, matrices

    def floats(self, parts: list[Part]) -> Iterator[Tensor]:
        for part in parts:
            rows = self._matrices[part.name]
            for begin in range(0, len(rows), self._pieces):
                yield rows[begin : begin + self._pieces].clone()


def made(pieces: int = 3, **matrices: Tensor) -> Any:
    return Made(pieces, **matrices)


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
    linear_fp8(x, weight, found)
    linear_fp8_reference(x, weight, expected)
    # torch's result is bfloat16, whatever is asked for.
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    exact = x.float() @ dequantised(weight).t()
    assert ((expected.float() - exact).norm() / exact.norm()) < 0.05, "activations keep 3 bits"


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


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_lie_in_order_however_they_come(kind: torch.dtype) -> None:
    a, b = values(7, 16), values(5, 16, seed=1)
    ops = DeviceOps(CPU, kind)
    weight = ops.weight(made(a=a, b=b), [Part("b"), Part("a")])
    assert torch.equal(weight.data, torch.cat([b, a]).to(kind))
    assert weight.data.is_contiguous()
    assert weight.scale is None
    assert ops.rows(weight) == 12
    assert ops.summary() == f"{kind}".removeprefix("torch.") + " 0 MiB"


def test_float16_refuses_what_it_cannot_hold_by_name() -> None:
    large = values(7, 16)
    large[6, 3] = 70000.0
    source, parts = made(fine=values(7, 16), large=large), [Part("fine"), Part("large")]
    with pytest.raises(ModelError, match=r"^large holds values beyond 65504.*use --dtype bfloat16"):
        DeviceOps(CPU, torch.float16).weight(source, parts)
    held = DeviceOps(CPU, torch.bfloat16).weight(source, parts)
    assert held.data[13, 3] == 70144.0


def test_embedding_and_head_keep_their_16_bits() -> None:
    ops = DeviceOps(CPU, torch.bfloat16, quantization="fp8")
    source = made(**{EMBEDDING: values(32, 16), HEAD: values(32, 16), "other": values(32, 16)})
    assert ops.weight(source, [Part(EMBEDDING)]).scale is None
    assert ops.weight(source, [Part(HEAD)]).scale is None
    other = ops.weight(source, [Part("other")])
    assert other.scale is not None
    assert other.data.dtype is FP8
    torch.testing.assert_close(dequantised(other), values(32, 16), rtol=2**-3, atol=2**-5)


def test_a_matrix_that_8_bits_do_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--quantization fp8 does not fit odd: .* not 20 x 16") as error:
        DeviceOps(CPU, torch.bfloat16, quantization="fp8").weight(made(odd=values(20, 16)), [Part("odd")])
    assert error.value.param == "quantization"


def test_a_ranks_rows_and_columns_are_those_of_the_file(tmp_path: Path) -> None:
    weights = open_weights(source_of(tiny_llama(tmp_path), skip_tokenizer_init=True))
    ops = DeviceOps(CPU, torch.float32)
    whole = torch.cat(list(weights.floats([Part(GATE)])))
    cut = ops.weight(weights, [Part(GATE, rows=range(64, 96)), Part(UP, columns=None, rows=range(3))])
    assert torch.equal(cut.data[:32], whole[64:96])
    down = Part("model.layers.0.mlp.down_proj.weight", columns=range(64))
    assert ops.weight(weights, [down]).data.shape == (64, 64)


def dummies(tmp_path: Path, device: torch.device | None) -> WeightSource:
    source = source_of(tiny_llama(tmp_path, weights=False), load_format="dummy", skip_tokenizer_init=True)
    return open_weights(source, device=device)


def test_dummy_weights_are_drawn_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, randn, seen = torch.device("cpu", 0), torch.randn, set()

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        seen.add(kwargs["device"])
        return randn(*args, **kwargs)

    monkeypatch.setattr(torch, "randn", drawn)
    pieces = list(dummies(tmp_path, device).floats([Part(GATE), Part(UP, columns=range(32))]))
    assert seen == {device}
    assert [sum(len(p) for p in pieces if p.shape[1] == k) for k in (64, 32)] == [96, 96]


def test_a_decoder_of_dummies_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path, weights=False), load_format="dummy", skip_tokenizer_init=True)

    def gate_up() -> Tensor:
        weights = open_weights(source, device=CPU)
        return (
            Decoder(spec_of(source.config), weights, DeviceOps(CPU, torch.bfloat16), 64)
            .layers[1]
            .gate_up.data
        )

    assert torch.equal(gate_up(), gate_up())
    assert gate_up().float().std() == pytest.approx(64**-0.5, rel=0.05)
