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
        """By position, how long the matches are that have come so far: bit k stands for k + 1 characters."""
        self.held = 0

    def feed(self, text: str, acting: bool = True) -> Match | None:
        """The first match that this text completes, after which the scan is over; None if there is none, or
        if they do not count, not being `acting`."""
        column = self._patterns.column
        for end, char in enumerate(text, 1):
            self._step(column(char))
            if acting and (match := self._matched(end)) is not None:
                return match
        follow, threads = self._patterns.follow, self._threads
        self.held = max((threads[at].bit_length() for at in threads if follow[at]), default=0)
        return None

    def _step(self, column: Column) -> None:
        after: dict[int, int] = {}
        for position, starts in self._threads.items():
            if longer := starts << 1 & _STARTS:
                for following in column.ways(position):
                    after[following] = after.get(following, 0) | longer
        for position in column.begin if self._begun else column.begin_at_start:
            after[position] = after.get(position, 0) | 1
        self._begun = True
        self._threads = after

    def _matched(self, end: int) -> Match | None:
        ends, found = self._patterns.ends, None
        for position, starts in self._threads.items():
            if ends[position] >= 0:
                match = Match(end - starts.bit_length(), end, ends[position])
                found = match if found is None else min(found, match)
        return found
