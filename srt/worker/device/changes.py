"""What is done to a step's lines of logits before they are drawn from: gathered on the host, done on the
device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood.kernels.ops import device_changes
from sapwood.kernels.ops.device_changes import Seen
from sapwood.srt.worker.device.lines import Int32s, Int64s, Lines
from sapwood.srt.worker.sampler import Places, leaves_any
from sapwood.srt.worker.token_pool import TokenPool


class Changes:
    """Of the lines that anything is done to; a loop over those with a bias or tokens held back.

    `entries` int64 [capacity]: each row's entry in `Seen`.
    """

    def __init__(self, lines: Lines, places: Places, pool: TokenPool, entries: Int64s) -> None:
        self._lines, self._pool = lines, pool
        self.changed = np.zeros(len(lines), dtype=bool)
        self._masks, self._masked = places.masks, places.masked
        if places.masked is not None:
            self.changed |= places.masked >= 0
        self._biased: list[int] = []
        self._held: list[int] = []
        self._entries = np.full(len(lines), -1) if not pool.changes else entries[lines.rows]
        self.penalised = np.flatnonzero(self._entries >= 0)
        self.counted = self.penalised[:0]
        """The places whose rows have penalties."""
        if pool.changes:
            self.counted = np.flatnonzero(entries[places.rows] >= 0)
            self._counted_entries = entries[places.rows[self.counted]]
            self._find()
            self.changed[self.penalised] = True
            self.changed[self._biased] = True
            self.changed[self._held] = True

    def _find(self) -> None:
        lines, pool = self._lines, self._pool
        for line in np.flatnonzero(np.isin(lines.rows, list(pool.changes))).tolist():
            row = int(lines.rows[line])
            change = pool.changes[row]
            if len(change.bias_ids):
                self._biased.append(line)
            if (
                len(change.banned)
                and lines.positions[line] < pool.banned_before[row]
                and self._can_hold(line)
            ):
                self._held.append(line)

    def _can_hold(self, line: int) -> bool:
        """Whether the mask allows anything besides what min_tokens holds back."""
        if self._masks is None or self._masked is None or self._masked[line] < 0:
            return True
        banned = self._pool.changes[int(self._lines.rows[line])].banned
        return leaves_any(self._masks[self._masked[line]], banned)

    def arrays(self, vocab: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What the device needs, by name. A line's place is that among the changed ones, in `Lines.order`."""
        lines, pool = self._lines, self._pool
        ordered = lines.order[self.changed[lines.order]]
        place: Int64s = np.zeros(len(lines), dtype=np.int64)
        place[ordered] = np.arange(len(ordered))
        if len(self.penalised):
            rows = lines.rows[self.penalised]
            yield "penalised", place[self.penalised]
            yield "entries", self._entries[self.penalised]
            yield "penalties", pool.penalties[rows]
            yield "ahead", lines.drafts_ahead[self.penalised]
            yield "counted", self.counted
            yield "counted_entries", self._counted_entries
        if self._biased:
            changes = [pool.changes[int(lines.rows[line])] for line in self._biased]
            yield "biased", _flat(place[self._biased], [change.bias_ids for change in changes], vocab)
            yield "biases", np.concatenate([change.biases for change in changes])
        if self._held:
            banned = [pool.changes[int(lines.rows[line])].banned for line in self._held]
            yield "held", _flat(place[self._held], banned, vocab)
        if self._masks is not None and self._masked is not None and (self._masked >= 0).any():
            yield "masks", self._masks
            yield "which", self._masked[ordered]


def apply(logits: Tensor, sent: Mapping[str, Tensor], seen: Seen) -> None:
    """Change the lines [changed, vocab] in place by what `Changes.arrays` are on the device."""
    if "penalised" in sent:
        device_changes.penalise(
            logits, sent["penalised"], seen, sent["entries"], sent["penalties"], sent["ahead"]
        )
    if "biased" in sent:
        device_changes.add_biases(logits, sent["biased"], sent["biases"])
    if "held" in sent:
        device_changes.hold_back(logits, sent["held"])
    if "masks" in sent:
        device_changes.apply_masks(logits, sent["masks"], sent["which"])


def _flat(places: Int64s, ids: list[Int32s], vocab: int) -> Int64s:
    """Where the ids of each line are in all of them."""
    return np.repeat(places, [len(some) for some in ids]) * vocab + np.concatenate(ids)
