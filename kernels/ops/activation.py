"""The gated activations of a decoder's MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import expect


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`out = silu(gate) * up`: gate_up float32 [m, 2 i], the gate first; out float32 [m, i]."""
    m, i = out.shape
    expect("gate_up", gate_up, torch.float32, m, 2 * i)
    expect("out", out, torch.float32, m, i)
    kernels().silu_mul(gate_up.data_ptr(), m, i, out.data_ptr())


def silu_mul_reference(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_mul(gate_up: Tensor, out: Tensor) -> None:
    """`out = gelu(gate) * up` with GELU's tanh form: gate_up float32 [m, 2 i], gate first; out [m, i].

    Within 1e-6 of the formula, relatively, where |gate| < 3; torch's float32 loses digits below 0.
    """
    m, i = out.shape
    expect("gate_up", gate_up, torch.float32, m, 2 * i)
    expect("out", out, torch.float32, m, i)
    kernels().gelu_tanh_mul(gate_up.data_ptr(), m, i, out.data_ptr())


def gelu_tanh_mul_reference(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)
