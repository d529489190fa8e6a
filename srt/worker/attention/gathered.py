"""Attention by torch on any device, over K and V that are gathered first: for where FlashInfer is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sapwood.srt.errors import ConfigError
from sapwood.srt.models.decoder import KvPool
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.paged import Paged

GATHERED_BYTES = 256 << 20
"""The most of K and V, or of scores, that is there at a time, beside what one row or one query needs."""


@dataclass(slots=True)
class _Decodes:
    """Rows first to last of a step, whose K and V are gathered together: `places` int64 [rows, longest] in
    the step's page table, `lengths` int64 [rows, 1]; on the device."""

    first: int
    last: int
    places: Tensor
    lengths: Tensor


class GatheredAttention:
    """As `FlashInferAttention`, row by row; rows of one token are padded to the longest and go together, as
    many as `limit` bytes allow."""

    def __init__(
        self, spec: DecoderSpec, pool: KvPool, device: torch.device, limit: int = GATHERED_BYTES
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._device = device
        self._paged: Paged | None = None
        self._limit = limit
        self._groups: list[_Decodes] = []

    def shares(self, paged: Paged) -> bool:
        """Never: what rows share is gathered for each."""
        return False

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def for_graph(self, rows: int, max_indices: int) -> GatheredAttention:
        """The same again, where a replay is a call. Raises ConfigError on a GPU: a captured graph keeps the
        sizes of the step that it was captured with, and what is gathered here has another size each step."""
        if self._device.type == "cuda":
            raise ConfigError(
                "--attention-backend reference needs --disable-cuda-graph", param="disable_cuda_graph"
            )
        return GatheredAttention(self._spec, self._pool, self._device, self._limit)

    def plan(self, paged: Paged) -> None:
        """Take a step; nothing is read back from the device."""
        self._paged = paged
        if not paged.decodes:
            return
        bounds = paged.kv_indptr.to(self._device, torch.int64, non_blocking=True)
        lengths = (bounds[1:] - bounds[:-1])[:, None]
        self._groups = []
        for first, last, longest in self._fitting(paged):
            own = lengths[first:last]
            steps = torch.arange(longest, device=self._device)
            places = bounds[first:last, None] + steps.minimum(own - 1)
            self._groups.append(_Decodes(first, last, places, own))

    def _fitting(self, paged: Paged) -> Iterator[tuple[int, int, int]]:
        """The rows in turn, as many together as fit when padded: first, last, and the longest's length."""
        spec, first, longest = self._spec, 0, 0
        # In the type of the queries, of 4 bytes at most.
        room = max(1, self._limit // (2 * spec.kv_heads * spec.head_dim * 4))
        for row, length in enumerate((paged.starts + paged.counts).tolist()):
            wider = max(longest, length)
            if row > first and wider * (row + 1 - first) > room:
                yield first, row, longest
                first, wider = row, length
            longest = wider
        if len(paged.starts):
            yield first, len(paged.starts), longest

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """As `FlashInferAttention.attend`."""
        paged, spec = self._paged, self._spec
        if paged is None:
            raise RuntimeError("a step is planned before it is run")
        q = qkv[:, : spec.q_heads * spec.head_dim].view(-1, spec.q_heads, spec.head_dim)
        into = out.view(-1, spec.q_heads, spec.head_dim)
        if paged.decodes:
            for rows in self._groups:
                self._decode(layer, q[rows.first : rows.last], paged, rows, into[rows.first : rows.last])
        else:
            self._extend(layer, q, paged, into)

    def _decode(self, layer: int, q: Tensor, paged: Paged, rows: _Decodes, out: Tensor) -> None:
        """One token a row: the query heads of a KV head are the queries, as torch's fast kernels know no
        grouped heads where there is a mask. K and V are [rows, kv_heads, longest, d]."""
        slots = paged.kv_indices[rows.places]
        k, v = (self._gather(kv[layer], slots, q.dtype) for kv in (self._pool.k, self._pool.v))
        grouped = q.reshape(len(q), self._spec.kv_heads, -1, self._spec.head_dim)
        steps = torch.arange(slots.shape[1], device=self._device)
        seen = self._seen(rows.lengths - 1 - steps, layer)[:, None, None]
        attended = self._softmax(grouped, k.transpose(1, 2), v.transpose(1, 2), seen)
        out.copy_(attended.flatten(1, 2))

    def _extend(self, layer: int, q: Tensor, paged: Paged, out: Tensor) -> None:
        """Row by row, with K and V repeated for each of a group's query heads; of a long chunk's queries, as
        many at a time as have room for their scores."""
        group = self._spec.q_heads // self._spec.kv_heads
        bounds, tokens = paged.kv_indptr.tolist(), paged.qo_indptr.tolist()
        for row, (first, last) in enumerate(pairwise(tokens)):
            slots = paged.kv_indices[bounds[row] : bounds[row + 1]]
            k, v = (
                self._gather(kv[layer], slots, q.dtype).repeat_interleave(group, dim=1).transpose(0, 1)
                for kv in (self._pool.k, self._pool.v)
            )
            steps = torch.arange(len(slots), device=self._device)
            size = max(1, self._limit // (len(slots) * self._spec.q_heads * 4))
            for begin in range(first, last, size):
                end = min(begin + size, last)
                at = steps[len(slots) - (last - begin) : len(slots) - (last - end), None]
                seen = self._seen(at - steps, layer)
                attended = self._softmax(q[begin:end].transpose(0, 1)[None], k[None], v[None], seen)
                out[begin:end] = attended[0].transpose(0, 1)

    def _seen(self, age: Tensor, layer: int) -> Tensor:
        """Which positions a query sees, by how far each lies before its own."""
        window = self._spec.window(layer)
        return (age >= 0) & (age < window) if window else age >= 0

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self._spec.scale)

    @staticmethod
    def _gather(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The entries of these slots in the type of the queries: torch indexes no fp8, only bytes."""
        if pool.dtype.itemsize == 1:
            return pool.view(torch.uint8)[slots].view(pool.dtype).to(dtype)
        return pool[slots].to(dtype)
