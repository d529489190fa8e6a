"""A decoder op by op, its attention over the slot table: the CPU kernel, or plain torch for checking."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sapwood.kernels.ops.attention import attend, attend_reference
from sapwood.srt.models.decoder import Batch, Decoder, KvPool

ATTENDS = {"cpu": attend, "reference": attend_reference}


class OpByOp:
    """`Decoder.forward` with one of ATTENDS; `slot_table` is int32 [rows, positions]."""

    def __init__(self, decoder: Decoder[Any], pool: KvPool, slot_table: Tensor, backend: str) -> None:
        self._decoder = decoder
        self._pool = pool
        self._slot_table = slot_table
        self._attend_rows = ATTENDS[backend]

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states, float32 [m, hidden], before the final norm; valid until the next call."""
        return self._decoder.forward(batch, self._pool, self._attend)

    def _attend(self, layer: int, qkv: Tensor, batch: Batch, out: Tensor) -> None:
        spec = self._decoder.spec
        self._attend_rows(
            qkv, self._pool.k[layer], self._pool.v[layer], self._slot_table,
            batch.rows, batch.starts, batch.counts, spec.q_heads, spec.kv_heads, spec.head_dim, spec.scale,
            out, spec.window(layer), batch.shared,
        )  # fmt: skip
