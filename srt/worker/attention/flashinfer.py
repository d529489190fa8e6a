"""Attention by FlashInfer: planned once a step on the host, then run in every layer.

              rows of one token       rows of more                rows share enough
 full         decode wrapper          prefill wrapper, causal     cascade; the rest as on the left
 window w     decode wrapper          prefill wrapper, causal     as on the left

On Hopper a prefill is FlashAttention 3 as soon as one of its rows has more than 64 tokens. That gives each
query head of a row a tile of 128 queries of its own, reads K and V for each of these tiles, and never splits
a row's KV: so the decodes of a mixed step, and rows of up to 64 tokens (drafts, the ends of prompts), each
have their own kernel, unless they read so little that its launch would cost more.

Deterministic (batch-invariant) mode: what FlashInfer computes for a row depends on two things of its batch.
It splits a row's KV the more, the fewer rows there are; and it chooses the tile of queries by the mean length
of the rows. So KV is never split in this mode: `fixed_split_size` would be faster for few long rows, but it
does not go with CUDA graphs, and a row must not change its last bits when a graph takes over from an eager
step. And rows are planned together only with rows of a like length, decodes with decodes: each gets the tile
that it would get alone. There is no cascade and no FlashAttention 3: neither takes these options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood.srt.errors import ConfigError
from sapwood.srt.models.decoder import KvPool
from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.cascade import SHARED_LEVELS, Cascade, cascade_of, spared_of
from sapwood.srt.worker.attention.paged import Paged
from sapwood.srt.worker.attention.selection import Indices, Tokens, select, tokens_of
from sapwood.srt.worker.attention.wrappers import (
    EAGER_BYTES,
    FP8,
    INT_WORKSPACE_BYTES,
    Room,
    Wrapper,
    Wrappers,
)

WORKSPACE_BYTES = 128 << 20
"""For the partial results of KV that is split, as FlashInfer's documentation advises: it cuts a step into no
more than twice as many tiles of 128 queries as there are multiprocessors, 17 MiB on an H100 with 128 channels
a head (before release 0.7.4 it took so much for each query head of a KV head)."""
HEAD_DIMS = (64, 128, 256)
"""FlashInfer has kernels for some more, which were never tried here."""
CASCADE_BYTES = 64 << 20
"""K and V that a level of a cascade must spare in a layer: some 20 microseconds at 3 TB/s, as long as its
kernel, its merge and the copies of the queries take."""
LAUNCH_SECONDS = 150e-6
"""What the host needs to launch a layer's kernels one by one, which a graph spares."""
BYTES_PER_SECOND = 3e12
UNCAPTURED_BYTES = int(LAUNCH_SECONDS * BYTES_PER_SECOND)
"""K and V that cascades must spare, on the mean of all layers, where a graph could take the step: a cascade
is not captured. Both numbers are estimates for an H100, which bench.gpu measures (graphs on and off)."""
MIXED_BYTES = 4 << 20
"""K and V that the shorter rows of a mixed step must read in a layer to have a kernel of their own: with 4
query heads a KV head, reading them once and not four times spares as long as a launch takes, 4 microseconds.
"""
SHORT_TOKENS = 64
"""The most of a row for which FlashInfer does not change over to FlashAttention 3."""
TILES = (16, 32, 64, 128, 256)
"""The powers of two between which rows are told apart in deterministic mode."""
BLOCK_THREADS = 1024
"""The most of a block: FlashInfer merges all heads of a query in one, and stores all heads of a position in
one, each thread 16 bytes or a 32nd of a head."""

ALL = slice(None)
Kv = tuple[Tensor, Tensor]


def require_supported(spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises ConfigError for heads or types that FlashInfer has no kernels for. `spec` is of one rank."""
    other = "--attention-backend reference"
    if spec.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"heads of {spec.head_dim} channels are not computed with FlashInfer here, only those of"
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
    most = BLOCK_THREADS // block_threads(1, spec.head_dim, kv_dtype)
    if spec.kv_heads > most:
        raise ConfigError(
            f"FlashInfer stores K and V of up to {most} KV heads of {spec.head_dim} channels in {kv_dtype}, "
            f"not of {spec.kv_heads}: use more GPUs (--tensor-parallel-size) or {other}",
            param="attention_backend",
        )


def block_threads(heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many threads FlashInfer takes for that many heads of a query or of a position."""
    return heads * (head_dim // max(16 // dtype.itemsize, head_dim // 32))


@dataclass(slots=True)
class _Rows:
    """Rows that are planned together: their page tables, and their tokens in the step. `number` tells them
    from others of the same step that have the same kind of wrapper."""

    paged: Paged
    tokens: Tokens
    number: int


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
        windows = [spec.window(layer) for layer in range(spec.layers)]
        self.windows = sorted(set(windows))
        self.full = windows.count(0) / len(windows)
        """The share of the layers that have no window."""

    def attend(self, layer: int, parts: dict[int, list[_Part]], qkv: Tensor, out: Tensor) -> None:
        heads, d = self._spec.q_heads, self._spec.head_dim
        q = qkv[:, : heads * d].view(-1, heads, d)
        for part in parts[self._spec.window(layer)]:
            part.run(q, self.kv[layer], out.view(-1, heads, d))


class DecodeForGraph:
    """Decode of a fixed number of rows: `attend` may be captured in a CUDA graph, before whose every replay
    comes a `plan`. One wrapper for each distinct window, over the same buffers."""

    def __init__(
        self, wrappers: Wrappers, layers: _Layers, rows: int, indices: Tensor, rooms: Sequence[Room]
    ) -> None:
        self.rows = rows
        self._wrappers = wrappers
        self._layers = layers
        indptr, last = indices.new_zeros(rows + 1), indices.new_ones(rows)
        self._parts = {
            window: [_Part(ALL, wrappers.decode_for_graph(window, indptr, indices, last, room))]
            for window, room in zip(layers.windows, rooms, strict=True)
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
    `uncaptured_bytes`, `mixed_bytes`: see the constants.
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
        uncaptured_bytes: int = UNCAPTURED_BYTES,
        mixed_bytes: int = MIXED_BYTES,
    ) -> None:
        kv_dtype = pool.k[0].dtype
        self._group = spec.q_heads // spec.kv_heads
        self._wrappers = Wrappers(flashinfer, spec, dtype, kv_dtype, workspace, deterministic)
        self._layers = _Layers(spec, pool)
        self._deterministic = deterministic
        position_bytes = 2 * spec.kv_heads * spec.head_dim * kv_dtype.itemsize
        full = self._layers.full
        self._worth: int | None = None
        self._worth_uncaptured = 1
        if cascade_bytes is not None and has_cascades(spec, deterministic):
            self._worth = max(-(-cascade_bytes // position_bytes), 1)
            self._worth_uncaptured = max(math.ceil(uncaptured_bytes / (full * position_bytes)), 1)
        self._mixed = mixed_bytes // position_bytes
        self._device = device
        self._made: dict[tuple[str, int, int], Wrapper] = {}
        self._rooms: list[Room] = []
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._parts: dict[int, list[_Part]] = {}

    def shares(self, paged: Paged) -> bool:
        """Whether a step that a graph could take is faster without, as `plan` would read what rows share
        once."""
        if self._worth is None or not len(paged.shared):
            return False
        return spared_of(paged, self._worth, self._group) >= self._worth_uncaptured

    def plan(self, paged: Paged) -> None:
        """Take a step; nothing is read back from the device."""
        everyone = np.arange(len(paged.starts))
        plain = self._together(paged, everyone)
        self._parts = {window: self._planned(plain, window) for window in self._layers.windows if window}
        if self._layers.full:
            cascade = self._cascade(paged)
            self._parts[0] = self._planned(plain, 0) if cascade is None else self._levels(paged, cascade)

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
        if not self._rooms:
            self._rooms = [
                Room(torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device))
                for _ in self._layers.windows
            ]
        return DecodeForGraph(self._wrappers, self._layers, rows, self._indices, self._rooms)

    def _levels(self, paged: Paged, cascade: Cascade) -> list[_Part]:
        wrapper = self._wrapper("cascade", len(cascade.levels), 0)
        self._wrappers.plan_cascade(wrapper, cascade.levels)
        rest = self._planned(self._together(paged, cascade.rest), 0)
        return [_Part(cascade.tokens, wrapper, takes_out=False), *rest]

    def _together(self, paged: Paged, rows: Indices) -> list[_Rows]:
        """Some of a step's rows, split into those that are planned together."""
        parts = _alike(paged, rows, self._group) if self._deterministic else self._kinds(paged, rows)
        chosen = [(number, part, select(paged, part)) for number, part in parts]
        return [
            _Rows(tables, ALL if tables is paged else tokens_of(paged, part), number)
            for number, part, tables in chosen
        ]

    def _kinds(self, paged: Paged, rows: Indices) -> list[tuple[int, Indices]]:
        """Decodes, which the scheduler puts first and so are a stretch of the step, short rows, and long ones
        (see above). The shorter go with the next longer where they read little. A token in a layer with a
        window reads no more than in one without, and one kernel more where that is less does not matter."""
        counts, read = paged.counts[rows], paged.starts[rows] + paged.counts[rows]
        kinds = np.searchsorted((1, SHORT_TOKENS), counts)
        for kind in (0, 1):
            longer = kinds[kinds > kind]
            if len(longer) and int(read[kinds == kind].sum()) < self._mixed:
                kinds[kinds == kind] = longer.min()
        return [(int(kind), rows[kinds == kind]) for kind in np.unique(kinds)]

    def _planned(self, plain: list[_Rows], window: int) -> list[_Part]:
        return [self._plain(rows, window) for rows in plain]

    def _plain(self, rows: _Rows, window: int) -> _Part:
        kind = "decode" if rows.paged.decodes else "prefill"
        wrapper = self._wrapper(kind, rows.number, window)
        plan = self._wrappers.plan_decode if rows.paged.decodes else self._wrappers.plan_prefill
        plan(wrapper, rows.paged, window)
        return _Part(rows.tokens, wrapper)

    def _wrapper(self, kind: str, number: int, window: int) -> Wrapper:
        """Made on first use, as each takes 8 MiB on both sides. No two parts of a step have the same."""
        key = kind, number, window
        if key not in self._made:
            match kind:
                case "decode":
                    self._made[key] = self._wrappers.decode(window)
                case "prefill":
                    self._made[key] = self._wrappers.prefill()
                case "cascade":
                    self._made[key] = self._wrappers.cascade(number)
        return self._made[key]

    def _cascade(self, paged: Paged) -> Cascade | None:
        if self._worth is None or not len(paged.shared):
            return None
        return cascade_of(paged, self._worth, self._group)


def has_cascades(spec: DecoderSpec, deterministic: bool) -> bool:
    """Whether what rows share may be read once: there are layers without a window, and one block merges all
    heads, in 16 bits."""
    merges = block_threads(spec.q_heads, spec.head_dim, torch.float16) <= BLOCK_THREADS
    full = any(not spec.window(layer) for layer in range(spec.layers))
    return full and merges and not deterministic


def lane_bytes(spec: DecoderSpec, deterministic: bool, graphs: bool) -> int:
    """Bytes of the device that one lane's wrappers keep at most, beside the workspace: see `_wrapper`."""
    windows = len({spec.window(layer) for layer in range(spec.layers)})
    kinds = 1 + (len(TILES) if deterministic else 2)
    levels = sum(range(2, SHARED_LEVELS + 2)) if has_cascades(spec, deterministic) else 0
    return (windows * kinds + levels) * EAGER_BYTES + graphs * windows * INT_WORKSPACE_BYTES


def attending_bytes(spec: DecoderSpec, tokens: int, deterministic: bool) -> int:
    """Bytes that a layer's attention of so many tokens takes at most, beside what it is given: the queries in
    another order, and each level's result with its sums, of which the last but one is still there when the
    next is made; where nothing is shared the queries and one result."""
    values = spec.q_heads * spec.head_dim * torch.float16.itemsize
    if not has_cascades(spec, deterministic):
        return tokens * 2 * values
    sums = spec.q_heads * torch.float32.itemsize
    return tokens * (values + (SHARED_LEVELS + 1) * (values + sums))


def _alike(paged: Paged, rows: Indices, group: int) -> list[tuple[int, Indices]]:
    """The rows by what FlashInfer chooses its tile of queries by, their tokens times query heads a KV head:
    up to 16, 32, 64, 128, or more. The mean of such rows is among them. First those of one token, under 1."""
    counts = paged.counts[rows]
    queries = np.clip(counts.astype(np.int64) * group, TILES[0], TILES[-1])
    lengths = np.where(counts == 1, 1, 1 << np.ceil(np.log2(queries)).astype(np.int64))
    return [(int(length), rows[lengths == length]) for length in np.unique(lengths)]
