"""FlashInfer's wrappers as this model calls them: page size 1, every argument of their plans in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapwood.srt.models.spec import DecoderSpec
from sapwood.srt.worker.attention.cascade import Level
from sapwood.srt.worker.attention.paged import Paged

INT_WORKSPACE_BYTES = 8 << 20
"""What each wrapper takes for its schedule."""
EAGER_BYTES = INT_WORKSPACE_BYTES + (128 << 10)
"""What each takes of the device in all: a prefill wrapper has room for the lengths of 32768 rows too."""
TENSOR_CORES_FROM = 4
"""Query heads a KV head from which FlashInfer's decode is faster as a prefill of one token: tensor cores take
at least 16 rows, and the heads that read the same K and V are those rows. SGLang draws the same line."""
_PINNED = "_pin_memory_int_workspace_buffer"
"""FlashInfer's own name for where a plan writes its schedule on the host, to be copied from there."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Wrapper = Any
"""One of FlashInfer's; it cannot be named here, as nothing of CUDA is imported before it is used."""


@dataclass(slots=True)
class Room:
    """Where wrappers leave their schedules, of which only the one planned last is replayed: `ints`, uint8
    [INT_WORKSPACE_BYTES] on the device, and `pinned`, the same on the host, which the first of them brings.

    The host writes `pinned` for the next plan once the copy of the last has ended: one lane's plans wait for
    each other.
    """

    ints: Tensor
    pinned: Tensor | None = None


class Wrappers:
    """Makes and plans the wrappers of one lane, which may share `workspace` (uint8 on the device, zeros): a
    wrapper has nothing in it between two runs. `flashinfer` is the module."""

    def __init__(
        self,
        flashinfer: Any,
        spec: DecoderSpec,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        workspace: Tensor,
        deterministic: bool,
    ) -> None:
        self._flashinfer = flashinfer
        self._workspace = workspace
        self._heads = (spec.q_heads, spec.kv_heads, spec.head_dim)
        self._common = {"sm_scale": spec.scale, "q_data_type": dtype, "kv_data_type": kv_dtype}
        self._dtype = dtype
        self._deterministic = deterministic
        grouped = spec.q_heads // spec.kv_heads >= TENSOR_CORES_FROM
        self._tensor_cores = deterministic or grouped or kv_dtype in FP8

    def decode(self, window: int) -> Wrapper:
        """For rows of one token each."""
        return self._decode(window)

    def decode_for_graph(
        self, window: int, indptr: Tensor, indices: Tensor, last_page_len: Tensor, room: Room
    ) -> Wrapper:
        """The same for as many rows as `last_page_len` has; plans go into these buffers, on the device."""
        wrapper = self._decode(
            window,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        wrapper.reset_workspace_buffer(self._workspace, room.ints)
        # Each would keep 8 MiB of pinned memory of its own, half a gigabyte for all sizes.
        if room.pinned is not None:
            setattr(wrapper, _PINNED, room.pinned)
        room.pinned = getattr(wrapper, _PINNED, None)
        return wrapper

    def prefill(self) -> Wrapper:
        """For rows of any number of tokens. FlashAttention 3, which "auto" chooses for long chunks on Hopper,
        knows no deterministic mode."""
        backend = "fa2" if self._deterministic else "auto"
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)

    def cascade(self, levels: int) -> Wrapper:
        return self._flashinfer.MultiLevelCascadeAttentionWrapper(levels, self._workspace, "NHD")

    def merge_once(self) -> None:
        """Merge two results of one query, of zeros."""
        heads, _kv_heads, d = self._heads
        device = self._workspace.device
        values = torch.zeros((2, 1, heads, d), dtype=self._dtype, device=device)
        sums = torch.zeros((2, 1, heads), dtype=torch.float32, device=device)
        self._flashinfer.merge_state_in_place(values[0], sums[0], values[1], sums[1])

    def plan_decode(self, wrapper: Wrapper, paged: Paged, window: int) -> None:
        wrapper.plan(
            paged.kv_indptr, paged.kv_indices, paged.last_page_len, *self._heads, 1,
            window_left=window - 1, non_blocking=True, disable_split_kv=self._deterministic, **self._common,
        )  # fmt: skip

    def plan_prefill(self, wrapper: Wrapper, paged: Paged, window: int) -> None:
        """Causal: FlashInfer aligns a row's last query with its last key, so `paged.kv_indptr` counts the
        cached prefix and the new tokens."""
        wrapper.plan(
            paged.qo_indptr, paged.kv_indptr, paged.kv_indices, paged.last_page_len, *self._heads, 1,
            causal=True, window_left=window - 1, non_blocking=True, disable_split_kv=self._deterministic,
            **self._common,
        )  # fmt: skip

    def plan_cascade(self, wrapper: Wrapper, levels: list[Level]) -> None:
        """Causal on the last level only, which is FlashInfer's doing."""
        wrapper.plan(
            [level.qo_indptr for level in levels],
            [level.kv_indptr for level in levels],
            [level.kv_indices for level in levels],
            [level.last_page_len for level in levels],
            *self._heads, 1, causal=True, **self._common,
        )  # fmt: skip

    def _decode(self, window: int, **buffers: Any) -> Wrapper:
        # Without tensor cores the kernel reads the whole row, and hides what is before the window.
        cores = self._tensor_cores or window > 0
        # Not "auto": on Blackwell that may be cuDNN, which is not what the graphs are captured with, and pads
        # every row's page table to the longest's, of which there are many with pages of one position.
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=cores, backend="fa2", **buffers
        )
