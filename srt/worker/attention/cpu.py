"""Attention on the CPU: our own exact kernel over slot lists."""

from __future__ import annotations

import torch

from sapwood.kernels.ops import attention
from sapwood.srt.models.decoder import Batch
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.kv_pool import KvPool


class CpuAttention:
    """Calls the kernel named by `backend` ("cpu", or "reference": plain torch) for each layer.

    `slot_table` is [rows, positions] int32 and is read at every call.
    """

    def __init__(self, spec: DecoderSpec, pool: KvPool, slot_table: torch.Tensor, backend: str) -> None:
        self._spec = spec
        self._pool = pool
        self._slot_table = slot_table
        self._kernel = attention.attend if backend == "cpu" else attention.attend_reference

    def __call__(self, layer: int, qkv: torch.Tensor, batch: Batch, out: torch.Tensor) -> None:
        """What `models.decoder.Attend` asks for."""
        spec = self._spec
        self._kernel(
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
