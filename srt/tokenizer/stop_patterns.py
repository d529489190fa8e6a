"""Finds matches of stop_regex in text that comes token by token."""

from __future__ import annotations

from typing import NamedTuple

from sapwood.srt.grammar.positions import Column, Positions
from sapwood.srt.grammar.stop_regex import MAX_MATCH

_STARTS = (1 << MAX_MATCH) - 1


class Match(NamedTuple):
    """Where it begins and ends, in characters from the beginning of the text that was fed last (what begins
    before that is negative), and the number of its pattern."""

    start: int
    end: int
    pattern: int


class PatternScanner:
    """Walks the patterns over one choice's text; nothing is ever tried again, so that a character costs at
    most `Positions.steps`.

    `held` characters at the end may still become a part of a match. Of several matches the one that ends
    first counts, of those the one that begins first, of those the one of the first pattern.
    """

    __slots__ = ("_begun", "_patterns", "_threads", "held")

    def __init__(self, patterns: Positions) -> None:
        self._patterns = patterns
        self._begun = False
        self._threads: dict[int, int] = {}
        """By position, where the matches begin that have come so far: bit k stands for the character with k
        others behind it in the text. Within `feed` all of its text counts: no character moves any bit."""
        self.held = 0

    def feed(self, text: str, acting: bool = True) -> Match | None:
        """The first match that this text completes, after which the scan is over; None if there is none, or
        if they do not count, not being `acting`."""
        column = self._patterns.column
        threads = {position: starts << len(text) for position, starts in self._threads.items()}
        for rest, char in zip(range(len(text) - 1, -1, -1), text, strict=True):
            threads = self._step(threads, column(char), 1 << rest)
            if acting and not self._patterns.ending.isdisjoint(threads):
                match = self._matched(threads, len(text), rest)
                if match is not None:
                    return match
        self._threads = {at: recent for at, starts in threads.items() if (recent := starts & _STARTS)}
        follow = self._patterns.follow
        self.held = max(
            (starts.bit_length() for at, starts in self._threads.items() if follow[at]), default=0
        )
        return None

    def _step(self, threads: dict[int, int], column: Column, start: int) -> dict[int, int]:
        after: dict[int, int] = {}
        ways = column.ways
        for position, starts in threads.items():
            for following in ways[position]:
                if following in after:
                    after[following] |= starts
                else:
                    after[following] = starts
        for position in column.begin if self._begun else column.begin_at_start:
            after[position] = after.get(position, 0) | start
        self._begun = True
        return after

    def _matched(self, threads: dict[int, int], length: int, rest: int) -> Match | None:
        """The first match of `threads` with `rest` of the text's `length` characters still to come; what
        began too long ago is none."""
        ends, found = self._patterns.ends, None
        recent = (1 << rest + MAX_MATCH) - 1
        for position in self._patterns.ending.intersection(threads):
            if starts := threads[position] & recent:
                match = Match(length - starts.bit_length(), length - rest, ends[position])
                found = match if found is None else min(found, match)
        return found
