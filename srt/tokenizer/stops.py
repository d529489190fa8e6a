"""Finds stop strings in text that comes token by token, without ever letting a part of one out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
    that begins first, and of those the shorter. Once `matched` is set the scan is over.
    """

    __slots__ = ("_held", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, acting: bool = True) -> str:
        """The text that can no longer be part of a stop string, cut before the match if there is one.

        A match that this token completes counts only if `acting`; else its text flows on.
        """
        stops, state = self._stops, self._state
        if state == 0 and stops.first.isdisjoint(text):
            return text
        whole = self._held + text
        start = len(whole)
        for end, char in enumerate(text, len(self._held) + 1):
            state = stops.step(state, char)
            found = stops.longest[state]
            if found >= 0 and acting and end - len(stops.texts[found]) < start:
                start = end - len(stops.texts[found])
                self.matched = stops.texts[found]
        self._state = state
        safe = start if self.matched is not None else len(whole) - stops.hold[state]
        self._held = whole[safe:]
        return whole[:safe]

    def release(self) -> str:
        """The text that was held back, at the end of a choice that no stop string has ended."""
        held, self._held, self._state = self._held, "", 0
        return held
