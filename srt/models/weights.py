"""What a model needs of a loader: packed matrices and plain vectors by Hugging Face name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sapwood.kernels.ops.gemm import PackedWeight


class WeightSource(Protocol):
    """Tensors of one model, every one already known to be there in the right shape."""

    def names(self) -> Collection[str]:
        """The tensors that can be asked for."""

    def linear(self, names: Sequence[str], dtype: torch.dtype) -> PackedWeight:
        """The rows of these matrices one after another, as one weight."""

    def embedding(self, name: str, dtype: torch.dtype) -> PackedWeight:
        """One matrix, both for looking up rows and for multiplying."""

    def vector(self, name: str) -> Tensor:
        """A float32 vector of its own memory."""
