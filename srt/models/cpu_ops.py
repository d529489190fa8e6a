"""The exact CPU kernels as the decoder's operations: packed weights, float32 activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood.kernels.ops.activation import gated_mul
from sapwood.kernels.ops.gemm import PackedWeight, embed, linear
from sapwood.kernels.ops.norm import head_norm, rms_norm
from sapwood.kernels.ops.rope import rope_store
from sapwood.srt.models.weights import Part, Storage, WeightSource


class CpuOps:
    """`models.ops.Ops` over PackedWeight; `storage` is what matrices are packed as. `vocab`: how many ids
    there are; a rank, whose embedding has some of them alone, must know it."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, storage: Storage, vocab: int | None = None) -> None:
        self._storage, self._vocab = storage, vocab

    def weight(self, source: WeightSource, parts: Sequence[Part]) -> PackedWeight:
        return source.linear(parts, self._storage)

    def rows(self, weight: PackedWeight) -> int:
        return weight.n

    def vector(self, values: Tensor) -> Tensor:
        return values

    def bias(self, values: Tensor) -> Tensor:
        return values

    def table(self, values: Tensor) -> Tensor:
        return values

    def embed(self, ids: Tensor, weight: PackedWeight, first: int | None, out: Tensor) -> None:
        if first is None:
            embed(ids, weight, out)
            return
        assert self._vocab is not None
        wrong = ids[(ids < 0) | (ids >= self._vocab)]
        if len(wrong):
            raise IndexError(f"token id {int(wrong[0])} is not from 0 to {self._vocab - 1}")
        local = ids - first
        elsewhere = (local < 0) | (local >= weight.n)
        embed(local.masked_fill(elsewhere, 0), weight, out)
        out[elsewhere] = 0.0

    def linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        linear(x, weight, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rms_norm(x, weight, eps, out)

    def add_rms_norm(self, branch: Tensor, hidden: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        hidden += branch
        rms_norm(hidden, weight, eps, out)

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        head_norm(heads, weight, eps)

    def rope_store(
        self, qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, hq: int, hkv: int, d: int,
        k_pool: Tensor, v_pool: Tensor,
    ) -> None:  # fmt: skip
        rope_store(qkv, positions, slots, table, hq, hkv, d, k_pool, v_pool)

    def gated_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        gated_mul(gate_up, activation, out)
