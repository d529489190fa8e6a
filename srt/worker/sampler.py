"""From logits to tokens: biases, bans, penalties and masks per row, then draws that depend on nothing else;
drafts are kept as far as they are what is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sapwood.kernels.ops import sampling
from sapwood.srt.grammar.engine import Masks
from sapwood.srt.messages import TokenLogprob
from sapwood.srt.worker.logprobs import token_logprobs
from sapwood.srt.worker.token_pool import TokenPool

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Places:
    """Where rows sample: row `rows[i]` draws `samples[i]` tokens for position `positions[i]`, and for those
    after it as long as they are its `drafts[i]` proposals; only one that draws a single token has any.

    Its logits are `drafts[i] + 1` lines, one row's after the other's. `proposed` are all drafts, in order.
    `masked[k]` is the line of `masks` that says what line k of the logits may give, -1 where all is allowed.
    """

    rows: Int32s
    samples: Int32s
    positions: Int32s
    drafts: Int32s
    proposed: Int32s
    masks: Masks | None = None
    masked: Int32s | None = None

    @property
    def widths(self) -> Int32s:
        return self.drafts + np.int32(1)

    @property
    def first_lines(self) -> Int32s:
        return _before(self.widths)


@dataclass(slots=True)
class Drawn:
    """`ids`, `counts[i]` of place i, in order, and the line of logits that each was drawn from. `errors` are
    the kernel's, one a place."""

    ids: Int32s
    counts: Int32s
    sources: Int32s
    errors: Int32s

    def first(self, kept: Int32s) -> None:
        """Cut each place to its first `kept[i]` ids."""
        offsets = np.arange(len(self.ids), dtype=np.int32) - np.repeat(_before(self.counts), self.counts)
        within = offsets < np.repeat(kept, self.counts)
        self.ids, self.sources, self.counts = self.ids[within], self.sources[within], kept


class Sampler:
    """Draws tokens for the rows of a pool."""

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool

    def draw(self, logits: torch.Tensor, places: Places) -> Drawn:
        """Tokens drawn from logits [lines, vocab] after biases, bans, penalties and masks. What min_tokens
        holds back is not held back where the mask allows nothing else.

        A row that draws several (its choices fork there) draws them with consecutive choice numbers. The
        first of these, or the last one after drafts, becomes the row's next input. Nothing is drawn after a
        draft that is not what was drawn in its place, nor after an end.
        """
        lines = _Lines(logits, self._pool, places)
        starts = _before(places.samples)
        source = np.repeat(places.first_lines, places.samples)
        offsets = np.arange(len(source), dtype=np.int32) - np.repeat(starts, places.samples)
        ids, errors = lines.draw(source, offsets)
        worst = np.maximum.reduceat(errors, starts)
        if len(places.proposed):
            ids, counts, source = self._verify(lines, places, ids, worst, source)
        else:
            self._pool.last[places.rows] = ids[starts]
            counts = places.samples
        return Drawn(ids, counts, source, worst)

    def _verify(
        self, lines: _Lines, places: Places, ids: Int32s, errors: Int32s, source: Int32s
    ) -> tuple[Int32s, Int32s, Int32s]:
        """Draw on behind each draft that is what was drawn: all ids, how many of each place, their lines."""
        first, drafts = places.first_lines, places.drafts
        drawn = np.full(len(lines), -1, dtype=np.int32)
        drawn[first] = ids[_before(places.samples)]
        proposed = np.full(len(lines), -1, dtype=np.int32)
        before = np.ones(len(lines), dtype=bool)
        before[first + drafts] = False
        proposed[before] = places.proposed
        kept = np.ones(len(first), dtype=np.int32)
        going = np.flatnonzero((drafts > 0) & (errors == sampling.OK))
        while True:
            line = first[going] + kept[going] - 1
            agree = (drawn[line] == proposed[line]) & ~np.isin(drawn[line], self._pool.eos_ids)
            going = going[agree]
            if not len(going):
                break
            line = first[going] + kept[going]
            token, error = lines.draw(line, np.zeros(len(line), dtype=np.int32))
            # A row that cannot draw there has what it has: it will fail when that is its next token.
            going, drawn[line] = going[error == sampling.OK], token
            kept[going] += 1
        self._pool.last[places.rows] = drawn[first + kept - 1]
        forks = places.samples > 1
        counts = np.where(forks, places.samples, kept).astype(np.int32)
        sources = np.repeat(first, counts) + (
            np.arange(counts.sum(), dtype=np.int32) - np.repeat(_before(counts), counts)
        ) * np.repeat(~forks, counts)
        result = drawn[sources]
        result[np.repeat(forks, counts)] = ids[np.repeat(forks, places.samples)]
        return result, counts, sources.astype(np.int32)

    def logprobs(self, logits: torch.Tensor, places: Places, drawn: Drawn) -> dict[int, TokenLogprob]:
        """Of the logits as they came, by index into the ids."""
        owner = np.repeat(places.rows, drawn.counts)
        wanted = np.flatnonzero(self._pool.logprobs[owner] >= 0)
        if not len(wanted):
            return {}
        further = self._pool.logprob_ids
        chosen = {k: further[row] for k, row in enumerate(owner[wanted].tolist()) if row in further}
        tops = self._pool.logprobs[owner[wanted]]
        told = token_logprobs(logits, drawn.sources[wanted], drawn.ids[wanted], tops, chosen)
        return dict(zip(wanted.tolist(), told, strict=True))


class _Lines:
    """Lines of logits that can be drawn from one after the other, as the row's counts go on."""

    def __init__(self, logits: torch.Tensor, pool: TokenPool, places: Places) -> None:
        self._logits = logits
        self._pool = pool
        self._rows = np.repeat(places.rows, places.widths)
        ahead = np.arange(len(self._rows), dtype=np.int32) - np.repeat(places.first_lines, places.widths)
        self._positions = np.repeat(places.positions, places.widths) + ahead
        self._changes, self._penalties = self._changed(places.masks, places.masked)

    def __len__(self) -> int:
        return len(self._rows)

    def draw(self, source: Int32s, choices: Int32s) -> tuple[Int32s, Int32s]:
        """An id and an error for each line of `source`, as the row's choice + `choices[i]`."""
        pool, owner = self._pool, self._rows[source]
        ids = np.zeros(len(source), dtype=np.int32)
        errors = np.zeros(len(source), dtype=np.int32)
        sampling.sample(
            self._logits,
            torch.from_numpy(source),
            torch.from_numpy(pool.temperature[owner]),
            torch.from_numpy(pool.top_k[owner]),
            torch.from_numpy(pool.top_p[owner]),
            torch.from_numpy(pool.min_p[owner]),
            torch.from_numpy(pool.seed[owner]),
            torch.from_numpy(pool.choice[owner] + choices),
            torch.from_numpy(self._positions[source]),
            torch.from_numpy(ids),
            torch.from_numpy(errors),
            self._changes,
            self._penalties,
        )
        return ids, errors

    def _changed(
        self, masks: Masks | None, masked: Int32s | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What is done to each line before it is drawn from; (None, None) if nothing is."""
        pool, rows = self._pool, self._rows
        if not pool.changes and masked is None:
            return None, None
        changes = pool.change[rows]
        held_back = self._positions < pool.banned_before[rows]
        changes[~held_back, sampling.NUM_BANNED] = 0
        if masks is not None and masked is not None:
            address = masks.ctypes.data + masked.astype(np.int64) * masks.strides[0]
            changes[:, sampling.MASK] = np.where(masked >= 0, address, 0)
            for line in np.flatnonzero((masked >= 0) & (changes[:, sampling.NUM_BANNED] > 0)).tolist():
                if not leaves_any(masks[masked[line]], pool.changes[int(rows[line])].banned):
                    changes[line, sampling.NUM_BANNED] = 0
        return torch.from_numpy(changes), torch.from_numpy(pool.penalties[rows])


def leaves_any(mask: Int32s, banned: Int32s) -> bool:
    """Whether a mask allows more than the banned ids."""
    rest = mask.view(np.uint32).copy()
    np.bitwise_and.at(rest, banned >> 5, ~(np.uint32(1) << (banned & 31).astype(np.uint32)))
    return bool(rest.any())


def _before(counts: Int32s) -> Int32s:
    """How many come before each."""
    return (np.cumsum(counts) - counts).astype(np.int32)
