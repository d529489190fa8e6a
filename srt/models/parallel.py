"""Tensor parallelism: what of each layer a rank has, and how the ranks put their results together.
Imports no torch, so that the launcher can tell whether a model can be shared out.

Column-parallel: qkv and gate_up, whose rows (outputs) are shared out by heads and by inner channels; the
embedding and the head by tokens. Row-parallel: out and down, whose columns (inputs) are: their products are
partial sums, which the ranks add. (Megatron-LM, Shoeybi et al. 2019.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from sapwood.srt.errors import ConfigError
from sapwood.srt.models.spec import DecoderSpec

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
"""Inner channels and tokens are shared out in multiples: whole groups of quantised weights, whole panels."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank of `size` has: ranges of query heads, KV heads, inner channels and tokens."""

    rank: int
    size: int
    q_heads: range
    kv_heads: range
    inner: range
    vocab: range

    def local(self, spec: DecoderSpec) -> DecoderSpec:
        """The decoder that this rank computes: fewer heads and inner channels; `vocab` stays the whole."""
        if self.size == 1:
            return spec
        return replace(
            spec,
            q_heads=len(self.q_heads),
            kv_heads=len(self.kv_heads),
            intermediate=len(self.inner),
        )


def shard_of(spec: DecoderSpec, rank: int, size: int) -> Shard:
    """Rank `rank`'s part. KV heads are shared out as evenly as they go, each with its query heads; where
    there are fewer than ranks, several ranks have the same KV head and some of its query heads each.

    Raises ConfigError naming --tensor-parallel-size where a rank would get nothing or heads do not divide.
    """
    group = spec.q_heads // spec.kv_heads
    if spec.kv_heads >= size:
        kv = _cut(spec.kv_heads, 1, rank, size)
        q = range(kv.start * group, kv.stop * group)
    else:
        sharers = size // spec.kv_heads
        if size % spec.kv_heads or group % sharers:
            raise ConfigError(
                f"--tensor-parallel-size {size} does not fit {spec.q_heads} query heads on {spec.kv_heads} "
                f"KV heads: it must be at most {spec.kv_heads}, or a multiple that divides {spec.q_heads}",
                param="tensor_parallel_size",
            )
        each = group // sharers
        q = range(rank * each, (rank + 1) * each)
        kv = range(rank // sharers, rank // sharers + 1)
    inner = _cut(spec.intermediate, BLOCK, rank, size)
    vocab = _cut(spec.vocab, BLOCK, rank, size)
    if not (inner and vocab):
        what = f"{spec.intermediate} inner channels" if not inner else f"{spec.vocab} tokens"
        raise ConfigError(
            f"--tensor-parallel-size {size} is too large: {what} are shared out in blocks of {BLOCK}",
            param="tensor_parallel_size",
        )
    return Shard(rank, size, q, kv, inner, vocab)


def require_groups(spec: DecoderSpec, size: int, group: int, what: str) -> None:
    """Heads are shared out so that no rank's part of the attention's output projection parts a group of
    inputs: quantised weights come in groups of so many. Raises ConfigError naming the sizes that do that."""
    if size > 1 and not _keeps_groups(spec, size, group):
        *fitting, last = [str(n) for n in range(1, spec.q_heads + 1) if _keeps_groups(spec, n, group)]
        sizes = f"{', '.join(fitting)} or {last}" if fitting else last
        raise ConfigError(
            f"--tensor-parallel-size {size} would part the groups of {group} inputs in which {what}: "
            f"{spec.q_heads} heads on {spec.kv_heads} KV heads, of head_dim {spec.head_dim}, can be shared "
            f"out among {sizes}",
            param="tensor_parallel_size",
        )


def _keeps_groups(spec: DecoderSpec, size: int, group: int) -> bool:
    try:
        shards = [shard_of(spec, rank, size) for rank in range(size)]
    except ConfigError:
        return False
    return all(shard.q_heads.start * spec.head_dim % group == 0 for shard in shards)


def _cut(total: int, block: int, rank: int, size: int) -> range:
    """The rank's part of `total` in blocks, as even as it goes."""
    blocks = -(-total // block)
    begin, end = blocks * rank // size, blocks * (rank + 1) // size
    return range(begin * block, min(end * block, total))


class Group(Protocol):
    """The ranks of one model. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, partial: Tensor) -> None:
        """Replace each rank's [m, n] by the sum over ranks. On a CPU they are added in rank order."""

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None:
        """`out` [m, sum(widths)]: the ranks' [m, widths[rank]] side by side, on every rank."""

    def broadcast(self, values: Tensor) -> None:
        """Rank 0's values to all, in place."""

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""


class Alone:
    """A model that one process has as a whole."""

    rank, size = 0, 1

    def sum(self, partial: Tensor) -> None:
        pass

    def gather(self, part: Tensor, widths: Sequence[int], out: Tensor) -> None:
        out.copy_(part)

    def broadcast(self, values: Tensor) -> None:
        pass

    def smallest(self, value: int) -> int:
        return value
