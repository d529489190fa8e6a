"""FlashInfer's functions for one layer, in torch: their documented meaning, and what their kernels demand.

Arguments are those of the package (see `SIGNATURES`). The kernels read memory as the type of their first
argument, whatever a weight's or a pool's own type is: here a wrong type is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
POOLS = (*HALVES, torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128, 256, 512)

__version__ = "0.7.4"

_NORM = ["input", "weight", "eps", "out", "enable_pdl"]
_FUSED = ["input", "residual", "weight", "eps", "enable_pdl"]
_GATED = ["input", "out", "enable_pdl"]
SIGNATURES = {
    "rmsnorm": _NORM,
    "gemma_rmsnorm": _NORM,
    "fused_add_rmsnorm": _FUSED,
    "gemma_fused_add_rmsnorm": _FUSED,
    "silu_and_mul": _GATED,
    "gelu_tanh_and_mul": _GATED,
    "apply_rope_with_cos_sin_cache_inplace": [
        "positions", "query", "key", "head_size", "cos_sin_cache", "is_neox",
    ],
    "append_paged_kv_cache": [
        "append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices",
        "kv_indptr", "kv_last_page_len", "kv_layout",
    ],
}  # fmt: skip
"""The arguments of flashinfer-python 0.7.4, in order."""


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    return _norm(input, weight, 0.0, eps, out)


def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    # The CUDA kernel takes rows, the CuTe one heads too.
    assert input.dim() == 2
    return _norm(input, weight, 1.0, eps, out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _fused(input, residual, weight, 0.0, eps)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _fused(input, residual, weight, 1.0, eps)


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, out, torch.nn.functional.silu)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated(input, out, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    rotary = cos_sin_cache.shape[1]
    assert cos_sin_cache.dtype is torch.float32
    assert cos_sin_cache.is_contiguous()
    assert positions.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64)
    # Another kernel, which may read what it wrote, takes other heads; halves are read in vectors.
    assert head_size in HEAD_DIMS
    assert rotary % 16 == 0
    assert rotary <= head_size
    assert is_neox
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, dim=-1)
    for rows in (query, key):
        assert rows.dtype in HALVES
        assert rows.shape[0] == positions.shape[0] > 0
        _aligned(rows)
        turned = rows.view(rows.shape[0], -1, head_size)[..., :rotary]
        low, high = turned.float().chunk(2, dim=-1)
        turned.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert isinstance(paged_kv_cache, tuple)
    assert kv_layout == "NHD"
    m, heads, d = append_key.shape
    assert m > 0
    assert d in HEAD_DIMS
    # One block has all heads of a position, each thread 16 bytes or a 32nd of a head.
    if heads * (d // max(16 // append_key.element_size(), d // 32)) > 1024:
        raise RuntimeError("AppendPagedKVCache kernel launch failed: invalid configuration argument")
    assert kv_indptr.shape[0] == kv_last_page_len.shape[0] + 1
    for index in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert index.dtype is torch.int32
        assert index.dim() == 1
        assert index.is_contiguous()
    assert batch_indices.shape == positions.shape == (m,)
    assert paged_kv_cache[0].stride() == paged_kv_cache[1].stride()
    size = paged_kv_cache[0].shape[1]
    for pages, values in zip(paged_kv_cache, (append_key, append_value), strict=True):
        assert pages.dtype is values.dtype
        assert pages.dtype in POOLS
        assert pages.shape[1:] == (size, heads, d)
        _aligned(values)
        for row in range(m):
            batch, position = int(batch_indices[row]), int(positions[row])
            pages_of_it = int(kv_indptr[batch + 1] - kv_indptr[batch])
            assert position < (pages_of_it - 1) * size + int(kv_last_page_len[batch])
            page = kv_indices[int(kv_indptr[batch]) + position // size]
            pages.view(torch.uint8)[page, position % size] = values[row].contiguous().view(torch.uint8)


def _norm(x: Tensor, weight: Tensor, more: float, eps: float, out: Tensor | None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    assert x.dtype in HALVES
    assert x.dtype is weight.dtype is out.dtype
    assert x.dim() in (2, 3)
    assert x.shape == out.shape
    assert len(x) > 0
    assert weight.shape == (x.shape[-1],)
    _normable(x, out)
    _begins(weight, 16)
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_(wide * root * (weight.float() + more))
    return out


def _fused(x: Tensor, residual: Tensor, weight: Tensor, more: float, eps: float) -> None:
    assert x.dim() == 2
    assert x.shape == residual.shape
    assert x.dtype is residual.dtype is weight.dtype
    assert x.dtype in HALVES
    assert len(x) > 0
    _normable(x, residual)
    _begins(weight, 16)
    total = x.float() + residual.float()
    residual.copy_(total)
    root = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    x.copy_(total * root * (weight.float() + more))


def _gated(x: Tensor, out: Tensor | None, activation: object) -> Tensor:
    assert callable(activation)
    assert x.shape[-1] % 2 == 0
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2)) if out is None else out
    assert x.dtype in HALVES
    assert x.dtype is out.dtype
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert x.shape[:-1] == out.shape[:-1]
    assert x.shape[-1] == 2 * out.shape[-1]
    assert len(x) > 0
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(activation(gate) * up)
    return out


def _normable(*rows: Tensor) -> None:
    """What the CuTe kernels were compiled for: rows without gaps begin as their length divides, up to 128
    bytes, all others at 16."""
    for x in rows:
        _aligned(x)
        dense = x.dim() == 2 and all(other.is_contiguous() for other in rows)
        _begins(x, math.gcd(128, x.shape[-1] * x.element_size()) if dense else 16)


def _begins(x: Tensor, alignment: int) -> None:
    """In its storage, which on a GPU begins at a multiple of 512 bytes."""
    assert x.storage_offset() * x.element_size() % alignment == 0


def _aligned(x: Tensor) -> None:
    """Kernels read 16 bytes at once: rows and heads begin at such a border."""
    assert x.stride(-1) == 1
    begins = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:-1])]
    assert all(begin % 16 == 0 for begin in begins)
