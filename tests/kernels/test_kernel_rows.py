"""Norms, activation and rotary positions: right against torch, and each row on its own."""

from __future__ import annotations

import pytest
import torch

from sapwood.kernels import native
from sapwood.kernels.ops.activation import (
    gated_mul,
    gated_mul_reference,
)
from sapwood.kernels.ops.norm import head_norm, head_norm_reference, rms_norm, rms_norm_reference
from sapwood.kernels.ops.rope import rope_store, rope_store_reference, rope_table

SIZES = (1, 7, 16, 100, 576, 1536)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("h", SIZES)
def test_rms_norm(h: int) -> None:
    x, weight = random(70, h) * 5, random(h, seed=1)
    out, expected = torch.empty(70, h), torch.empty(70, h)
    rms_norm(x, weight, 1e-5, out)
    rms_norm_reference(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    alone = torch.empty(1, h)
    for row in (0, 33, 69):
        rms_norm(x[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], out[row])
    rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


@pytest.mark.usefixtures("isa")
def test_head_norm_touches_its_heads_only() -> None:
    qkv, weight = random(9, 10 * 20), random(20, seed=1)
    expected = qkv.clone()
    head_norm(qkv[:, 40:160].view(9, 6, 20), weight, 1e-6)
    head_norm_reference(expected[:, 40:160].view(9, 6, 20), weight, 1e-6)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(qkv[:, :40], expected[:, :40])
    assert torch.equal(qkv[:, 160:], expected[:, 160:])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("i", SIZES)
@pytest.mark.parametrize(("activation", "atol"), [("silu", 1e-6), ("gelu_tanh", 1e-5)])
def test_gated_mul(activation: str, atol: float, i: int) -> None:
    gate_up = random(31, 2 * i) * 4
    out, expected = torch.empty(31, i), torch.empty(31, i)
    gated_mul(gate_up, activation, out)
    gated_mul_reference(gate_up, activation, expected)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=atol)
    alone = torch.empty(1, i)
    gated_mul(gate_up[17:18], activation, alone)
    assert torch.equal(alone[0], out[17])


@pytest.mark.usefixtures("isa")
def test_gelu_tanh_is_the_formula_to_a_few_units_in_the_last_place() -> None:
    """Against float64: float32's 1 + tanh loses all its digits for negative gates."""
    gates = torch.linspace(-12, 12, 24001)
    out, exact = torch.empty(1, 24001), torch.empty(1, 24001, dtype=torch.float64)
    gated_mul(torch.cat([gates, torch.ones(24001)])[None], "gelu_tanh", out)
    gated_mul_reference(torch.cat([gates, torch.ones(24001)])[None].double(), "gelu_tanh", exact)
    near = gates.abs() < 3
    torch.testing.assert_close(out[:, near].double(), exact[:, near], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-12)


@pytest.mark.usefixtures("isa")
def test_gelu_tanh_of_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -88.0, -0.0, 0.0, 88.0, 1e4, 1e30, float("nan")])
    out, expected = torch.empty(1, 8), torch.empty(1, 8)
    gated_mul(torch.cat([gates, torch.ones(8)])[None], "gelu_tanh", out)
    gated_mul_reference(torch.cat([gates, torch.ones(8)])[None], "gelu_tanh", expected)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_threads_change_nothing(isa: str) -> None:
    x, weight, gate_up = random(200, 576), random(576, seed=1), random(200, 1152, seed=2)
    results = []
    for threads in (1, 2, 5):
        native.load(isa, threads)
        normed, headed, gated = torch.empty(200, 576), x.clone(), torch.empty(2, 200, 576)
        rms_norm(x, weight, 1e-5, normed)
        head_norm(headed.view(200, 9, 64), weight[:64].contiguous(), 1e-5)
        gated_mul(gate_up, "silu", gated[0])
        gated_mul(gate_up, "gelu_tanh", gated[1])
        results.append((normed, headed, gated))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.usefixtures("isa")
def test_silu_of_extreme_gates() -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan"), 1.0])
    out, expected = torch.empty(1, 10), torch.empty(1, 10)
    gated_mul(torch.cat([gates, torch.ones(10)])[None], "silu", out)
    gated_mul_reference(torch.cat([gates, torch.ones(10)])[None], "silu", expected)
    torch.testing.assert_close(out[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-30, equal_nan=True)


def test_rope_table_is_hugging_faces_float32() -> None:
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    table = rope_table(inv_freq, 3000)
    angles = (inv_freq[None, :, None] @ torch.arange(3000.0)[None, None, :]).transpose(1, 2)[0]
    assert torch.equal(table, torch.cat([angles.cos(), angles.sin()], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("hq", "hkv", "d", "rotary"),
    [(9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 34, 34), (2, 1, 6, 6), (4, 2, 96, 72)],
)
def test_rope_store(isa: str, hq: int, hkv: int, d: int, rotary: int, dtype: torch.dtype) -> None:
    m = 21
    table = rope_table(1.0 / 1000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary), 300, 1.1)
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 300, (m,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(50, generator=generator)[:m].int()
    before = random(m, (hq + 2 * hkv) * d)
    states = []
    for run, threads in ((rope_store_reference, 1), (rope_store, 1), (rope_store, 2)):
        native.load(isa, threads)
        qkv, (k_pool, v_pool) = before.clone(), torch.zeros(2, 50, hkv, d).to(dtype)
        run(qkv, positions, slots, table, hq, hkv, d, k_pool, v_pool)
        states.append((qkv, k_pool, v_pool))
        heads = qkv.view(m, -1, d)
        assert torch.equal(heads[..., rotary:], before.view(m, -1, d)[..., rotary:])
    for state in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(state, states[0], strict=True))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("position", "slot"), [(8, 0), (-1, 0), (0, 5), (0, -1)])
def test_rope_store_writes_nothing_out_of_range(position: int, slot: int) -> None:
    table = rope_table(torch.ones(2), 8)
    qkv, pool = random(2, 12), torch.zeros(5, 1, 4)
    before = qkv.clone()
    positions, slots = torch.tensor([1, position]).int(), torch.tensor([1, slot]).int()
    with pytest.raises(IndexError, match=f"position {position} .* slot {slot} "):
        rope_store(qkv, positions, slots, table, 1, 1, 4, pool, pool.clone())
    assert torch.equal(qkv, before)
    assert not pool.any()


@pytest.mark.parametrize("rotary", [3, 6])
def test_rope_store_refuses_a_table_that_fits_no_head(rotary: int) -> None:
    pool = torch.zeros(5, 1, 4)
    one = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"turns {rotary} channels; an even number up to the head's 4"):
        rope_store(random(1, 12), one, one, torch.ones(8, rotary), 1, 1, 4, pool, pool.clone())
