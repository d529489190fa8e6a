"""Steps over a pool of random K and V, and what attention over them is: by the reference, or by a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sapwood.kernels.ops.attention import attend_reference
from sapwood.srt.models.spec import DecoderSpec, Rope
from sapwood.srt.worker.attention.paged import Paged, indptr_of, slots_of

D = 128


@dataclass
class Platform:
    """Where attention is tested: FlashInfer or its double, a device, a type of activations and one of K and
    V, and by how much results may differ from the reference in float32."""

    flashinfer: Any
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    tolerance: float


class Attention(Protocol):
    def plan(self, paged: Paged) -> None: ...

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None: ...


def spec_of(
    q_heads: int, kv_heads: int, windows: tuple[int, ...] = (0,), query_scalar: float = 0.0, head_dim: int = D
) -> DecoderSpec:
    return DecoderSpec(
        hidden=8, layers=len(windows), q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=8,
        vocab=8, rms_eps=1e-6, rope=Rope(), rotary=head_dim, tied=True, windows=windows,
        query_scalar=query_scalar,
    )  # fmt: skip


@dataclass
class Step:
    """Row i, which has row `rows[i]` of the slot table, extends by counts[i] tokens from starts[i]. `shared`:
    stretches, each (begin, end, members)."""

    rows: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    shared: Sequence[tuple[int, int, Sequence[int]]] = ()

    @classmethod
    def of(cls, *rows: tuple[int, int, int], shared: Any = ()) -> Step:
        """From (row, start, count) of each."""
        return cls(*zip(*rows, strict=True), shared=shared)


@dataclass
class World:
    """One pool and one slot table, in which every position of every row has random K and V, long before it is
    computed: a backend that reads what it may not is seen. `table` is int32 [rows, positions], out of order.
    """

    spec: DecoderSpec
    platform: Platform
    rows: int = 8
    room: int = 320
    seed: int = 0
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        platform, random = self.platform, torch.Generator().manual_seed(self.seed)
        slots = self.rows * self.room + 1
        shape = (slots, self.spec.kv_heads, self.spec.head_dim)
        self.k, self.v = (
            [
                torch.randn(shape, generator=random).to(platform.kv_dtype).to(platform.device)
                for _ in range(self.spec.layers)
            ]
            for _ in "kv"
        )
        order = torch.randperm(slots - 1, generator=random).int()
        self.table = order.view(self.rows, self.room)
        self.dummy = slots - 1
        self.random = random

    def share(self, shared: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Give the rows of each stretch (here rows of the table) the slots of its first."""
        for begin, end, rows in shared:
            self.table[list(rows), begin:end] = self.table[rows[0], begin:end].clone()

    def qkv(self, step: Step) -> Tensor:
        """Random queries, as the projection gives them: K and V beside them."""
        values = torch.randn(sum(step.counts), self.spec.qkv_width, generator=self.random)
        return values.to(self.platform.dtype).to(self.platform.device)

    def paged(self, step: Step, out: Tensor | None = None) -> Paged:
        device = self.platform.device
        starts, counts = np.array(step.starts, np.int32), np.array(step.counts, np.int32)
        kv_indptr = indptr_of(starts + counts)
        total = int(kv_indptr[-1])
        rows = torch.tensor(step.rows, dtype=torch.int32, device=device)
        if out is None:
            out = torch.empty(total, dtype=torch.int32, device=device)
        shared = [value for begin, end, who in step.shared for value in (begin, end, len(who), *who)]
        return Paged(
            starts=starts,
            counts=counts,
            qo_indptr=indptr_of(counts),
            kv_indptr=kv_indptr,
            last_page_len=torch.ones(len(starts), dtype=torch.int32),
            kv_indices=slots_of(self.table.to(device), rows, kv_indptr.to(device), total, out),
            shared=np.array(shared, np.int32),
        )

    def reference(self, step: Step, qkv: Tensor, layer: int = 0) -> Tensor:
        """float32 [m, q_heads d], on the CPU."""
        spec = self.spec
        out = torch.empty(len(qkv), spec.q_heads * spec.head_dim)
        columns = (
            torch.tensor(column, dtype=torch.int32) for column in (step.rows, step.starts, step.counts)
        )
        attend_reference(
            qkv.float().cpu(), self.k[layer].float().cpu(), self.v[layer].float().cpu(), self.table, *columns,
            spec.q_heads, spec.kv_heads, spec.head_dim, spec.scale, out, spec.window(layer),
        )  # fmt: skip
        return out

    def attended(self, attention: Attention, qkv: Tensor, layer: int = 0) -> Tensor:
        """What a planned attention gives, in its own type, on its device."""
        shape = (len(qkv), self.spec.q_heads * self.spec.head_dim)
        out = torch.full(shape, float("nan"), dtype=qkv.dtype, device=qkv.device)
        attention.attend(layer, qkv, out)
        return out

    def run(self, attention: Attention, step: Step, qkv: Tensor, layer: int = 0) -> Tensor:
        attention.plan(self.paged(step))
        return self.attended(attention, qkv, layer)

    def differs(self, attention: Attention, step: Step, qkv: Tensor | None = None) -> float:
        """By how much the step's results differ from the reference, at most, over all layers."""
        qkv = self.qkv(step) if qkv is None else qkv
        attention.plan(self.paged(step))
        layers = range(self.spec.layers)
        return max(self.error(self.attended(attention, qkv, layer), step, qkv, layer) for layer in layers)

    def error(self, found: Tensor, step: Step, qkv: Tensor, layer: int = 0) -> float:
        wrong = (found.float().cpu() - self.reference(step, qkv, layer)).abs()
        return float(wrong.nan_to_num(float("inf")).max())
