"""The decoder's operations on a GPU: FlashInfer's kernels where they apply, else plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sapwood.kernels.ops.activation import gated_mul_reference
from sapwood.kernels.ops.dense import FP8, DenseWeight, fp8_linear, fp8_weight, linear_dense, widens
from sapwood.kernels.ops.norm import head_norm_reference, rms_norm_reference
from sapwood.kernels.ops.rope import rope_reference, saturated_fp8, store_kv
from sapwood.srt.errors import ConfigError
from sapwood.srt.models.device_weights import device_matrix
from sapwood.srt.models.spec import EMBEDDING, HEAD
from sapwood.srt.models.weights import Part, WeightSource

_HEAD_DIMS = (64, 128, 256)
"""What FlashInfer's kernels for rotation and for the pool are compiled for."""

_VECTOR = 8
"""Values of 16 bits that its kernels read at once: heads and rotated halves are multiples."""

_TOKENS = 8192
"""Tokens for which a store's page table is there from the start, before anything is captured."""

_BFLOAT16_CAPABILITY = (8, 0)
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class _NormWeight:
    """A norm's weight as FlashInfer takes it, of the activations' type. `less_one`: it multiplies by one
    more."""

    data: Tensor
    less_one: bool


class DeviceOps:
    """`models.ops.Ops` over DenseWeight. `dtype` is that of weights and activations.

    `flashinfer`: the package, or what has its functions; without it all is plain torch: float32 inside,
    rounded once. `quantization` fp8: matrices other than embedding and head in 8 bits (W8A8). After the first
    step no operation waits for the device, so that steps can be captured in graphs.

    Raises ConfigError for a type that FlashInfer does not compute in, or that the device has not.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        flashinfer: Any = None,
        quantization: Literal["none", "fp8"] = "none",
    ) -> None:
        if flashinfer is not None and dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"--dtype {_name(dtype)} is not for a GPU: use bfloat16 or float16", param="dtype"
            )
        self.device, self.dtype = device, dtype
        self._flashinfer = flashinfer
        self._quantized = quantization == "fp8"
        self._norms: dict[Tensor, _NormWeight] = {}
        self._bytes: Counter[str] = Counter()
        self._pages = _Pages(device) if flashinfer is not None else None
        if device.type == "cuda":
            self._check_capability(torch.cuda.get_device_capability(device))
            widens(device, dtype)
            if self._quantized:
                fp8_linear(device)

    def _check_capability(self, capability: tuple[int, int]) -> None:
        if self.dtype is torch.bfloat16 and capability < _BFLOAT16_CAPABILITY:
            raise ConfigError(
                f"bfloat16 needs a GPU of compute capability {_dotted(_BFLOAT16_CAPABILITY)} or higher; this "
                f"one's is {_dotted(capability)}: use --dtype float16",
                param="dtype",
            )
        if self._quantized and capability < _FP8_CAPABILITY:
            raise ConfigError(
                f"--quantization fp8 needs a GPU of compute capability {_dotted(_FP8_CAPABILITY)} or "
                f"higher; this one's is {_dotted(capability)}",
                param="quantization",
            )

    def weight(self, source: WeightSource, parts: Sequence[Part]) -> DenseWeight:
        matrix = device_matrix(source, parts, self.device, self.dtype)
        plain = not self._quantized or any(part.name in (EMBEDDING, HEAD) for part in parts)
        try:
            weight = DenseWeight(matrix) if plain else fp8_weight(matrix)
        except ValueError as e:
            names = ", ".join(map(str, parts))
            raise ConfigError(f"--quantization fp8 does not fit {names}: {e}", param="quantization") from None
        self._bytes[_name(weight.data.dtype)] += weight.data.nbytes
        return weight

    def summary(self) -> str:
        """What the weights made so far are held in, the largest first."""
        return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in self._bytes.most_common())

    def rows(self, weight: DenseWeight) -> int:
        return weight.n

    def vector(self, values: Tensor) -> Tensor:
        held = values.to(self.device)
        if self._flashinfer is not None:
            self._norms[held] = self._norm_weight(values)
        return held

    def bias(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def table(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def embed(self, ids: Tensor, weight: DenseWeight, first: int | None, out: Tensor) -> None:
        if first is None:
            torch.index_select(weight.data, 0, ids, out=out)
            return
        local = ids - first
        elsewhere = (local < 0) | (local >= weight.n)
        torch.index_select(weight.data, 0, local.masked_fill_(elsewhere, 0), out=out)
        out.masked_fill_(elsewhere[:, None], 0)

    def linear(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        linear_dense(x, weight, out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        if self._flashinfer is None:
            rms_norm_reference(x, weight, eps, out)
        elif len(x):
            norm, fi = self._norms[weight], self._flashinfer
            (fi.gemma_rmsnorm if norm.less_one else fi.rmsnorm)(x, norm.data, eps, out=out)

    def add_rms_norm(self, branch: Tensor, hidden: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        if self._flashinfer is None or out.data_ptr() != branch.data_ptr():
            hidden += branch
            self.rms_norm(hidden, weight, eps, out)
        elif len(hidden):
            norm, fi = self._norms[weight], self._flashinfer
            fused = fi.gemma_fused_add_rmsnorm if norm.less_one else fi.fused_add_rmsnorm
            fused(branch, hidden, norm.data, eps)

    def head_norm(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        norm = self._norms.get(weight)
        # Of the kernels that add one, some installations' take rows only.
        if norm is None or norm.less_one or heads.shape[2] % _VECTOR:
            head_norm_reference(heads, weight, eps)
        elif len(heads):
            self._flashinfer.rmsnorm(heads, norm.data, eps, out=heads)

    def rope_store(
        self, qkv: Tensor, positions: Tensor, slots: Tensor, table: Tensor, hq: int, hkv: int, d: int,
        k_pool: Tensor, v_pool: Tensor,
    ) -> None:  # fmt: skip
        if self._pages is None or d not in _HEAD_DIMS:
            rope_reference(qkv, positions, table, hq, hkv, d)
            store_kv(qkv, slots, hq, hkv, d, k_pool, v_pool)
        elif len(qkv):
            self._rotate(qkv, positions, table, hq, hkv, d)
            kv = qkv.view(len(qkv), -1, d)[:, hq:]
            self._store(kv, slots, self._pages, hkv, k_pool, v_pool)

    def gated_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        if self._flashinfer is None:
            gated_mul_reference(gate_up, activation, out)
        elif len(out):
            fi = self._flashinfer
            (fi.silu_and_mul if activation == "silu" else fi.gelu_tanh_and_mul)(gate_up, out=out)

    def _norm_weight(self, values: Tensor) -> _NormWeight:
        """Where the file's values are weights less one, and `dtype` holds those alone: those."""
        rounded, less_one = values.to(self.dtype), (values - 1).to(self.dtype)
        offset = not torch.equal(rounded.float(), values) and torch.equal(less_one.float() + 1, values)
        return _NormWeight((less_one if offset else rounded).to(self.device), offset)

    def _rotate(self, qkv: Tensor, positions: Tensor, table: Tensor, hq: int, hkv: int, d: int) -> None:
        if table.shape[1] % (2 * _VECTOR):
            rope_reference(qkv, positions, table, hq, hkv, d)
            return
        q, k = qkv[:, : hq * d], qkv[:, hq * d : (hq + hkv) * d]
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, d, table, is_neox=True)

    def _store(
        self, kv: Tensor, slots: Tensor, pages: _Pages, hkv: int, k_pool: Tensor, v_pool: Tensor
    ) -> None:
        """kv [m, 2 hkv, d]: each token is a sequence of one page, its slot."""
        if k_pool.dtype is FP8:
            kv = saturated_fp8(kv)
        m = len(kv)
        self._flashinfer.append_paged_kv_cache(
            kv[:, :hkv], kv[:, hkv:], pages.counting(m), pages.zeros(m),
            (k_pool[:, None], v_pool[:, None]), slots, pages.counting(m + 1), pages.ones(m), kv_layout="NHD",
        )  # fmt: skip


class _Pages:
    """The int32 constants of page tables, which only ever grow; none is freed, as graphs may read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor] = []
        self._grow(_TOKENS + 1)

    def counting(self, length: int) -> Tensor:
        """0, 1, 2, ..."""
        return self._row(0, length)

    def zeros(self, length: int) -> Tensor:
        return self._row(1, length)

    def ones(self, length: int) -> Tensor:
        return self._row(2, length)

    def _row(self, index: int, length: int) -> Tensor:
        if self._kept[-1].shape[1] < length:
            self._grow(2 * length)
        return self._kept[-1][index, :length]

    def _grow(self, length: int) -> None:
        table = torch.zeros((3, length), dtype=torch.int32, device=self._device)
        table[0] = torch.arange(length, dtype=torch.int32, device=self._device)
        table[2] = 1
        self._kept.append(table)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
