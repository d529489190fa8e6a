"""The dense decoder: one forward pass for every architecture of the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from sapwood.kernels.ops.rope import rope_table
from sapwood.srt.models.ops import Ops
from sapwood.srt.models.parallel import Alone, Group, Shard, shard_of
from sapwood.srt.models.rope import inverse_frequencies
from sapwood.srt.models.spec import EMBEDDING, FINAL_NORM, HEAD, POST_NORMS, DecoderSpec, Rope, layer
from sapwood.srt.models.weights import Part, WeightSource

W = TypeVar("W")


@dataclass(slots=True)
class Batch:
    """The tokens of one step, all int32 and contiguous, on the decoder's device.

    For each of m tokens `ids`, `positions` and the KV `slots` to fill; for each of R rows, in the order of
    the tokens, `rows` (into the slot table), `starts` (its first new position) and `counts` (its new tokens).
    `shared`: as in `messages.Step`.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    starts: Tensor
    counts: Tensor
    shared: Tensor | None = None


class KvPool(Protocol):
    """K and V of every layer, each [slots, kv_heads, head_dim]."""

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...


Attend = Callable[[int, Tensor, Batch, Tensor], None]
"""(layer, rotated qkv [m, (q_heads + 2 kv_heads) head_dim], batch, out [m, q_heads head_dim])."""


@dataclass(slots=True)
class DecoderLayer(Generic[W]):
    """The weights of one layer; None for what the model does not have. `table`: its rotary table."""

    attn_norm: Tensor
    qkv: W
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: W
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: W
    gate_up_bias: Tensor | None
    down: W
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    table: Tensor


class Decoder(Generic[W]):
    """A loaded model, or one rank's part of it: then `spec` has the rank's heads and inner channels, and the
    ranks of `group` compute every step together.

    Not safe for two threads: the buffers between the layers are kept and reused. `max_length` is the longest
    sequence in tokens (it also fixes the rotary encodings that depend on one, see `models.rope`).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        ops: Ops[W],
        max_length: int,
        group: Group | None = None,
    ) -> None:
        self._group: Group = group or Alone()
        size = self._group.size
        shards = [shard_of(spec, rank, size) for rank in range(size)]
        shard = shards[self._group.rank]
        self._widths = [len(s.vocab) for s in shards]
        self._first = shard.vocab.start if size > 1 else None
        self.spec = shard.local(spec)
        self.ops = ops
        tokens = Part(EMBEDDING, rows=shard.vocab if size > 1 else None)
        self.embedding = ops.weight(weights, [tokens])
        load = _Loading(spec, shard, weights, ops)
        table = ops.table(_table(spec, spec.rope, max_length))
        local_table = ops.table(_table(spec, spec.local_rope, max_length)) if spec.local_rope else table
        self.layers = [
            load.layer(index, local_table if spec.window(index) else table) for index in range(spec.layers)
        ]
        self._final_norm = load.norm(FINAL_NORM)
        own_head = not spec.tied or HEAD in weights.names()
        self._head = ops.weight(weights, [tokens._replace(name=HEAD)]) if own_head else self.embedding
        self._buffers: dict[str, Tensor] = {}

    def forward(self, batch: Batch, pool: KvPool, attend: Attend) -> Tensor:
        """Run all layers, filling the pool: the hidden states, of the operations' type [m, hidden], before
        the final norm.

        Valid until the next forward. Raises IndexError for an id, position or slot that does not exist (on a
        CPU: elsewhere nothing is looked at).
        """
        spec, ops, m = self.spec, self.ops, batch.ids.shape[0]
        hidden = self.hidden(m)
        ops.embed(batch.ids, self.embedding, self._first, hidden)
        self._group.sum(hidden)
        if spec.embed_scale != 1.0:
            hidden *= spec.embed_scale
        branch: Tensor | None = None
        for index, weights in enumerate(self.layers):
            normed = self._norm(branch, hidden, weights.attn_norm)
            branch = self._attention(index, weights, normed, batch, pool, attend)
            normed = self._norm(branch, hidden, weights.mlp_norm)
            branch = self._mlp(weights, normed)
        if branch is not None:
            hidden += branch
        return hidden

    def hidden(self, m: int) -> Tensor:
        """What the last forward, of m tokens, returned: a captured one returns nothing."""
        return self._buffer("hidden", m, self.spec.hidden)

    def normed(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows `index` (int32 or int64 [s], on its device) of `hidden` after the final norm: [s, hidden].

        Valid until the next call.
        """
        chosen = self._buffer("chosen", index.shape[0], self.spec.hidden)
        torch.index_select(hidden, 0, index, out=chosen)
        self.ops.rms_norm(chosen, self._final_norm, self.spec.rms_eps, chosen)
        return chosen

    def logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        """The logits at rows `index` (int32 or int64 [s], on its device) of `hidden`: float32 [s, vocab].

        Valid until the next call.
        """
        chosen = self.normed(hidden, index)
        part = self._buffer("logits", index.shape[0], self.ops.rows(self._head), torch.float32)
        self.ops.linear(chosen, self._head, part)
        if self._group.size == 1:
            return part
        out = self._buffer("all logits", index.shape[0], self.spec.vocab, torch.float32)
        self._group.gather(part, self._widths, out)
        return out

    def _norm(self, branch: Tensor | None, hidden: Tensor, weight: Tensor) -> Tensor:
        """The norm of the hidden states, to which the branch before it is added first; in its place."""
        if branch is None:
            out = self._buffer("branch", len(hidden), self.spec.hidden)
            self.ops.rms_norm(hidden, weight, self.spec.rms_eps, out)
            return out
        self.ops.add_rms_norm(branch, hidden, weight, self.spec.rms_eps, branch)
        return branch

    def _attention(
        self,
        index: int,
        weights: DecoderLayer[W],
        normed: Tensor,
        batch: Batch,
        pool: KvPool,
        attend: Attend,
    ) -> Tensor:
        spec, ops, m = self.spec, self.ops, normed.shape[0]
        qkv = self._buffer("qkv", m, spec.qkv_width)
        self._linear(normed, weights.qkv, weights.qkv_bias, qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            heads = qkv.view(m, -1, spec.head_dim)
            ops.head_norm(heads[:, : spec.q_heads], weights.q_norm, spec.rms_eps)
            ops.head_norm(heads[:, spec.q_heads : spec.q_heads + spec.kv_heads], weights.k_norm, spec.rms_eps)
        ops.rope_store(
            qkv, batch.positions, batch.slots, weights.table, spec.q_heads, spec.kv_heads, spec.head_dim,
            pool.k[index], pool.v[index],
        )  # fmt: skip
        attended = self._buffer("attended", m, spec.q_heads * spec.head_dim)
        attend(index, qkv, batch, attended)
        return self._branch(attended, weights.out, weights.out_bias, weights.post_attn_norm)

    def _mlp(self, weights: DecoderLayer[W], normed: Tensor) -> Tensor:
        spec, m = self.spec, normed.shape[0]
        gate_up = self._buffer("gate_up", m, 2 * spec.intermediate)
        self._linear(normed, weights.gate_up, weights.gate_up_bias, gate_up)
        inner = self._buffer("inner", m, spec.intermediate)
        self.ops.gated_mul(gate_up, spec.activation, inner)
        return self._branch(inner, weights.down, weights.down_bias, weights.post_mlp_norm)

    def _branch(self, x: Tensor, weight: W, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """What is to be added to the hidden states: the sum of the ranks' products, after a norm of its own
        if it has one. Valid until the next branch."""
        branch = self._buffer("branch", x.shape[0], self.spec.hidden)
        self.ops.linear(x, weight, branch)
        self._group.sum(branch)
        if bias is not None:
            branch += bias
        if norm is not None:
            self.ops.rms_norm(branch, norm, self.spec.rms_eps, branch)
        return branch

    def _linear(self, x: Tensor, weight: W, bias: Tensor | None, out: Tensor) -> None:
        self.ops.linear(x, weight, out)
        if bias is not None:
            out += bias

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """The first `rows` rows of a buffer that only ever grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            kind, device = dtype or self.ops.dtype, self.ops.device
            buffer = self._buffers[name] = torch.empty((rows, columns), dtype=kind, device=device)
        return buffer[:rows]


def _table(spec: DecoderSpec, rope: Rope, max_length: int) -> Tensor:
    return rope_table(inverse_frequencies(rope, spec.rotary, max_length), max_length, rope.scaling)


class _Loading(Generic[W]):
    """Reads a rank's part of each layer; `spec` is the whole model's."""

    def __init__(self, spec: DecoderSpec, shard: Shard, weights: WeightSource, ops: Ops[W]) -> None:
        self._spec, self._shard, self._weights, self._ops = spec, shard, weights, ops

    def layer(self, index: int, table: Tensor) -> DecoderLayer[W]:
        spec = self._spec
        qkv, gate_up = self._qkv(), self._gate_up()
        post_attn, post_mlp = (
            self.norm(layer(index, f"{name}.weight")) if spec.post_norms else None for name in POST_NORMS
        )
        return DecoderLayer(
            attn_norm=self.norm(layer(index, "input_layernorm.weight")),
            qkv=self._joint(index, qkv),
            qkv_bias=self._bias(index, qkv) if spec.qkv_bias else None,
            q_norm=self.norm(layer(index, "self_attn.q_norm.weight")) if spec.qk_norm else None,
            k_norm=self.norm(layer(index, "self_attn.k_norm.weight")) if spec.qk_norm else None,
            out=self._joint(index, [Part("self_attn.o_proj", columns=self._heads(self._shard.q_heads))]),
            out_bias=self._bias(index, [Part("self_attn.o_proj")]) if spec.out_bias else None,
            post_attn_norm=post_attn,
            mlp_norm=self.norm(layer(index, f"{spec.mlp_norm}.weight")),
            gate_up=self._joint(index, gate_up),
            gate_up_bias=self._bias(index, gate_up) if spec.mlp_bias else None,
            down=self._joint(index, [Part("mlp.down_proj", columns=self._shard.inner)]),
            down_bias=self._bias(index, [Part("mlp.down_proj")]) if spec.mlp_bias else None,
            post_mlp_norm=post_mlp,
            table=table,
        )

    def norm(self, name: str) -> Tensor:
        weight = self._weights.vector(name)
        return self._ops.vector(weight + 1.0 if self._spec.norm_offset else weight)

    def _heads(self, heads: range, first: int = 0) -> range:
        """The channels of some heads, in a matrix in which the heads begin at channel `first`."""
        d = self._spec.head_dim
        return range(first + heads.start * d, first + heads.stop * d)

    def _qkv(self) -> list[Part]:
        q, kv = self._shard.q_heads, self._shard.kv_heads
        if not self._spec.fused:
            names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            return [Part(name, rows=self._heads(h)) for name, h in zip(names, (q, kv, kv), strict=True)]
        k_first = self._spec.q_heads * self._spec.head_dim
        v_first = k_first + self._spec.kv_heads * self._spec.head_dim
        cuts = (self._heads(q), self._heads(kv, k_first), self._heads(kv, v_first))
        return [Part("self_attn.qkv_proj", rows=cut) for cut in cuts]

    def _gate_up(self) -> list[Part]:
        inner, first = self._shard.inner, self._spec.intermediate
        if not self._spec.fused:
            return [Part(name, rows=inner) for name in ("mlp.gate_proj", "mlp.up_proj")]
        cuts = (inner, range(first + inner.start, first + inner.stop))
        return [Part("mlp.gate_up_proj", rows=cut) for cut in cuts]

    def _whole(self, parts: list[Part]) -> list[Part]:
        """Each matrix once and whole, where one rank has all."""
        if self._shard.size > 1:
            return parts
        return [Part(name) for name in dict.fromkeys(part.name for part in parts)]

    def _joint(self, index: int, parts: list[Part]) -> W:
        named = [part._replace(name=layer(index, f"{part.name}.weight")) for part in self._whole(parts)]
        return self._ops.weight(self._weights, named)

    def _bias(self, index: int, parts: list[Part]) -> Tensor:
        values = []
        for part in self._whole(parts):
            bias = self._weights.vector(layer(index, f"{part.name}.bias"))
            values.append(bias[part.rows.start : part.rows.stop] if part.rows else bias)
        return self._ops.bias(torch.cat(values))
