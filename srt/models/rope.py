"""The rotary frequencies of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sapwood.srt.models.spec import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs: float32, as Hugging Face rounds them."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**powers)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Wavelengths below one bound stay, those above another are stretched, those between are blended."""
    low, high, length = rope.low_freq_factor, rope.high_freq_factor, rope.original_length
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > length / low, plain / rope.factor, plain)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(between, blended, stretched)
