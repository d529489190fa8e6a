"""A step's places in groups, so that few lines of logits are in memory at a time: vocabularies are large."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sapwood.srt.messages import TokenLogprob
from sapwood.srt.worker.sampler import Drawn, Places

MOST_LINES = 512
"""Of a group, unless one place alone has more."""


def pieces_of(places: Places, most: int = MOST_LINES) -> list[tuple[Places, slice]]:
    """The places in order in groups of at most `most` lines, and which of the step's lines are theirs."""
    ends = np.cumsum(places.widths)
    if ends[-1] <= most:
        return [(places, slice(0, int(ends[-1])))]
    found, first = [], 0
    while first < len(ends):
        begun = int(ends[first] - places.widths[first])
        last = max(first + 1, int(np.searchsorted(ends, begun + most, side="right")))
        found.append((_some(places, slice(first, last)), slice(begun, int(ends[last - 1]))))
        first = last
    return found


def _some(places: Places, part: slice) -> Places:
    before, within = int(places.drafts[: part.start].sum()), int(places.drafts[part].sum())
    lines = slice(int(places.first_lines[part.start]), None)
    some = Places(
        rows=places.rows[part],
        samples=places.samples[part],
        positions=places.positions[part],
        drafts=places.drafts[part],
        proposed=places.proposed[before : before + within],
    )
    if places.masks is not None and places.masked is not None:
        masked = places.masked[lines][: int(some.widths.sum())]
        named = masked[masked >= 0]
        if len(named):  # lines of masks are in the order of the places
            some.masks = places.masks[named[0] : named[-1] + 1]
            some.masked = np.where(masked >= 0, masked - named[0], -1).astype(np.int32)
    return some


def joined(
    parts: Sequence[tuple[Drawn, dict[int, TokenLogprob]]],
) -> tuple[Drawn, dict[int, TokenLogprob]]:
    """What the groups of a step have given, as if they had been one; but for the lines' own numbers."""
    if len(parts) == 1:
        return parts[0]
    logprobs: dict[int, TokenLogprob] = {}
    ids = 0
    for drawn, told in parts:
        logprobs |= {ids + index: value for index, value in told.items()}
        ids += len(drawn.ids)
    columns = zip(*((d.ids, d.counts, d.sources, d.errors) for d, _told in parts), strict=True)
    return Drawn(*(np.concatenate(column) for column in columns)), logprobs
