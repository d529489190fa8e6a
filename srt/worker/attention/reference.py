"""Attention in plain torch, layer by layer: slow, for checking."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood.kernels.ops.attention import attend_reference
from sapwood.srt.models.decoder import Batch, Decoder, KvPool


class ReferenceForward:
    """The decoder op by op with the reference attention; `slot_table` is int32 [rows, positions]."""

    def __init__(self, decoder: Decoder, pool: KvPool, slot_table: Tensor) -> None:
        self._decoder = decoder
        self._pool = pool
        self._slot_table = slot_table

    def __call__(self, batch: Batch) -> Tensor:
        return self._decoder.forward(batch, self._pool, self._attend)

    def _attend(self, layer: int, qkv: torch.Tensor, batch: Batch, out: torch.Tensor) -> None:
        spec = self._decoder.spec
        attend_reference(
            qkv,
            self._pool.k[layer],
            self._pool.v[layer],
            self._slot_table,
            batch.rows,
            batch.starts,
            batch.counts,
            spec.q_heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            out,
            spec.window(layer),
        )
