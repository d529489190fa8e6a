"""What a model needs of a loader: packed matrices, floats and plain vectors by Hugging Face name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sapwood.kernels.ops.gemm import PackedWeight


Storage = Literal["stored", "float32", "float16", "w8", "w4"]
"""What matrices are packed as: what holds a file's own values as they are, floats, or 8 or 4 bits."""


class Part(NamedTuple):
    """A matrix, or its rows and columns that are given: what one rank has of it."""

    name: str
    rows: range | None = None
    columns: range | None = None

    def __str__(self) -> str:
        """Its name alone if it is the whole."""
        cuts = (f"{c.start}:{c.stop}" if c else "" for c in (self.rows, self.columns))
        return self.name if self.rows is self.columns is None else f"{self.name}[{','.join(cuts)}]"


class Stored(NamedTuple):
    """A matrix [n, k], or what was asked for of it: `pieces` are its rows in order, some at a time. Floats
    are of the type that they are stored in, and may lie in the file's own memory, in strides: they are to be
    copied, not changed. Quantised ones are float32. On the CPU, or where they were drawn."""

    n: int
    k: int
    pieces: Iterator[Tensor]


class WeightSource(Protocol):
    """Tensors of one model, every one already known to be there in the right shape."""

    def names(self) -> Collection[str]:
        """The tensors that can be asked for."""

    def linear(self, names: Sequence[Part], storage: Storage) -> PackedWeight:
        """The rows of these parts one after another, as one weight."""

    def stored(self, part: Part) -> Stored: ...

    def vector(self, name: str) -> Tensor:
        """A float32 vector of its own memory."""
