"""Calls that are written as a list of Python calls: `[get_weather(city="Paris"), now()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Literal

from sapwood.srt.tokenizer.parsers.calls import MAX_CALL_CHARS, MAX_NAME_CHARS, Calls
from sapwood.srt.tokenizer.parsers.literals import NotLiteral, keywords

_WHITE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ENDS = re.compile(r"[\"'\\()\[\]{}]")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
OPENING, CLOSING = "<|python_start|>", "<|python_end|>"

State = Literal["start", "name", "arguments", "tail", "end", "plain"]


class PythonicCalls:
    """Takes the calls out of a text in pieces, if it begins with them; each is told once it is complete."""

    def __init__(self, names: Collection[str], calls: Calls) -> None:
        self._names = names
        self._calls = calls
        self._state: State = "start"
        self._raw = ""
        """What is not told yet, up to `_at`, and the rest."""
        self._at = 0
        self._name = ""
        self._begin = 0
        self._scan = _Brackets()
        self._steps: dict[State, Callable[[], bool]] = {
            "start": self._start, "name": self._read_name, "arguments": self._arguments, "tail": self._tail,
            "end": self._end, "plain": lambda: False,
        }  # fmt: skip

    def feed(self, text: str) -> str:
        """Take text; the content that is certain now."""
        self._raw += text
        while self._at < len(self._raw) and self._steps[self._state]():
            pass
        return self._take() if self._state == "plain" else ""

    def finish(self) -> str:
        """The content that was held, at the end of the text."""
        between = self._calls.any and self._state in ("tail", "name", "end")
        return "" if between and not self._raw.strip(_WHITE + ",") else self._take()

    @property
    def place(self) -> None:
        """It is never known: a call is told once it is complete."""
        return None

    def _take(self) -> str:
        text, self._raw, self._at = self._raw, "", 0
        return text

    def _fail(self) -> bool:
        self._state = "plain"
        return False

    def _skip_white(self) -> bool:
        rest = self._raw[self._at :]
        self._at += len(rest) - len(rest.lstrip(_WHITE))
        return self._at < len(self._raw)

    def _start(self) -> bool:
        if not self._skip_white():
            return False
        rest = self._raw[self._at :]
        if rest[0] == "[":
            self._at += 1
            self._state = "name"
            return True
        if rest.startswith(OPENING):
            self._at += len(OPENING)
            return True
        return False if OPENING.startswith(rest) else self._fail()

    def _read_name(self) -> bool:
        if not self._skip_white():
            return False
        found = _NAME.match(self._raw, self._at)
        if found is None or len(found[0]) > MAX_NAME_CHARS:
            return self._fail()
        if found.end() == len(self._raw):
            return False
        if self._raw[found.end()] != "(" or found[0] not in self._names:
            return self._fail()
        self._name, self._at, self._scan = found[0], found.end(), _Brackets()
        self._begin = self._at + 1
        self._state = "arguments"
        return True

    def _arguments(self) -> bool:
        self._at = self._scan.feed(self._raw, self._at)
        if self._scan.broken or self._at - self._begin > MAX_CALL_CHARS:
            return self._fail()
        if not self._scan.closed:
            return False
        try:
            arguments = json.dumps(keywords(self._raw[self._begin : self._at - 1]), ensure_ascii=False)
        except NotLiteral:
            return self._fail()
        self._calls.begin(self._name)
        self._calls.add(arguments)
        self._calls.end()
        self._raw, self._at, self._state = self._raw[self._at :], 0, "tail"
        return True

    def _tail(self) -> bool:
        if not self._skip_white():
            return False
        char = self._raw[self._at]
        if char not in ",]":
            return self._fail()
        self._at += 1
        if char == ",":
            self._state = "name"
            return True
        self._raw, self._at, self._state = self._raw[self._at :], 0, "end"
        return True

    def _end(self) -> bool:
        rest = self._raw.lstrip(_WHITE)
        if rest.startswith(CLOSING):
            self._raw, self._state = rest[len(CLOSING) :], "plain"
        elif not CLOSING.startswith(rest):
            self._state = "plain"
        return False


class _Brackets:
    """Finds where the bracket that comes first is closed."""

    def __init__(self) -> None:
        self.closed = False
        self.broken = False
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Look at text from `at` on; up to where."""
        while at < len(text) and not (self.closed or self.broken):
            if self._escaped:
                self._escaped = False
            elif (found := _ENDS.search(text, at)) is None:
                return len(text)
            else:
                at = found.start()
                self._take(text[at])
            at += 1
        return at

    def _take(self, char: str) -> None:
        if char == "\\":
            self._escaped, self.broken = bool(self._quote), not self._quote
        elif char in "\"'":
            self._quote = "" if self._quote == char else self._quote or char
        elif self._quote:
            return
        elif char in _PAIRS:
            self._open.append(_PAIRS[char])
        else:
            self.broken = self._open.pop() != char
            self.closed = not self._open
