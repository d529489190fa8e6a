"""What a model needs of a loader: packed matrices and plain vectors by Hugging Face name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sapwood.kernels.ops.gemm import PackedWeight


Storage = Literal["stored", "float32", "float16", "w8", "w4"]
"""What matrices are packed as: what holds a file's own values as they are, floats, or 8 or 4 bits."""


class WeightSource(Protocol):
    """Tensors of one model, every one already known to be there in the right shape."""

    def names(self) -> Collection[str]:
        """The tensors that can be asked for."""

    def linear(self, names: Sequence[str], storage: Storage) -> PackedWeight:
        """The rows of these matrices one after another, as one weight."""

    def vector(self, name: str) -> Tensor:
        """A float32 vector of its own memory."""
