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


class FusedForward:
    """`Decoder.forward` over the same weights, bit for bit, as one call with registered addresses.

    `slot_table` is int32 [rows, positions] and is read at every call.
    """

    def __init__(self, decoder: Decoder, pool: KvPool, slot_table: Tensor) -> None:
        self._kept = (decoder, pool, slot_table)  # C++ has their addresses
        self._slot_table = slot_table
        self._hidden = torch.empty((0, decoder.spec.hidden))
        spec, k = decoder.spec, pool.k[0]
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
                "embedding": _packed(decoder.embedding),
                "max_length": decoder.layers[0].table.shape[0],
                "num_slots": k.shape[0],
            }
        )
        for index, layer in enumerate(decoder.layers):
            for name, part in (("k", pool.k[index]), ("v", pool.v[index])):
                expect(name, part, k.dtype, k.shape[0], spec.kv_heads, spec.head_dim)
            self._model.add_layer(
                _layer(layer)
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


def _packed(weight: PackedWeight) -> tuple[int, int, int, int]:
    return weight.data.data_ptr(), weight.code, weight.n, weight.k


def _layer(layer: DecoderLayer) -> dict[str, Any]:
    def at(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        expect("a vector of a layer", tensor, torch.float32, *tensor.shape)
        return tensor.data_ptr()

    vectors: dict[str, Any] = {
        name: at(getattr(layer, name))
        for name in (
            "attn_norm", "q_norm", "k_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm",
            "qkv_bias", "out_bias", "gate_up_bias", "down_bias",
        )
    }  # fmt: skip
    weights = {name: _packed(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
    return vectors | weights | {"rope_table": at(layer.table), "rotary": layer.table.shape[1]}
