"""The running rows, as numpy columns: a plain decode step touches them without a loop over rows.

    positions of one row   0 ........ done ........ planned ........ length
                           │ in answered steps │ in steps in flight │ known, not planned

`length` counts the ids known here; a row whose step in flight samples has `inflight` 1 and knows its next
position, though not the token there, which is the worker's own last sampled one. A row with `proposed` drafts
in flight has `planned` so many positions more, of which its result says how many are valid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt.scheduler.request import Sequence


class Rows:
    """`capacity` rows of at most `max_tokens` positions each."""

    def __init__(self, capacity: int, max_tokens: int) -> None:
        def column(dtype: npt.DTypeLike, fill: int = 0) -> npt.NDArray[Any]:
            return np.full(capacity, fill, dtype=dtype)

        self.capacity = capacity
        self.active = column(np.bool_)
        self.sampled = column(np.bool_)
        """Past its prompt: each further step feeds the last sampled token."""
        self.busy = column(np.bool_)
        """Part of its prompt is in flight: it joins no step before that result."""
        self.waits = column(np.bool_)
        """It carries drafts or may get some: it joins no step while something of it is in flight."""
        self.probe = column(np.int32)
        """The length at which drafts are looked for next."""
        self.proposed = column(np.int32)
        self.ignore_eos = column(np.bool_)
        self.has_stops = column(np.bool_)
        self.length = column(np.int32)
        self.planned = column(np.int32)
        self.done = column(np.int32)
        self.seated = column(np.int32)
        """How many positions it was seated with: only there may its slots be other rows' too."""
        self.prompt_end = column(np.int32)
        """Its length when it was seated: all up to here is its prompt, or was output before."""
        self.limit = column(np.int32)
        self.inflight = column(np.int32)
        self.key = column(np.int64, -1)
        self.tokenizer = column(np.int32)
        self.tenant = column(np.int32)
        self.turn = column(np.int64)
        """The last step that it took part in while its tenant had to pause."""
        self.urgency = column(np.int64)
        self.prompt = column(np.int32)
        """Tokens of the request's prompt."""
        self.program = column(np.int64)
        """The number of the request's program, 0 without one."""
        self.known = column(np.int32)
        """Up to here its tokens had been computed before it was seated."""
        self.order = column(np.int64)
        self.private = column(np.int32)
        """Slots that belong to the row alone and not to the tree."""
        self.ids = np.zeros((capacity, max_tokens + 1), dtype=np.int32)
        self.slots = np.zeros((capacity, max_tokens + 1), dtype=np.int32)
        self.sequence: list[Sequence | None] = [None] * capacity
        self.node: list[Any] = [None] * capacity
        """The locked end of the row's path in the tree."""
        self._free = list(range(capacity - 1, -1, -1))
        self._admissions = 0
        self.released: list[int] = []
        """Rows given up since the last step was sent."""

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Rows with a sequence."""
        return self.capacity - len(self._free)

    def seat(self, sequence: Sequence, prefix: npt.NDArray[np.int32], node: Any) -> int:
        """Give `sequence` a row whose first positions are the `prefix` slots of the tree, down to `node`."""
        row = self._free.pop()
        request, matched, total = sequence.request, len(prefix), len(sequence.ids)
        self.active[row] = True
        self.sampled[row] = self.busy[row] = self.waits[row] = False
        self.probe[row] = self.proposed[row] = 0
        self.ignore_eos[row] = request.ignores_eos
        self.has_stops[row] = bool(request.params.stop_token_ids)
        self.length[row] = self.prompt_end[row] = total
        self.seated[row] = self.planned[row] = self.done[row] = matched
        self.limit[row] = len(request.prompt) + request.max_tokens
        self.inflight[row] = self.private[row] = 0
        self.key[row], self.tokenizer[row] = sequence.key, request.tokenizer
        self.tenant[row], self.urgency[row] = request.tenant, request.urgency
        self.prompt[row], self.known[row] = len(request.prompt), sequence.known
        self.program[row] = request.program.number if request.program is not None else 0
        self.order[row] = self._admissions
        self._admissions += 1
        self.ids[row, :total] = sequence.ids
        self.slots[row, :matched] = prefix
        self.sequence[row], self.node[row] = sequence, node
        sequence.row = row
        return row

    def vacate(self, row: int) -> None:
        """Take the row's sequence out of it; the worker hears of it with the next step."""
        sequence = self.sequence[row]
        assert sequence is not None
        sequence.ids = self.ids[row, : self.length[row]].copy()
        sequence.row, sequence.forced = -1, b""
        self.active[row] = self.waits[row] = False
        self.key[row], self.proposed[row] = -1, 0
        self.sequence[row] = self.node[row] = None
        self._free.append(row)
        self.released.append(row)

    def decoding(self) -> npt.NDArray[np.intp]:
        """Rows whose next input is their last sampled token, and which may produce one more now."""
        ready = self.active & self.sampled & (self.length + self.inflight < self.limit)
        if self.waits.any():
            ready &= ~(self.waits & (self.inflight > 0))
        return np.flatnonzero(ready)

    def prefilling(self) -> npt.NDArray[np.intp]:
        """Rows with tokens of their prompt still to plan, oldest first."""
        rows = np.flatnonzero(self.active & ~self.sampled)
        return rows[np.argsort(self.order[rows])]

    def oldest(self) -> int:
        """The active row that was seated first; there must be one."""
        rows = np.flatnonzero(self.active)
        return int(rows[np.argmin(self.order[rows])])

    def own(self, row: int) -> npt.NDArray[np.int32]:
        """All slots of the row, by position."""
        return self.slots[row, : self.planned[row]]
