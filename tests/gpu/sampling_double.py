"""FlashInfer's filters of probabilities, in torch: all that is as probable as the last one kept stays.

Arguments are those of the package (see `SIGNATURES`)."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNATURES = {
    "top_k_renorm_probs": ["probs", "top_k", "is_deterministic"],
    "top_p_renorm_probs": ["probs", "top_p", "is_deterministic"],
}
"""The arguments of flashinfer-python 0.7.4, in order."""


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    assert top_k.dtype == torch.int32
    assert bool((top_k > 0).all())
    kept = top_k.clamp(max=probs.shape[1]).long()[:, None]
    return _renormed(probs, probs.sort(dim=-1, descending=True).values.gather(1, kept - 1))


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    assert top_p.dtype == torch.float32
    # Outside (0, 1) nothing is said: the best alone.
    share = torch.where(top_p < 1, top_p, 0.0).double()[:, None]
    ranked = probs.sort(dim=-1, descending=True).values
    last = (ranked.double().cumsum(-1) < share).sum(-1, keepdim=True).clamp(max=probs.shape[1] - 1)
    return _renormed(probs, ranked.gather(1, last))


def _renormed(probs: Tensor, last: Tensor) -> Tensor:
    assert probs.dtype == torch.float32
    assert probs.is_contiguous()
    # Of what is no number, or no distribution, nothing is said.
    assert bool(((probs.sum(-1) - 1).abs() < 1e-5).all())
    kept = torch.where(probs >= last, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)
