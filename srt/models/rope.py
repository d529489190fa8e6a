"""The rotary frequencies of a model, computed as Hugging Face computes them.

"dynamic" and "longrope" change with the length of the sequence in Hugging Face: beyond the original length
every key of the cache would have to be turned anew. Here the length is fixed to the longest that is served
(`max_length`): a server whose context is within the original length equals Hugging Face, one with a longer
context uses for every request the frequencies that Hugging Face uses at that length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sapwood.srt.models.spec import Rope


def inverse_frequencies(rope: Rope, rotary: int, max_length: int = 0) -> Tensor:
    """Radians per position of each of the rotary / 2 pairs: float32, as Hugging Face rounds them.

    `max_length` is the longest sequence served, in tokens; at 0 it is taken to be within the original length.
    """
    theta = _dynamic_base(rope, rotary, max_length) if rope.kind == "dynamic" else rope.theta
    powers: Tensor = theta ** (torch.arange(0, rotary, 2, dtype=torch.int64).to(torch.float32) / rotary)
    if rope.kind == "longrope":
        factors = rope.long_factors if max_length > rope.original_length else rope.factors
        return 1.0 / (torch.tensor(factors) * powers)
    plain: Tensor = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope, rotary)
    return plain


def _dynamic_base(rope: Rope, rotary: int, max_length: int) -> float:
    """NTK-aware scaling: a base that grows with the length beyond the original one."""
    stretch = rope.factor * max(max_length, rope.original_length) / rope.original_length
    grown: float = (stretch - (rope.factor - 1)) ** (rotary / (rotary - 2))
    return rope.theta * grown


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Wavelengths below one bound stay, those above another are stretched, those between are blended."""
    low, high, length = rope.low_freq_factor, rope.high_freq_factor, rope.original_length
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > length / low, plain / rope.factor, plain)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(between, blended, stretched)


def _yarn(powers: Tensor, rope: Rope, rotary: int) -> Tensor:
    """A ramp from frequencies that are kept to frequencies that are stretched, by how often each turns."""

    def channel(turns: float) -> float:
        log = math.log(rope.original_length / (turns * 2 * math.pi))
        return rotary * log / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(rotary // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
