"""Keyword arguments in Python's notation, read without Python: literals and nothing else."""

from __future__ import annotations

import math
import re
from typing import Any

MAX_DEPTH = 64

_WHITE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PLAIN = {'"': re.compile(r'[^"\\\n]+'), "'": re.compile(r"[^'\\\n]+")}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'",
    '"': '"', "\n": "",
}  # fmt: skip


class NotLiteral(ValueError):
    """The text is something else."""


def keywords(text: str) -> dict[str, Any]:
    """What `a=1, b="x"` says, as JSON values; tuples are lists. Raises NotLiteral."""
    reader = _Reader(text)
    given: dict[str, Any] = {}
    while not reader.at_end:
        name = reader.match(_NAME)
        if name in given:
            raise NotLiteral(f"{name} is given twice")
        reader.expect("=")
        given[name] = reader.value(0)
        if not reader.at_end:
            reader.expect(",")
    return given


class _Reader:
    """A place in the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def at_end(self) -> bool:
        self._at = _WHITE.match(self._text, self._at).end()  # type: ignore[union-attr]
        return self._at == len(self._text)

    @property
    def _next(self) -> str:
        if self.at_end:
            raise NotLiteral("it ends early")
        return self._text[self._at]

    def expect(self, char: str) -> None:
        if self._next != char:
            raise NotLiteral(f"{char} is expected at {self._at}")
        self._at += 1

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at) if not self.at_end else None
        if found is None:
            raise NotLiteral(f"nothing known stands at {self._at}")
        self._at = found.end()
        return found[0]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotLiteral("it is nested too deeply")
        char = self._next
        if char in "\"'":
            return self._strings()
        if char == "{":
            return self._dict(depth)
        if char in "[(":
            return self._list("]" if char == "[" else ")", depth)
        if char in "+-." or char.isdigit():
            return _number(self.match(_NUMBER))
        word = self.match(_NAME)
        if word not in _WORDS:
            raise NotLiteral(f"{word} is no literal")
        return _WORDS[word]

    def _list(self, closing: str, depth: int) -> Any:
        self._at += 1
        items: list[Any] = []
        while self._next != closing:
            items.append(self.value(depth + 1))
            if self._next != closing:
                self.expect(",")
            elif closing == ")" and len(items) == 1:
                self._at += 1
                return items[0]  # only parentheses
        self._at += 1
        return items

    def _dict(self, depth: int) -> dict[str, Any]:
        self._at += 1
        items: dict[str, Any] = {}
        while self._next != "}":
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise NotLiteral("a key is no string")
            self.expect(":")
            items[key] = self.value(depth + 1)
            if self._next != "}":
                self.expect(",")
        self._at += 1
        return items

    def _strings(self) -> str:
        """One string, or several side by side, which are one."""
        parts = []
        while not self.at_end and self._text[self._at] in "\"'":
            parts.append(self._string())
        return "".join(parts)

    def _string(self) -> str:
        text, quote, parts = self._text, self._text[self._at], []
        self._at += 1
        while self._at < len(text) and text[self._at] != quote:
            if (plain := _PLAIN[quote].match(text, self._at)) is not None:
                parts.append(plain[0])
                self._at = plain.end()
            elif text[self._at] == "\\":
                parts.append(self._escape())
            else:
                raise NotLiteral("a line ends within a string")
        if self._at == len(text):
            raise NotLiteral("a string does not end")
        self._at += 1
        return "".join(parts)

    def _escape(self) -> str:
        code = _CODE.match(self._text, self._at + 1)
        if code is not None:
            self._at = code.end()
            number = int(code[4], 8) if code[4] else int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise NotLiteral("an escape is no character")
            return chr(number)
        char = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        return _ESCAPES.get(char, "\\" + char)


def _number(text: str) -> int | float:
    if len(text) > 400:
        raise NotLiteral("a number is too long")
    value = float(text) if set(text) & set(".eE") else int(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise NotLiteral("a number is too large")
    return value
