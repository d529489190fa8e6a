"""The dense decoder: one forward pass for every architecture of the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sapwood.kernels.ops.activation import gated_mul
from sapwood.kernels.ops.gemm import PackedWeight, embed, linear
from sapwood.kernels.ops.norm import head_norm, rms_norm
from sapwood.kernels.ops.rope import rope_store, rope_table
from sapwood.srt.models.rope import inverse_frequencies
from sapwood.srt.models.spec import EMBEDDING, FINAL_NORM, HEAD, POST_NORMS, DecoderSpec, Rope, layer
from sapwood.srt.models.weights import Storage, WeightSource


@dataclass(slots=True)
class Batch:
    """The tokens of one step, all int32 and contiguous.

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
class DecoderLayer:
    """The weights of one layer; None for what the model does not have. `table`: its rotary table."""

    attn_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedWeight
    out_bias: Tensor | None
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    post_mlp_norm: Tensor | None
    table: Tensor


class Decoder:
    """A loaded model. Not safe for two threads: the buffers between the layers are kept and reused.

    `max_length` is the longest sequence in tokens (it also fixes the rotary encodings that depend on one, see
    `models.rope`), `storage` what its matrices are packed as; all arithmetic is float32.
    """

    def __init__(self, spec: DecoderSpec, weights: WeightSource, storage: Storage, max_length: int) -> None:
        self.spec = spec
        self.embedding = weights.linear([EMBEDDING], storage)
        table = _table(spec, spec.rope, max_length)
        local_table = _table(spec, spec.local_rope, max_length) if spec.local_rope else table
        self.layers = [
            _load_layer(spec, weights, storage, index, local_table if spec.window(index) else table)
            for index in range(spec.layers)
        ]
        self._final_norm = _norm(spec, weights, FINAL_NORM)
        own_head = not spec.tied or HEAD in weights.names()
        self._head = weights.linear([HEAD], storage) if own_head else self.embedding
        self._buffers: dict[str, Tensor] = {}

    def forward(self, batch: Batch, pool: KvPool, attend: Attend) -> Tensor:
        """Run all layers, filling the pool: the hidden states, float32 [m, hidden], before the final norm.

        Valid until the next forward. Raises IndexError for an id, position or slot that does not exist.
        """
        spec, m = self.spec, batch.ids.shape[0]
        hidden = self._buffer("hidden", m, spec.hidden)
        embed(batch.ids, self.embedding, hidden)
        if spec.embed_scale != 1.0:
            hidden *= spec.embed_scale
        for index, weights in enumerate(self.layers):
            self._attention(index, weights, hidden, batch, pool, attend)
            self._mlp(weights, hidden)
        return hidden

    def normed(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Rows `index` (int32 or int64 [s]) of `hidden` after the final norm: float32 [s, hidden].

        Valid until the next call.
        """
        chosen = self._buffer("chosen", index.shape[0], self.spec.hidden)
        torch.index_select(hidden, 0, index, out=chosen)
        rms_norm(chosen, self._final_norm, self.spec.rms_eps, chosen)
        return chosen

    def logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        """The logits at rows `index` (int32 or int64 [s]) of `hidden`: float32 [s, vocab].

        Valid until the next call.
        """
        chosen = self.normed(hidden, index)
        out = self._buffer("logits", index.shape[0], self.spec.vocab)
        linear(chosen, self._head, out)
        return out

    def _attention(
        self, index: int, weights: DecoderLayer, hidden: Tensor, batch: Batch, pool: KvPool, attend: Attend
    ) -> None:
        spec, m = self.spec, hidden.shape[0]
        normed = self._buffer("normed", m, spec.hidden)
        rms_norm(hidden, weights.attn_norm, spec.rms_eps, normed)
        qkv = self._buffer("qkv", m, spec.qkv_width)
        _linear(normed, weights.qkv, weights.qkv_bias, qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            heads = qkv.view(m, -1, spec.head_dim)
            head_norm(heads[:, : spec.q_heads], weights.q_norm, spec.rms_eps)
            head_norm(heads[:, spec.q_heads : spec.q_heads + spec.kv_heads], weights.k_norm, spec.rms_eps)
        rope_store(
            qkv, batch.positions, batch.slots, weights.table, spec.q_heads, spec.kv_heads, spec.head_dim,
            pool.k[index], pool.v[index],
        )  # fmt: skip
        attended = self._buffer("attended", m, spec.q_heads * spec.head_dim)
        attend(index, qkv, batch, attended)
        self._add(attended, weights.out, weights.out_bias, weights.post_attn_norm, hidden)

    def _mlp(self, weights: DecoderLayer, hidden: Tensor) -> None:
        spec, m = self.spec, hidden.shape[0]
        normed = self._buffer("normed", m, spec.hidden)
        rms_norm(hidden, weights.mlp_norm, spec.rms_eps, normed)
        gate_up = self._buffer("gate_up", m, 2 * spec.intermediate)
        _linear(normed, weights.gate_up, weights.gate_up_bias, gate_up)
        inner = self._buffer("inner", m, spec.intermediate)
        gated_mul(gate_up, spec.activation, inner)
        self._add(inner, weights.down, weights.down_bias, weights.post_mlp_norm, hidden)

    def _add(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, norm: Tensor | None, hidden: Tensor
    ) -> None:
        """Add a branch's last product to the hidden states, after a norm of its own if it has one."""
        if norm is None:
            _linear(x, weight, bias, hidden, accumulate=True)
            return
        branch = self._buffer("branch", x.shape[0], self.spec.hidden)
        _linear(x, weight, bias, branch)
        rms_norm(branch, norm, self.spec.rms_eps, branch)
        hidden += branch

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        """The first `rows` rows of a buffer that only ever grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name] = torch.empty((rows, columns))
        return buffer[:rows]


def _linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, accumulate: bool = False
) -> None:
    linear(x, weight, out, accumulate)
    if bias is not None:
        out += bias


def _table(spec: DecoderSpec, rope: Rope, max_length: int) -> Tensor:
    return rope_table(inverse_frequencies(rope, spec.rotary, max_length), max_length, rope.scaling)


def _norm(spec: DecoderSpec, weights: WeightSource, name: str) -> Tensor:
    weight = weights.vector(name)
    return weight + 1.0 if spec.norm_offset else weight


def _load_layer(
    spec: DecoderSpec, weights: WeightSource, storage: Storage, index: int, table: Tensor
) -> DecoderLayer:
    def joint(*names: str) -> PackedWeight:
        return weights.linear([layer(index, f"{name}.weight") for name in names], storage)

    def bias(wanted: bool, *names: str) -> Tensor | None:
        return torch.cat([weights.vector(layer(index, f"{n}.bias")) for n in names]) if wanted else None

    def norm(name: str) -> Tensor:
        return _norm(spec, weights, layer(index, f"{name}.weight"))

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    if spec.fused:
        qkv, gate_up = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
    post_attn, post_mlp = (norm(name) if spec.post_norms else None for name in POST_NORMS)
    return DecoderLayer(
        attn_norm=norm("input_layernorm"),
        qkv=joint(*qkv),
        qkv_bias=bias(spec.qkv_bias, *qkv),
        q_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        out=joint("self_attn.o_proj"),
        out_bias=bias(spec.out_bias, "self_attn.o_proj"),
        post_attn_norm=post_attn,
        mlp_norm=norm(spec.mlp_norm),
        gate_up=joint(*gate_up),
        gate_up_bias=bias(spec.mlp_bias, *gate_up),
        down=joint("mlp.down_proj"),
        down_bias=bias(spec.mlp_bias, "mlp.down_proj"),
        post_mlp_norm=post_mlp,
        table=table,
    )
