"""FlashInfer's double that computes in float32 too, and heads of any size, for which the package has no
kernels: where results then differ from the reference it is not by rounding, and models may be tiny."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.gpu import flashinfer_double as double

TYPES = (*double.HALVES, torch.float32)
HEAD_DIMS = range(1, 257)


class BatchPrefillWithPagedKVCacheWrapper(double.BatchPrefillWithPagedKVCacheWrapper):
    types = TYPES
    head_dims = HEAD_DIMS


class BatchDecodeWithPagedKVCacheWrapper(double.BatchDecodeWithPagedKVCacheWrapper):
    types = TYPES
    head_dims = HEAD_DIMS


class MultiLevelCascadeAttentionWrapper(double.MultiLevelCascadeAttentionWrapper):
    level = BatchPrefillWithPagedKVCacheWrapper


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    double.merge_in(TYPES, v, s, v_other, s_other)
