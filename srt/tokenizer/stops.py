"""Finds stop strings and patterns in text that comes token by token; never lets a part of one out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sapwood.srt.grammar.positions import Positions
from sapwood.srt.tokenizer.stop_patterns import PatternScanner


class StopStrings:
    """The stop strings of one request as an Aho-Corasick automaton (CACM 18(6), 1975), shared by its choices.

    A state stands for the longest suffix of the text so far that begins some stop string. Scanning costs
    about one dictionary lookup a character, whatever the strings are. Raises ValueError for an empty one.
    """

    __slots__ = ("children", "fail", "first", "hold", "longest", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise ValueError("a stop string is empty")
        self.texts = list(texts)
        self.first = frozenset(text[0] for text in texts)
        self.children: list[dict[str, int]] = [{}]
        self.longest = [-1]
        depth = [0]
        for index, text in enumerate(texts):
            state = 0
            for char in text:
                if char not in self.children[state]:
                    self.children[state][char] = len(self.children)
                    self.children.append({})
                    self.longest.append(-1)
                    depth.append(depth[state] + 1)
                state = self.children[state][char]
            self.longest[state] = index
        self.fail = [0] * len(depth)
        self.hold = depth
        self._link()

    def _link(self) -> None:
        """Breadth first: where a state goes on a mismatch, its longest match, how many characters it holds.

        A state without children is a whole stop string; what it holds (if the match was not acted on) is
        its longest suffix that is a proper prefix.
        """
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, child in self.children[state].items():
                self.fail[child] = self.step(self.fail[state], char) if state else 0
                waiting.append(child)
            if self.longest[state] < 0:
                self.longest[state] = self.longest[self.fail[state]]
            if not self.children[state]:
                self.hold[state] = self.hold[self.fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        children, fail = self.children, self.fail
        while (following := children[state].get(char)) is None:
            if state == 0:
                return 0
            state = fail[state]
        return following


class StopScanner:
    """Scans one choice's text: `feed` gives back what is safe to show.

    Of several stop strings the one that is complete at the earlier token wins; at the same token the one
    that begins first, and of those the shorter. Of patterns the match that ends first wins, and against stop
    strings it is like one of them. Once `matched` is set the scan is over.
    """

    __slots__ = ("_held", "_names", "_patterns", "_state", "_stops", "matched")

    def __init__(
        self, stops: StopStrings, patterns: Positions | None = None, names: Sequence[str] = ()
    ) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self._patterns = None if patterns is None else PatternScanner(patterns)
        self._names = names
        self.matched: str | None = None

    def feed(self, text: str, acting: bool = True) -> str:
        """The text that can no longer be part of a match, cut before the match if there is one.

        A match that this token completes counts only if `acting`; else its text flows on.
        """
        if self._state == 0 and self._patterns is None and self._stops.first.isdisjoint(text):
            return text
        before = len(self._held)
        whole = self._held + text
        found = self._scan(whole, before, acting)
        held = self._stops.hold[self._state]
        if self._patterns is not None:
            match = self._patterns.feed(text, acting)
            if match is not None and (before + match.start, before + match.end) < found:
                found = before + match.start, before + match.end
                self.matched = self._names[match.pattern]
            held = max(held, self._patterns.held)
        safe = found[0] if self.matched is not None else len(whole) - held
        self._held = whole[safe:]
        return whole[:safe]

    def _scan(self, whole: str, before: int, acting: bool) -> tuple[int, int]:
        """Where the stop string that counts begins and ends; behind everything if there is none."""
        stops, state = self._stops, self._state
        found = (len(whole) + 1, 0)
        for end, char in enumerate(whole[before:], before + 1):
            state = stops.step(state, char)
            longest = stops.longest[state]
            if longest >= 0 and acting and end - len(stops.texts[longest]) < found[0]:
                found = end - len(stops.texts[longest]), end
                self.matched = stops.texts[longest]
        self._state = state
        return found

    def release(self) -> str:
        """The text that was held back, at the end of a choice that nothing of this has ended."""
        held, self._held, self._state = self._held, "", 0
        return held
