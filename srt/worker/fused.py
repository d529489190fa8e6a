"""The decoder's layers as one call into C++ per step: the CPU's way through a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sapwood.kernels.native import kernels
from sapwood.kernels.ops.activation import ACTIVATIONS
from sapwood.kernels.ops.expect import DTYPE_CODES, expect
from sapwood.kernels.ops.gemm import PackedWeight
from sapwood.srt.models.decoder import Batch, Decoder, DecoderLayer, KvPool
from sapwood.srt.models.spec import DecoderSpec


class FusedForward:
    """`Decoder.forward` over the same weights, bit for bit, as one call with registered addresses.

    `slot_table` is int32 [rows, positions] and is read at every call.
    """

    def __init__(self, decoder: Decoder[PackedWeight], pool: KvPool, slot_table: Tensor) -> None:
        self._kept = (decoder, pool, slot_table)  # C++ has their addresses
        self._slot_table = slot_table
        self._hidden = torch.empty((0, decoder.spec.hidden))
        spec, k = decoder.spec, pool.k[0]
        max_length = decoder.layers[0].table.shape[0]
        self._model = kernels().Model(
            {
                "hidden": spec.hidden,
                "hq": spec.q_heads,
                "hkv": spec.kv_heads,
                "d": spec.head_dim,
                "inner": spec.intermediate,
                "eps": spec.rms_eps,
                "scale": spec.scale,
                "embed_scale": spec.embed_scale,
                "activation": ACTIVATIONS[spec.activation],
                "kv_dtype": DTYPE_CODES[k.dtype],
                "embedding": _packed("embedding", decoder.embedding, spec.vocab, spec.hidden),
                "max_length": max_length,
                "num_slots": k.shape[0],
            }
        )
        for index, layer in enumerate(decoder.layers):
            for name, part in (("k", pool.k[index]), ("v", pool.v[index])):
                expect(name, part, k.dtype, k.shape[0], spec.kv_heads, spec.head_dim)
            self._model.add_layer(
                _layer(spec, layer, max_length)
                | {
                    "window": min(spec.window(index), slot_table.shape[1]),
                    "k_pool": pool.k[index].data_ptr(),
                    "v_pool": pool.v[index].data_ptr(),
                }
            )

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states, float32 [m, hidden], before the final norm; valid until the next call.

        Raises IndexError for an id, position, row or slot that does not exist.
        """
        m, r = batch.ids.shape[0], batch.rows.shape[0]
        if self._hidden.shape[0] < m:
            self._hidden = torch.empty((m, self._hidden.shape[1]))
        for column in (batch.ids, batch.positions, batch.slots):
            expect("a token column", column, torch.int32, m)
        for column in (batch.rows, batch.starts, batch.counts):
            expect("a row column", column, torch.int32, r)
        shared, table = batch.shared, self._slot_table
        wrong = kernels().forward(
            self._model, m, batch.ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
            table.data_ptr(), table.shape[0], table.shape[1],
            batch.rows.data_ptr(), batch.starts.data_ptr(), batch.counts.data_ptr(), r,
            0 if shared is None else shared.data_ptr(), 0 if shared is None else shared.numel(),
            self._hidden.data_ptr(),
        )  # fmt: skip
        if wrong >= 0:
            what = f"token {wrong}" if wrong < m else f"row {wrong - m}"
            raise IndexError(f"{what} of the step names an id, position, row or slot that does not exist")
        return self._hidden[:m]


def _packed(name: str, weight: PackedWeight, n: int, k: int) -> tuple[int, int, int, int]:
    if (weight.n, weight.k) != (n, k):
        raise ValueError(f"the weight {name} must be [{n}, {k}], got [{weight.n}, {weight.k}]")
    return weight.data.data_ptr(), weight.code, n, k


def _layer(spec: DecoderSpec, layer: DecoderLayer[PackedWeight], max_length: int) -> dict[str, Any]:
    """The addresses of a layer; ValueError where a shape is not the one that C++ takes it to have."""

    def at(name: str, tensor: Tensor | None, *shape: int) -> int:
        if tensor is None:
            return 0
        expect(name, tensor, torch.float32, *shape)
        return tensor.data_ptr()

    hidden, inner, attended = spec.hidden, spec.intermediate, spec.q_heads * spec.head_dim
    sizes = {
        "attn_norm": hidden,
        "q_norm": spec.head_dim,
        "k_norm": spec.head_dim,
        "post_attn_norm": hidden,
        "mlp_norm": hidden,
        "post_mlp_norm": hidden,
        "qkv_bias": spec.qkv_width,
        "out_bias": hidden,
        "gate_up_bias": 2 * inner,
        "down_bias": hidden,
    }
    shapes = {
        "qkv": (spec.qkv_width, hidden),
        "out": (hidden, attended),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    vectors: dict[str, Any] = {name: at(name, getattr(layer, name), size) for name, size in sizes.items()}
    weights = {name: _packed(name, getattr(layer, name), *shape) for name, shape in shapes.items()}
    table = at("rope_table", layer.table, max_length, spec.rotary)
    return vectors | weights | {"rope_table": table, "rotary": spec.rotary}
