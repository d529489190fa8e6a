"""One of the two lanes that steps take in turn: what a step reads on the device, while the one before runs.

    plan stream      copy, plan k+1 │              copy, plan k+2 │
    compute stream   ── step k ─────┼── step k+1 ─────────────────┼── step k+2
    copy stream                     └ results k                   └ results k+1

Everything of lane 0 belongs to steps k, k+2, ...: it is written for k+2 only once k's result has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood.srt.models.decoder import Batch
from sapwood.srt.worker.attention.paged import Paged, indptr_of, slots_of
from sapwood.srt.worker.device.accelerator import Accelerator, Event

Int32s = npt.NDArray[np.int32]


class Attention(Protocol):
    """Attention whose work is laid out on the host (`plan`) before it is launched layer by layer."""

    def plan(self, paged: Paged) -> None:
        """What `attend` reads from now on."""

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """qkv [m, (q_heads + 2 kv_heads) d] of which q is read; out [m, q_heads d]."""


class LaneAttention(Attention, Protocol):
    def shares(self, paged: Paged) -> bool:
        """Whether `plan` reads what rows share once: then a graph, which reads it for each, is the slower."""

    def warm_up(self) -> None:
        """Have what no step of dummies uses compiled."""

    def for_graph(self, rows: int, max_indices: int) -> Attention:
        """For decode steps of so many rows: `attend` may be captured, and reads what was planned last."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most that a step has: tokens, rows, and slots that its rows read, all together (beyond that a
    decode step is launched without a graph). `dummy` is a row of the slot table and a slot, both nobody's."""

    tokens: int
    rows: int
    indices: int
    dummy_row: int
    dummy_slot: int


class Fields:
    """int32 columns with fixed places on the device, each with pinned memory from which it is written."""

    def __init__(self, accelerator: Accelerator, sizes: dict[str, int]) -> None:
        def room(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=accelerator.device)

        self._host = {name: accelerator.pinned((size,), torch.int32) for name, size in sizes.items()}
        self.device = {name: room(size) for name, size in sizes.items()}

    def put(self, name: str, values: Int32s, width: int | None = None, fill: int = 0) -> Tensor:
        """The first `width` of the column (all that is given, if None): the values, then `fill`."""
        width = len(values) if width is None else width
        host = self._host[name][:width]
        host[: len(values)] = torch.from_numpy(values)
        host[len(values) :] = fill
        found = self.device[name][:width]
        found.copy_(host, non_blocking=True)
        return found


@dataclass(slots=True)
class Given:
    """A step's arrays on the host, in the order of its tokens and rows, as in `steps.Step`; `owner` is each
    token's row. A token id of -1 is its row's last."""

    ids: Int32s
    owner: Int32s
    positions: Int32s
    slots: Int32s
    rows: Int32s
    starts: Int32s
    counts: Int32s
    shared: Int32s


class Lane:
    """The buffers, the attention and the graphs of one lane. `slot_table` int32 [rows, positions] is shared
    by both; while steps are in flight it is written on the plan stream alone."""

    def __init__(
        self, accelerator: Accelerator, attention: LaneAttention, slot_table: Tensor, sizes: Sizes
    ) -> None:
        self._attention = attention
        self._slot_table = slot_table
        self._sizes = sizes
        tokens, rows = sizes.tokens, sizes.rows
        columns = {"ids": tokens, "owner": tokens, "positions": tokens, "slots": tokens}
        self._fields = Fields(accelerator, {**columns, "rows": rows, "indptr": rows + 1, "lines": tokens})
        self._indices = torch.zeros(sizes.indices, dtype=torch.int32, device=accelerator.device)
        self._graphs: dict[int, Graph] = {}
        self._sorted: list[int] = []
        self.planned: Event = accelerator.event()
        self.busy = False
        """Whether a step is in it whose result has not been read."""

    @property
    def captured(self) -> Sequence[int]:
        """The numbers of rows for which there is a graph, ascending."""
        return self._sorted

    def plan(self, given: Given) -> Planned:
        """Bring a step's arrays to the device and lay out its attention; on the plan stream."""
        fields, sizes = self._fields, self._sizes
        size = self._size(given)
        width = size or len(given.ids)
        owner = fields.put("owner", given.owner, width, sizes.dummy_row)
        positions = fields.put("positions", given.positions, width)
        slots = fields.put("slots", given.slots, width, sizes.dummy_slot)
        ids = fields.put("ids", given.ids, width)
        self._slot_table[owner, positions] = slots
        pad = (size or len(given.rows)) - len(given.rows)
        rows = fields.put("rows", given.rows, size, sizes.dummy_row)
        starts, counts = np.pad(given.starts, (0, pad)), np.pad(given.counts, (0, pad), constant_values=1)
        paged = self._paged(rows, starts, counts, given.shared)
        decodes = 0 if len(given.ids) != len(given.rows) or self._attention.shares(paged) else len(given.rows)
        graph = self._graphs[size] if size and decodes else None
        attention = self._attention if graph is None else graph.attention
        attention.plan(paged)
        batch = Batch(ids, positions, slots, rows, *(torch.from_numpy(c) for c in (starts, counts)))
        return Planned(batch, owner, attention, None if graph is None else graph.replay, decodes)

    def lines(self, lines: Int32s) -> Tensor:
        """Indices of the step's tokens, on the device; on the plan stream."""
        return self._fields.put("lines", lines)

    def dummies(self, rows: int, tokens: int = 1) -> Given:
        """A step of dummy rows, which extend by so many tokens each: one makes it a decode step."""
        zeros, row = np.zeros(rows * tokens, np.int32), np.full(rows, self._sizes.dummy_row, np.int32)
        positions = np.tile(np.arange(tokens, dtype=np.int32), rows)
        slots = zeros + self._sizes.dummy_slot
        starts, counts = np.zeros(rows, np.int32), np.full(rows, tokens, np.int32)
        return Given(zeros, np.repeat(row, tokens), positions, slots, row, starts, counts, zeros[:0])

    def warm_ups(self) -> Iterator[Given]:
        """Steps that use each kernel that there is: for decodes, and for few and for many tokens a row."""
        self._attention.warm_up()
        for tokens in (1, 2, 128):
            yield self.dummies(1, min(tokens, self._sizes.tokens, self._slot_table.shape[1] - 1))

    def capture(self, rows: int, capture: Callable[[Planned], Callable[[], None]]) -> None:
        """Add the graph of decode steps of so many rows: `capture` makes it of a planned step of dummies."""
        attention = self._attention.for_graph(rows, self._sizes.indices)
        self._graphs[rows] = Graph(attention, _never)
        self._sorted = sorted(self._graphs)
        try:
            self._graphs[rows].replay = capture(self.plan(self.dummies(rows)))
        except BaseException:
            del self._graphs[rows]
            self._sorted.remove(rows)
            raise

    def _size(self, given: Given) -> int | None:
        """The rows of the smallest graph that does for the step; None if none does."""
        if len(given.ids) != len(given.rows):
            return None
        found = next((size for size in self._sorted if size >= len(given.rows)), None)
        if found is None or int(given.starts.sum()) + 2 * found > self._sizes.indices:
            return None
        return found

    def _paged(self, rows: Tensor, starts: Int32s, counts: Int32s, shared: Int32s) -> Paged:
        kv_indptr = indptr_of(starts + counts)
        total = int(kv_indptr[-1])
        if total > len(self._indices):
            self._indices = torch.zeros(total, dtype=torch.int32, device=rows.device)
        indptr = self._fields.put("indptr", kv_indptr.numpy())
        return Paged(
            starts=starts,
            counts=counts,
            qo_indptr=indptr_of(counts),
            kv_indptr=kv_indptr,
            last_page_len=torch.ones(len(starts), dtype=torch.int32),
            kv_indices=slots_of(self._slot_table, rows, indptr, total, self._indices),
            shared=shared,
        )


@dataclass(slots=True)
class Graph:
    """A captured forward pass over the lane's buffers, and the attention that it reads."""

    attention: Attention
    replay: Callable[[], None]


@dataclass(slots=True)
class Planned:
    """A step that can be launched: its tokens' ids are still as the scheduler gave them. `replay`: the graph
    that launches it. `decodes`: its rows, without padding, if each extends by one token and none of them
    shares what is better read once; else 0."""

    batch: Batch
    owner: Tensor
    attention: Attention
    replay: Callable[[], None] | None
    decodes: int


def _never() -> None:
    raise AssertionError("the graph is being captured")
