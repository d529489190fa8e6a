"""Attention by FlashInfer: planned once a step on the host, then run in every layer.

              pure decode             chunks, drafts, mixes       rows share enough
 full         decode wrapper          prefill wrapper, causal     cascade; the rest as on the left
 window w     decode wrapper          prefill wrapper, causal     as on the left

Deterministic (batch-invariant) mode: what FlashInfer computes for a row depends on two things of its batch.
It splits a row's KV the more, the fewer rows there are; and it chooses the tile of queries by the mean length
of the rows. So KV is never split in this mode: `fixed_split_size` would be faster for few long rows, but it
does not go with CUDA graphs, and a row must not change its last bits when a graph takes over from an eager
step. And rows are planned together only with rows of a like length, decodes with decodes: each gets the tile
that it would get alone. There is no cascade and no FlashAttention 3: neither takes these options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.srt.errors import ConfigError
from sapwood.srt.models.decoder import KvPool
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.cascade import Cascade, cascade_of
from sapwood.srt.worker.attention.paged import Int32s, Paged
from sapwood.srt.worker.attention.selection import Indices, Tokens, select, tokens_of
from sapwood.srt.worker.attention.wrappers import FP8, INT_WORKSPACE_BYTES, Wrapper, Wrappers

WORKSPACE_BYTES = 128 << 20
"""For the partial results of KV that is split, as FlashInfer's documentation advises: it cuts a step into no
more than twice as many tiles of 128 queries as there are multiprocessors, 17 MiB on an H100 with 128 channels
a head (before release 0.7.4 it took so much for each query head of a KV head)."""
HEAD_DIMS = (64, 128, 256, 512)
CASCADE_BYTES = 64 << 20
"""K and V that a level of a cascade must spare in a layer: some 20 microseconds at 3 TB/s, as long as its
kernel, its merge and the copies of the queries take."""

ALL = slice(None)
Kv = tuple[Tensor, Tensor]


def require_supported(spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises ConfigError for heads or types that FlashInfer has no kernels for."""
    other = "--attention-backend reference"
    if spec.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"FlashInfer has no kernels for heads of {spec.head_dim} channels, only of"
            f" {', '.join(map(str, HEAD_DIMS))}; use {other}",
            param="attention_backend",
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"FlashInfer computes in float16 or bfloat16, not {dtype}; use {other}", param="dtype"
        )
    if kv_dtype != dtype and kv_dtype not in FP8:
        raise ConfigError(
            f"FlashInfer reads K and V in the type of the activations ({dtype}) or in fp8, not in {kv_dtype}",
            param="kv_cache_dtype",
        )


@dataclass(slots=True)
class _Part:
    """A planned wrapper and the step's tokens that it is for."""

    tokens: Tokens
    wrapper: Wrapper
    takes_out: bool = True

    def run(self, q: Tensor, kv: Kv, out: Tensor) -> None:
        if not isinstance(self.tokens, slice):
            out.index_copy_(0, self.tokens, self.wrapper.run(q.index_select(0, self.tokens), kv))
        elif self.takes_out:
            self.wrapper.run(q[self.tokens], kv, out=out[self.tokens])
        else:
            out[self.tokens].copy_(self.wrapper.run(q[self.tokens], kv))


class _Layers:
    """The layers' pools as FlashInfer takes them, pages of one position: [slots, 1, kv_heads, d]."""

    def __init__(self, spec: DecoderSpec, pool: KvPool) -> None:
        self._spec = spec
        self.kv = [(k.unsqueeze(1), v.unsqueeze(1)) for k, v in zip(pool.k, pool.v, strict=True)]
        self.windows = sorted({spec.window(layer) for layer in range(spec.layers)})

    def attend(self, layer: int, parts: dict[int, list[_Part]], qkv: Tensor, out: Tensor) -> None:
        heads, d = self._spec.q_heads, self._spec.head_dim
        q = qkv[:, : heads * d].view(-1, heads, d)
        for part in parts[self._spec.window(layer)]:
            part.run(q, self.kv[layer], out.view(-1, heads, d))


class DecodeForGraph:
    """Decode of a fixed number of rows: `attend` may be captured in a CUDA graph, before whose every replay
    comes a `plan`. One wrapper for each distinct window, over the same buffers."""

    def __init__(
        self, wrappers: Wrappers, layers: _Layers, rows: int, indices: Tensor, ints: Sequence[Tensor]
    ) -> None:
        self.rows = rows
        self._wrappers = wrappers
        self._layers = layers
        indptr = torch.zeros(rows + 1, dtype=torch.int32, device=indices.device)
        last = torch.ones(rows, dtype=torch.int32, device=indices.device)
        self._parts = {
            window: [_Part(ALL, wrappers.decode_for_graph(indptr, indices, last, room))]
            for window, room in zip(layers.windows, ints, strict=True)
        }

    def plan(self, paged: Paged) -> None:
        """Take a step of exactly `rows` rows of one token.

        Raises ValueError for another number of rows, or more indices than the buffer has.
        """
        for window, (part,) in self._parts.items():
            self._wrappers.plan_decode(part.wrapper, paged, window)

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """As `FlashInferAttention.attend`."""
        self._layers.attend(layer, self._parts, qkv, out)


class FlashInferAttention:
    """The attention of one lane. `flashinfer` is the module; `workspace`: uint8 [WORKSPACE_BYTES], zeros, on
    the device, which may be that of every attention that runs on the same stream: plans do not touch it.

    A plan's host arrays are copied without waiting: the next plan of a lane may not come before the step of
    the last one has ended. `cascade_bytes`: K and V of a layer that a level must spare; None: no cascade.
    """

    def __init__(
        self,
        flashinfer: Any,
        spec: DecoderSpec,
        pool: KvPool,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Tensor,
        deterministic: bool = False,
        *,
        cascade_bytes: int | None = CASCADE_BYTES,
    ) -> None:
        kv_dtype = pool.k[0].dtype
        self._group = spec.q_heads // spec.kv_heads
        self._wrappers = Wrappers(flashinfer, spec, dtype, kv_dtype, workspace, deterministic)
        self._layers = _Layers(spec, pool)
        self._deterministic = deterministic
        position_bytes = 2 * spec.kv_heads * spec.head_dim * kv_dtype.itemsize
        self._worth: int | None = None
        if cascade_bytes is not None and not deterministic and 0 in self._layers.windows:
            self._worth = max(-(-cascade_bytes // position_bytes), 1)
        self._device = device
        self._made: dict[tuple[str, int, int], Wrapper] = {}
        self._ints: list[Tensor] = []
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._found: tuple[Paged, Cascade | None] | None = None
        self._parts: dict[int, list[_Part]] = {}

    def shares(self, paged: Paged) -> bool:
        """Whether `plan` would read what rows share once: then a captured decode is not the better choice."""
        return self._cascade(paged) is not None

    def plan(self, paged: Paged) -> None:
        """Take a step; nothing is read back from the device."""
        self._parts = {window: self._plan(paged, window) for window in self._layers.windows}

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """Attention of the planned step's m tokens over the pool, whose positions are all filled by now.

        qkv [m, (q_heads + 2 kv_heads) d], of which only the rotated q is read; out [m, q_heads d].
        """
        self._layers.attend(layer, self._parts, qkv, out)

    def warm_up(self) -> None:
        """Merge two results, as a cascade does: at first use its kernel is compiled, and everybody waits."""
        if self._worth is not None:
            self._wrappers.merge_once()

    def for_graph(self, rows: int, max_indices: int) -> DecodeForGraph:
        """A decode of `rows` rows, which have no more than `max_indices` positions together.

        All of a lane have the same buffers for slots and schedules: only the one planned last is replayed.
        """
        if len(self._indices) < max_indices:
            self._indices = torch.zeros(max_indices, dtype=torch.int32, device=self._device)
        if not self._ints:
            self._ints = [
                torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
                for _ in self._layers.windows
            ]
        return DecodeForGraph(self._wrappers, self._layers, rows, self._indices, self._ints)

    def _plan(self, paged: Paged, window: int) -> list[_Part]:
        if self._deterministic:
            return [
                self._plain(select(paged, rows), tokens_of(paged, rows), window, length)
                for length, rows in _alike(paged.counts, self._group)
            ]
        cascade = None if window else self._cascade(paged)
        if cascade is None:
            return [self._plain(paged, ALL, window)]
        wrapper = self._wrapper("cascade", len(cascade.levels), 0)
        self._wrappers.plan_cascade(wrapper, cascade.levels)
        parts = [_Part(cascade.tokens, wrapper, takes_out=False)]
        if len(cascade.rest):
            parts.append(self._plain(select(paged, cascade.rest), tokens_of(paged, cascade.rest), window))
        return parts

    def _plain(self, paged: Paged, tokens: Tokens, window: int, length: int = 0) -> _Part:
        if paged.decodes:
            wrapper = self._wrapper("decode", length, window)
            self._wrappers.plan_decode(wrapper, paged, window)
        else:
            wrapper = self._wrapper("prefill", length, window)
            self._wrappers.plan_prefill(wrapper, paged, window)
        return _Part(tokens, wrapper)

    def _wrapper(self, kind: str, number: int, window: int) -> Wrapper:
        """Made on first use, as each takes 8 MiB on both sides. No two parts of a step have the same."""
        key = kind, number, window
        if key not in self._made:
            make = {"decode": self._wrappers.decode, "prefill": self._wrappers.prefill}
            self._made[key] = make[kind]() if kind in make else self._wrappers.cascade(number)
        return self._made[key]

    def _cascade(self, paged: Paged) -> Cascade | None:
        if self._worth is None or not len(paged.shared):
            return None
        if self._found is None or self._found[0] is not paged:
            self._found = paged, cascade_of(paged, self._worth)
        return self._found[1]


def _alike(counts: Int32s, group: int) -> list[tuple[int, Indices]]:
    """The rows by what FlashInfer chooses its tile of queries by, their tokens times query heads a KV head:
    up to 16, 32, 64, 128, or more. The mean of such rows is among them. First those of one token, under 1."""
    queries = np.clip(counts.astype(np.int64) * group, 16, 256)
    lengths = np.where(counts == 1, 1, 1 << np.ceil(np.log2(queries)).astype(np.int64))
    return [(int(length), np.flatnonzero(lengths == length)) for length in np.unique(lengths)]
