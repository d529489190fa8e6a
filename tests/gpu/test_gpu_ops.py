"""The operations of a layer on a device: with FlashInfer's functions (on a CPU their double, on a GPU the
package's own) and in plain torch, each against float32 on the CPU."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.kernels.ops.activation import gated_mul_reference
from sapwood.kernels.ops.attention import attend_reference
from sapwood.kernels.ops.dense import FP8, DenseWeight, fp8_weight, linear_fp8_reference
from sapwood.kernels.ops.norm import rms_norm_reference
from sapwood.kernels.ops.rope import rope_store_reference, rope_table
from sapwood.srt.errors import ConfigError
from sapwood.srt.loader.weights import open_weights
from sapwood.srt.models.decoder import Batch, Decoder
from sapwood.srt.models.device_ops import DeviceOps
from sapwood.srt.models.registry import spec_of
from tests.decoding import Sequence, decoder_of
from tests.gpu import ops_double
from tests.gpu.backends import the_package
from tests.gpu.no_waiting import nothing_waits
from tests.models import FAMILIES, VOCAB, source_of, tiny

EPS = 1e-5
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""The relative error of one rounding, and a little more of float32's sums."""
SITES = ["cpu", "cpu with the double", "cuda", "cuda with FlashInfer"]


@pytest.fixture(params=SITES)
def make(request: pytest.FixtureRequest) -> Callable[..., DeviceOps]:
    """Makes the operations of a site, in a type."""
    device = torch.device("cuda" if request.param.startswith("cuda") else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    flashinfer: Any = None
    if "FlashInfer" in request.param:
        flashinfer = the_package()
    elif "double" in request.param:
        flashinfer = ops_double
    return lambda dtype, **options: DeviceOps(device, dtype, flashinfer, **options)


@pytest.fixture(params=HALVES, ids=["bfloat16", "float16"])
def ops(request: pytest.FixtureRequest, make: Callable[..., DeviceOps]) -> DeviceOps:
    return make(request.param)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there(ops: DeviceOps, x: Tensor) -> Tensor:
    """`x` of the operations' type, on their device."""
    return x.to(ops.device, ops.dtype)


def close(ops: DeviceOps, found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    allowed = roundings * ROUNDING[ops.dtype]
    torch.testing.assert_close(found.float().cpu(), expected.float().cpu(), rtol=allowed, atol=allowed)


def test_the_double_has_the_arguments_of_flashinfer() -> None:
    for name, arguments in ops_double.SIGNATURES.items():
        assert list(inspect.signature(getattr(ops_double, name)).parameters) == arguments


def test_the_double_wants_rows_where_the_norm_kernels_do() -> None:
    """Dense rows of 128 bytes begin at a multiple of 128, though 16 do for others."""
    room, weight = torch.zeros(4 * 64 + 8, dtype=torch.float16), torch.zeros(64 + 4, dtype=torch.float16)
    fits, shifted = room[:256].view(4, 64), room[8:].view(4, 64)
    ops_double.rmsnorm(fits, weight[:64], EPS, out=fits)
    ops_double.rmsnorm(room[8:].view(4, 64)[::2], weight[:64], EPS, out=fits[::2])
    for rows, scale in ((shifted, weight[:64]), (fits, weight[4:])):
        with pytest.raises(AssertionError):
            ops_double.rmsnorm(rows, scale, EPS, out=rows)
        with pytest.raises(AssertionError):
            ops_double.fused_add_rmsnorm(rows, fits.clone(), scale, EPS)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_installed_flashinfer_has_these_arguments() -> None:
    flashinfer = importlib.import_module("flashinfer")
    for name, arguments in ops_double.SIGNATURES.items():
        assert list(inspect.signature(getattr(flashinfer, name)).parameters) == arguments


@pytest.mark.parametrize("in_place", [False, True])
def test_a_norm_is_per_row_and_may_be_in_place(ops: DeviceOps, in_place: bool) -> None:
    x = there(ops, values(5, 96))
    weight = there(ops, 1 + values(96, seed=1) / 4).float()
    expected = torch.empty(5, 96)
    rms_norm_reference(x.cpu().float(), weight.cpu(), EPS, expected)
    out = x if in_place else torch.empty_like(x)
    ops.rms_norm(x, ops.vector(weight.cpu()), EPS, out)
    close(ops, out, expected)


def test_a_norm_whose_weights_are_stored_less_one_loses_nothing_by_that(ops: DeviceOps) -> None:
    """1 + w of a small w is not a 16-bit number: rounded, all of it would be lost."""
    small = ROUNDING[ops.dtype] / 2
    x = there(ops, values(64, 1024))
    found, plain = torch.empty_like(x), torch.empty(64, 1024)
    ops.rms_norm(x, ops.vector(torch.full((1024,), 1 + small)), EPS, found)
    rms_norm_reference(x.cpu().float(), torch.ones(1024), EPS, plain)
    ratio = found.cpu().double().abs().sum() / plain.double().abs().sum()
    assert abs(ratio - 1 - small) < small / 8


@pytest.mark.parametrize("less_one", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_branch_is_added_and_then_normed(ops: DeviceOps, in_place: bool, less_one: bool) -> None:
    branch, hidden = there(ops, values(5, 96)), there(ops, values(5, 96, seed=1))
    weight = (values(96, seed=2) / 8).to(ops.dtype).float() + int(less_one)
    added, expected = branch.cpu().float() + hidden.cpu().float(), torch.empty(5, 96)
    rms_norm_reference(added, weight, EPS, expected)
    before, out = branch.clone(), branch if in_place else torch.empty_like(branch)
    ops.add_rms_norm(branch, hidden, ops.vector(weight), EPS, out)
    close(ops, hidden, added)
    close(ops, out, expected, roundings=3)
    assert in_place or torch.equal(branch, before)


@pytest.mark.parametrize("less_one", [False, True])
@pytest.mark.parametrize("d", [24, 64, 128, 36])
def test_heads_are_normed_where_they_lie_and_no_others(ops: DeviceOps, d: int, less_one: bool) -> None:
    heads = there(ops, values(5, 7, d))
    weight = (values(d, seed=1) / 8).to(ops.dtype).float() + int(less_one)
    expected = heads.cpu().float()
    rms_norm_reference(expected[:, 2:5].clone(), weight, EPS, expected[:, 2:5])
    ops.head_norm(heads[:, 2:5], ops.vector(weight), EPS)
    close(ops, heads, expected)


@pytest.mark.parametrize("pool", ["own", "float8"])
@pytest.mark.parametrize(("d", "rotary"), [(64, 64), (128, 128), (128, 32), (64, 24), (24, 24), (80, 32)])
def test_q_and_k_turn_and_the_pool_is_filled(ops: DeviceOps, d: int, rotary: int, pool: str) -> None:
    hq, hkv, m = 6, 2, 5
    table = rope_table(0.1 * torch.arange(1, rotary // 2 + 1) / rotary, 40)
    qkv = there(ops, values(m, (hq + 2 * hkv) * d))
    kind = ops.dtype if pool == "own" else FP8
    k, v = (torch.full((16, hkv, d), 7.0).to(ops.device, kind) for _ in "kv")
    k_ref, v_ref = (torch.full((16, hkv, d), 7.0) for _ in "kv")
    positions = torch.tensor([3, 0, 39, 17, 17], dtype=torch.int32)
    slots = torch.tensor([4, 15, 0, 9, 7], dtype=torch.int32)
    expected = qkv.cpu().clone()
    rope_store_reference(expected, positions, slots, table, hq, hkv, d, k_ref, v_ref)
    ops.rope_store(qkv, positions.to(ops.device), slots.to(ops.device), ops.table(table), hq, hkv, d, k, v)
    close(ops, qkv, expected, roundings=2)
    allowed = 2 * ROUNDING[ops.dtype] if pool == "own" else 2**-4 + 2 * ROUNDING[ops.dtype]
    for found, reference in ((k, k_ref), (v, v_ref)):
        torch.testing.assert_close(found.float().cpu(), reference, rtol=allowed, atol=allowed)
        untouched = [slot for slot in range(16) if slot not in slots.tolist()]
        assert (found.float()[untouched] == 7.0).all()


def test_an_8_bit_pool_keeps_what_is_beyond_its_range_at_its_end(ops: DeviceOps) -> None:
    d = 64
    qkv = there(ops, torch.full((2, 3 * d), 1000.0))
    qkv[1] *= -1
    k, v = (torch.zeros((4, 1, d)).to(ops.device, FP8) for _ in range(2))
    zero = torch.zeros(2, dtype=torch.int32, device=ops.device)
    slots = torch.tensor([1, 3], dtype=torch.int32, device=ops.device)
    ops.rope_store(qkv, zero, slots, ops.table(rope_table(torch.ones(d // 2), 4)), 1, 1, d, k, v)
    for pool in (k, v):
        assert pool.float()[:, 0, 0].tolist() == [0.0, 448.0, 0.0, -448.0]


def test_a_store_of_many_tokens_leaves_the_page_tables_of_a_graph_in_place(ops: DeviceOps) -> None:
    """What a captured graph reads stays where it was, though a longer step needs longer tables."""
    if ops._pages is None:
        pytest.skip("plain torch has no page tables")
    d, m = 64, 9000
    before = ops._pages.counting(3)
    k, v = (torch.zeros((m, 1, d), dtype=ops.dtype, device=ops.device) for _ in range(2))
    index = torch.arange(m, dtype=torch.int32, device=ops.device)
    qkv = there(ops, values(m, 3 * d))
    ops.rope_store(qkv, index * 0, index, ops.table(rope_table(torch.ones(d // 2), 4)), 1, 1, d, k, v)
    assert torch.equal(v[:, 0], qkv[:, 2 * d :])
    assert ops._pages.counting(3).data_ptr() != before.data_ptr()
    assert any(table.data_ptr() == before.data_ptr() for table in ops._pages._kept)
    assert before.tolist() == [0, 1, 2]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_comes_first(ops: DeviceOps, activation: str) -> None:
    gate_up = there(ops, 3 * values(5, 2 * 72))
    expected, out = torch.empty(5, 72), torch.empty((5, 72), dtype=ops.dtype, device=ops.device)
    gated_mul_reference(gate_up.cpu().float(), activation, expected)
    ops.gated_mul(gate_up, activation, out)
    close(ops, out, expected, roundings=2)


def test_an_embedding_has_zeros_for_the_tokens_of_another_rank(ops: DeviceOps) -> None:
    table = there(ops, values(10, 32))
    ids = torch.tensor([7, 16, 17, 6, 0, 12], dtype=torch.int32, device=ops.device)
    out = torch.ones((6, 32), dtype=ops.dtype, device=ops.device)
    ops.embed(ids, DenseWeight(table), 7, out)
    zero = torch.zeros_like(table[0])
    assert torch.equal(out, torch.stack([table[0], table[9], zero, zero, zero, table[5]]))
    ops.embed(ids[-2:] % 10, DenseWeight(table), None, out[:2])
    assert torch.equal(out[:2], table[[0, 2]])


def test_logits_are_sums_that_were_not_rounded_to_the_activations_type(ops: DeviceOps) -> None:
    x, weight = there(ops, values(3, 256)), DenseWeight(there(ops, values(40, 256, seed=1)))
    out = torch.empty((3, 40), dtype=torch.float32, device=ops.device)
    ops.linear(x, weight, out)
    # On a GPU sums of products may have a few bits less than float32's, far more than the type of x.
    expected = x.cpu().float() @ weight.data.cpu().float().t()
    torch.testing.assert_close(out.cpu(), expected, rtol=1.3e-6, atol=1e-4)


@pytest.mark.parametrize("m", [1, 8, 127, 256, 257])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (28672, 4096)])
def test_8_bit_products_are_there_for_every_number_of_rows(n: int, k: int, m: int) -> None:
    """Of shapes for which the library does not scale by rows too, and in a graph."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("there is no GPU with 8-bit products")
    device = torch.device("cuda", torch.cuda.current_device())
    ops = DeviceOps(device, torch.bfloat16, quantization="fp8")
    generator = torch.Generator(device).manual_seed(m)
    weight = fp8_weight(torch.randn((n, k), generator=generator, device=device))
    x = torch.randn((m, k), generator=generator, device=device).to(torch.bfloat16)
    expected, out = (torch.empty((m, n), dtype=torch.bfloat16, device=device) for _ in range(2))
    linear_fp8_reference(x, weight, expected)
    ops.linear(x, weight, out)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=k**0.5 * 2**-9)
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.linear(x, weight, out)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=k**0.5 * 2**-9)


def every_operation(ops: DeviceOps, m: int) -> None:
    """All of them, for m tokens."""
    device, h, d, hq, hkv = ops.device, 128, 64, 2, 1
    hidden, branch, normed = (there(ops, values(m, h)) for _ in range(3))
    qkv = there(ops, values(m, (hq + 2 * hkv) * d))
    out, logits = torch.empty_like(hidden), torch.empty((m, 48), dtype=torch.float32, device=device)
    k, v = (torch.zeros((m + 1, hkv, d), dtype=ops.dtype, device=device) for _ in range(2))
    index = torch.arange(m, dtype=torch.int32, device=device)
    norm, heads = ops.vector(torch.ones(h)), ops.vector(torch.ones(d))
    table = ops.table(rope_table(torch.ones(d // 2), m + 1))
    weight, square = (DenseWeight(there(ops, values(n, h))) for n in (48, h))

    def run() -> None:
        ops.embed(index, square, None, hidden)
        ops.embed(index, square, 3, hidden)
        ops.rms_norm(hidden, norm, EPS, normed)
        ops.add_rms_norm(branch, hidden, norm, EPS, normed)
        ops.add_rms_norm(branch, hidden, norm, EPS, branch)
        ops.head_norm(qkv.view(m, hq + 2 * hkv, d)[:, :hq], heads, EPS)
        ops.rope_store(qkv, index, index, table, hq, hkv, d, k, v)
        ops.gated_mul(torch.cat([hidden, branch], dim=1), "silu", out)
        ops.gated_mul(torch.cat([hidden, branch], dim=1), "gelu_tanh", out)
        ops.linear(hidden, square, out)
        ops.linear(hidden, weight, logits)

    run()
    if device.type == "cpu":
        with nothing_waits():
            run()
        return
    if m:
        # A capture fails where the host waits.
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()


def silent() -> Any:
    """FlashInfer's functions, which do nothing: their double looks at its arguments, on the host."""
    return SimpleNamespace(**{name: lambda *args, **kwargs: None for name in ops_double.SIGNATURES})


@pytest.mark.parametrize("dtype", HALVES)
def test_no_operation_waits_for_the_device(make: Callable[..., DeviceOps], dtype: torch.dtype) -> None:
    ops = make(dtype)
    if ops._flashinfer is ops_double:
        ops = DeviceOps(ops.device, dtype, silent())
    every_operation(ops, 5)


def test_a_step_without_tokens_is_nothing(ops: DeviceOps) -> None:
    every_operation(ops, 0)


def test_flashinfer_does_not_compute_in_float32() -> None:
    with pytest.raises(ConfigError, match="--dtype float32 is not for a GPU"):
        DeviceOps(torch.device("cpu"), torch.float32, ops_double)


@dataclass
class DeviceSequence(Sequence):
    """A row whose decoder is on a device; attention is the plain one, on the CPU."""

    kind: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.k, self.v = ([pool.to(self.device, self.kind) for pool in pools] for pools in (self.k, self.v))

    def _op_by_op(self, batch: Batch) -> Tensor:
        for name in ("ids", "positions", "slots"):
            setattr(batch, name, getattr(batch, name).to(self.device))
        return self.decoder.forward(batch, self, self._attend)

    def _attend(self, layer: int, qkv: Tensor, batch: Batch, out: Tensor) -> None:
        spec, found = self.decoder.spec, torch.empty(out.shape)
        attend_reference(
            qkv.cpu().float(), self.k[layer].cpu(), self.v[layer].cpu(), self.table, batch.rows, batch.starts,
            batch.counts, spec.q_heads, spec.kv_heads, spec.head_dim, spec.scale, found, spec.window(layer),
        )  # fmt: skip
        out.copy_(found)


IDS = [(i * 37 + 11) % VOCAB for i in range(60)]


def logits_of(ops: DeviceOps, path: Path) -> Tensor:
    """After each of IDS, which come in chunks and one by one."""
    source = source_of(path, skip_tokenizer_init=True)
    decoder = Decoder(spec_of(source.config), open_weights(source), ops, source.context_length)
    row = DeviceSequence(decoder, 80, kind=ops.dtype, device=ops.device)
    parts = [IDS[:37], *([i] for i in IDS[37:40]), IDS[40:]]
    return torch.cat([row.extend(part).cpu() for part in parts])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


WIDE: dict[str, Any] = {"head_dim": 64}
"""Heads of a size that FlashInfer's kernels take; of two families it follows from the hidden size."""
SPREAD = {torch.float32: 1e-5, torch.bfloat16: 0.016, torch.float16: 0.002}
"""Of the errors of logits, which have a spread of about one: a few layers' worth of roundings."""
FP8_SPREAD = 0.2


@pytest.mark.parametrize("wide", [False, True], ids=["small heads", "heads of 64"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=["float32", "bfloat16", "float16"])
def test_a_decoder_on_the_device_has_the_logits_of_the_cpu(
    tmp_path: Path, make: Callable[..., DeviceOps], family: str, dtype: torch.dtype, wide: bool
) -> None:
    path = family_model(tmp_path, family, wide)
    try:
        ops = make(dtype)
    except ConfigError:
        pytest.skip("FlashInfer computes in 16 bits")
    assert_spread(ops, path, SPREAD[dtype])


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_8_bit_weights_are_near(tmp_path: Path, make: Callable[..., DeviceOps], family: str) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit products")
    ops = make(torch.bfloat16, quantization="fp8")
    assert_spread(ops, family_model(tmp_path, family, wide=True), FP8_SPREAD)
    assert "float8_e4m3fn" in ops.summary()
    assert "bfloat16" in ops.summary(), "embedding and head"


def family_model(path: Path, family: str, wide: bool) -> Path:
    by_hidden = FAMILIES[family].get("head_dim", 0) is None
    options = ({"hidden_size": 256} if by_hidden else WIDE) if wide else {}
    return tiny(path, family, dtype=torch.bfloat16, **options)


def assert_spread(ops: DeviceOps, path: Path, allowed: float) -> None:
    expected, found = Sequence(decoder_of(path), 80).extend(IDS), logits_of(ops, path)
    spread = float(expected.std())
    assert spread > 0.3, "a model whose logits are all alike shows nothing"
    errors = (found - expected) / spread
    assert errors.std() < allowed
    assert errors.abs().max() < 10 * allowed
