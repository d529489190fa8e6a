"""What the decoder is computed with: the kernels of one device, over weights as that device has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sapwood.srt.models.weights import Part, WeightSource

W = TypeVar("W")


class Ops(Protocol[W]):
    """Weights are W, activations are `dtype` on `device`; nothing here reads another row of the batch.

    m tokens, h the hidden size; outputs are contiguous and may not overlap inputs, unless it is said.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def weight(self, source: WeightSource, parts: Sequence[Part]) -> W:
        """The rows of these parts of matrices one after another, as one weight [n, k]."""

    def rows(self, weight: W) -> int:
        """n of a weight [n, k]."""

    def vector(self, values: Tensor) -> Tensor:
        """A float32 vector of the CPU as `rms_norm` and `head_norm` take it."""

    def bias(self, values: Tensor) -> Tensor:
        """A float32 vector of the CPU, on `device`, to be added to activations."""

    def table(self, values: Tensor) -> Tensor:
        """A rotary table, float32 [positions, rotary], as `rope_store` takes it."""

    def embed(self, ids: Tensor, weight: W, first: int | None, out: Tensor) -> None:
        """`out[i]` [m, h] is row `ids[i]` of the weight: ids int32 [m]. With `first` it has the rows from
        that one on: of an id that it does not have the row is zeros."""

    def linear(self, x: Tensor, weight: W, out: Tensor) -> None:
        """`out = x @ weight.T`: x [m, k], out [m, n] of `dtype` or float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`out = x / sqrt(mean(x**2) + eps) * weight` per row; `out` may be `x`."""

    def add_rms_norm(self, branch: Tensor, hidden: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`hidden += branch`, then `out` is the norm of `hidden`. `out` may be `branch`."""

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """Norm each head in place: heads [m, n, d], a view of rows in which heads follow each other."""

    def rope_store(
        self, qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, hq: int, hkv: int, d: int,
        k_pool: Tensor, v_pool: Tensor,
    ) -> None:  # fmt: skip
        """Rotate q and k of each token in place, then round its K and V to the pool's type and store them.

        qkv [m, (hq + 2 hkv) d]; positions, slots int32 [m]; k_pool, v_pool [slots, hkv, d].
        """

    def gated_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """`out = activation(gate) * up`: gate_up [m, 2 i], the gate first; out [m, i]."""
