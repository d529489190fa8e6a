"""The dense decoder: one forward pass for every architecture of the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sapwood.kernels.ops.activation import silu_mul
from sapwood.kernels.ops.gemm import PackedWeight, embed, linear
from sapwood.kernels.ops.norm import head_norm, rms_norm
from sapwood.kernels.ops.rope import rope_store, rope_table
from sapwood.srt.models.rope import inverse_frequencies
from sapwood.srt.models.spec import EMBEDDING, FINAL_NORM, HEAD, DecoderSpec, layer
from sapwood.srt.models.weights import WeightSource


@dataclass(slots=True)
class Batch:
    """The tokens of one step, all int32 and contiguous.

    For each of m tokens `ids`, `positions` and the KV `slots` to fill; for each of R rows, in the order of
    the tokens, `rows` (into the slot table), `starts` (its first new position) and `counts` (its new tokens).
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    starts: Tensor
    counts: Tensor


class KvPool(Protocol):
    """K and V of every layer, each [slots, kv_heads, head_dim]."""

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...


Attend = Callable[[int, Tensor, Batch, Tensor], None]
"""(layer, rotated qkv [m, (q_heads + 2 kv_heads) head_dim], batch, out [m, q_heads head_dim])."""


@dataclass(slots=True)
class _Layer:
    attn_norm: Tensor
    qkv: PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedWeight
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None


class Decoder:
    """A loaded model. Not safe for two threads: the buffers between the layers are kept and reused.

    `max_length` is the longest sequence in tokens, `dtype` the storage of matrices (float32 or float16);
    all arithmetic is float32.
    """

    def __init__(self, spec: DecoderSpec, weights: WeightSource, dtype: torch.dtype, max_length: int) -> None:
        self.spec = spec
        self._embedding = weights.embedding(EMBEDDING, dtype)
        self._layers = [_load_layer(spec, weights, dtype, index) for index in range(spec.layers)]
        self._final_norm = weights.vector(FINAL_NORM)
        own_head = not spec.tied or HEAD in weights.names()
        self._head = weights.linear([HEAD], dtype) if own_head else self._embedding
        self._table = rope_table(inverse_frequencies(spec.rope, spec.head_dim), max_length)
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        packed = [w for la in self._layers for w in (la.qkv, la.out, la.gate_up, la.down)]
        packed += [self._embedding] if self._head is self._embedding else [self._embedding, self._head]
        return sum(weight.nbytes for weight in packed)

    def forward(self, batch: Batch, pool: KvPool, attend: Attend) -> Tensor:
        """Run all layers, filling the pool: the hidden states, float32 [m, hidden], before the final norm.

        Valid until the next forward. Raises IndexError for an id, position or slot that does not exist.
        """
        spec, m = self.spec, batch.ids.shape[0]
        hidden = self._buffer("hidden", m, spec.hidden)
        embed(batch.ids, self._embedding, hidden)
        for index, weights in enumerate(self._layers):
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
        self, index: int, weights: _Layer, hidden: Tensor, batch: Batch, pool: KvPool, attend: Attend
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
            qkv, batch.positions, batch.slots, self._table, spec.q_heads, spec.kv_heads, spec.head_dim,
            pool.k[index], pool.v[index],
        )  # fmt: skip
        attended = self._buffer("attended", m, spec.q_heads * spec.head_dim)
        attend(index, qkv, batch, attended)
        _linear(attended, weights.out, weights.out_bias, hidden, accumulate=True)

    def _mlp(self, weights: _Layer, hidden: Tensor) -> None:
        spec, m = self.spec, hidden.shape[0]
        normed = self._buffer("normed", m, spec.hidden)
        rms_norm(hidden, weights.mlp_norm, spec.rms_eps, normed)
        gate_up = self._buffer("gate_up", m, 2 * spec.intermediate)
        _linear(normed, weights.gate_up, weights.gate_up_bias, gate_up)
        inner = self._buffer("inner", m, spec.intermediate)
        silu_mul(gate_up, inner)
        _linear(inner, weights.down, weights.down_bias, hidden, accumulate=True)

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


def _load_layer(spec: DecoderSpec, weights: WeightSource, dtype: torch.dtype, index: int) -> _Layer:
    def joint(*names: str) -> PackedWeight:
        return weights.linear([layer(index, f"{name}.weight") for name in names], dtype)

    def vector(name: str) -> Tensor:
        return weights.vector(layer(index, name))

    def bias(wanted: bool, *names: str) -> Tensor | None:
        return torch.cat([vector(f"{name}.bias") for name in names]) if wanted else None

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return _Layer(
        attn_norm=vector("input_layernorm.weight"),
        qkv=joint(*qkv),
        qkv_bias=bias(spec.qkv_bias, *qkv),
        q_norm=vector("self_attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=vector("self_attn.k_norm.weight") if spec.qk_norm else None,
        out=joint("self_attn.o_proj"),
        out_bias=bias(spec.out_bias, "self_attn.o_proj"),
        mlp_norm=vector("post_attention_layernorm.weight"),
        gate_up=joint(*gate_up),
        gate_up_bias=bias(spec.mlp_bias, *gate_up),
        down=joint("mlp.down_proj"),
        down_bias=bias(spec.mlp_bias, "mlp.down_proj"),
    )
