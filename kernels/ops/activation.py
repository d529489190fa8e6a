"""The gated activations of a decoder's MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.expect import expect

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""How C++ is told an activation."""


def gated_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """`out = activation(gate) * up`: gate_up float32 [m, 2 i], the gate first; out float32 [m, i].

    GELU is its tanh form, within 1e-6 of the formula, relatively, where |gate| < 3; torch's float32 loses
    digits below 0.
    """
    m, i = out.shape
    expect("gate_up", gate_up, torch.float32, m, 2 * i)
    expect("out", out, torch.float32, m, i)
    kernels().gated_mul(gate_up.data_ptr(), m, i, ACTIVATIONS[activation], out.data_ptr())


def gated_mul_reference(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """The same on any device and of any type: float32 inside (or float64), rounded once."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if activation == "silu":
        out.copy_(torch.nn.functional.silu(gate) * up)
    else:
        out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)
