"""How a step's lines of logits are drawn from: worked out on the host, where all but the logits is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.kernels.ops.philox import uniforms
from sapwood.kernels.ops.sampling import GREEDY_BELOW
from sapwood.srt.worker.sampler import Places
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Bunch(NamedTuple):
    """Lines that are drawn from in one go: `span` of the lines in the order of `Lines.order`."""

    span: slice
    changed: bool
    by_k: bool
    by_p: bool
    floors: bool
    greedy: bool


class Lines:
    """The lines of logits of a step, and its draws: of a fork all are from its one line, else there is one
    from each line of a row. No loop over rows."""

    def __init__(self, places: Places, pool: TokenPool, vocab: int) -> None:
        widths, self.first_lines = places.widths, places.first_lines
        place = np.repeat(np.arange(len(widths)), widths)
        self.rows = places.rows[place]
        self.ahead = np.arange(len(place)) - self.first_lines[place]
        """How many drafts come before each line."""
        self.positions = places.positions[place] + self.ahead
        self.drafts = _padded(places)
        """int32 [places, most drafts]; -1 behind a row's last."""
        self.drafts_ahead = np.where(
            np.arange(self.drafts.shape[1]) < self.ahead[:, None], self.drafts[place], np.int32(-1)
        )
        self.most = int(places.samples.max())
        """Samples of one line."""
        self._lay_out(places)
        self._pool = pool
        top_k = pool.top_k[self.rows]
        self._greedy = (pool.temperature[self.rows] < GREEDY_BELOW) | (top_k == 1)
        self._by_k = ~self._greedy & (top_k > 0) & (top_k < vocab)
        self._by_p = ~self._greedy & (pool.top_p[self.rows] < 1.0)
        self.order: Int64s = np.arange(len(place))
        """The lines as they are drawn from."""
        self._in_order = True

    @property
    def is_plain(self) -> bool:
        """Whether each row draws one token."""
        return self.most == 1 and not self.drafts.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    def _lay_out(self, places: Places) -> None:
        self.draws = np.maximum(places.samples, places.widths)
        """Of each place."""
        self.first_draws = np.cumsum(self.draws) - self.draws
        offsets = np.arange(self.draws.sum()) - np.repeat(self.first_draws, self.draws)
        forks = np.repeat(places.samples > 1, self.draws)
        self.sources = np.repeat(self.first_lines, self.draws) + np.where(forks, 0, offsets)
        """The line of each draw."""
        self._samples = np.where(forks, offsets, 0)

    def bunches(self, changed: Bools) -> list[Bunch]:
        """Put the lines in order, those that are `changed` last: all that are drawn from alike together."""
        kinds = changed * 2 + (self._by_k | self._by_p)
        if (kinds != kinds[0]).any():
            self.order, self._in_order = np.argsort(kinds, kind="stable"), False
        kinds, greedy = kinds[self.order], self._greedy[self.order]
        by_k, by_p = self._by_k[self.order], self._by_p[self.order]
        floors = self._pool.min_p[self.rows[self.order]] > 0
        borders = np.flatnonzero(np.diff(kinds)) + 1
        return [
            Bunch(
                slice(begin, end),
                bool(kinds[begin] & 2),
                bool(by_k[begin:end].any()),
                bool(by_p[begin:end].any()),
                bool(floors[begin:end].any()),
                bool(greedy[begin:end].all()),
            )
            for begin, end in zip([0, *borders.tolist()], [*borders.tolist(), len(kinds)], strict=True)
        ]

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What the device needs to draw, by name, in the order of the lines."""
        pool, rows = self._pool, self.rows[self.order]
        yield "order", self.order
        if not (self.is_plain and self._in_order):
            yield "draws", self._results()
        if not self._greedy.all():
            yield "u", self._uniforms()
            for name in ("temperature", "top_k", "top_p", "min_p"):
                yield name, getattr(pool, name)[rows]
        if not self.is_plain:
            yield "drafts", self.drafts
            # What lies behind a row's last draw is never looked at: it has no draft to be equal to.
            at = np.minimum(np.arange(self.drafts.shape[1] + 1), self.draws[:, None] - 1)
            yield "chains", self.first_draws[:, None] + at

    def _results(self) -> Int64s:
        """Where each draw is, of `most` from each line in order."""
        place: Int64s = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place[self.sources] * self.most + self._samples

    def _uniforms(self) -> npt.NDArray[np.float64]:
        """float64 [lines, most]"""
        rows = self.rows[self.order]
        choices = self._pool.choice[rows][:, None] + np.arange(self.most)
        return uniforms(self._pool.seed[rows][:, None], choices, self.positions[self.order][:, None])


def _padded(places: Places) -> Int32s:
    most = int(places.drafts.max())
    result = np.full((len(places.drafts), most), -1, dtype=np.int32)
    result[np.arange(most) < places.drafts[:, None]] = places.proposed
    return result
