"""JSON that comes in pieces: where it stands, and where it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sapwood.srt.messages import Incomplete

_WHITE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = re.compile(r"[-+.eE0-9]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = frozenset(("true", "false", "null"))
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")

State = Literal["value", "item", "member", "key", "colon", "after", "string", "escape", "number", "literal"]


@dataclass(slots=True)
class _Open:
    """An object or an array that has not ended; `at` is the key or the index of what is written in it."""

    kind: Literal["object", "array"]
    at: str | int = 0


class JsonScanner:
    """Follows one JSON value through text in pieces. Strict: what is `complete` is valid JSON.

    Once it is `complete`, or `broken`, nothing more is taken; more than `most` objects and arrays in each
    other break it. A number that is all of the value is complete when something else follows it.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.complete = False
        self.broken = False
        self._state: State = "value"
        self._open: list[_Open] = []
        self._is_key = False
        self._token = ""
        """What has come of a key, a number, a literal, or an escape."""
        self._escaped = ""
        self._steps: dict[State, Callable[[str, int], int]] = {
            "value": self._value, "item": self._value, "member": self._key, "key": self._key,
            "colon": self._colon, "after": self._after, "string": self._string, "escape": self._escape,
            "number": self._number, "literal": self._literal,
        }  # fmt: skip

    @property
    def live(self) -> bool:
        return not (self.complete or self.broken)

    def feed(self, text: str) -> int:
        """Take text; how many characters belong to the value, or come before it as white space."""
        at = 0
        while at < len(text) and self.live:
            at = self.step(text, at)
        return at

    def step(self, text: str, at: int) -> int:
        """Take the next few characters from `at` on; where they end."""
        return self._steps[self._state](text, at)

    @property
    def member(self) -> str | None:
        """The key in the outermost object whose value is being written."""
        if not self._open or self._open[0].kind != "object":
            return None
        within = len(self._open) > 1 or (
            self._state in ("string", "escape", "number", "literal") and not self._is_key
        )
        return str(self._open[0].at) if within else None

    @property
    def place(self) -> Incomplete | None:
        """What is being written now; None if the value is complete."""
        if self.complete:
            return None
        if self._state in ("string", "escape") and self._is_key:
            return Incomplete(self._pointer(-1), "key")
        if self._state in ("string", "escape"):
            return Incomplete(self._pointer(), "string")
        if self._state in ("number", "literal"):
            return Incomplete(self._pointer(), self._state)
        return Incomplete(self._pointer(-1), self._open[-1].kind) if self._open else Incomplete("", "text")

    def _pointer(self, end: int | None = None) -> str:
        """The JSON pointer (RFC 6901) of what is written; with -1 of what that is in."""
        steps = (str(opened.at).replace("~", "~0").replace("/", "~1") for opened in self._open[:end])
        pointer = "".join(f"/{step}" for step in steps)
        return pointer.encode("utf-8", "replace").decode()  # a key may have half a surrogate pair

    def _fail(self, at: int) -> int:
        self.broken = True
        return at

    def _value(self, text: str, at: int) -> int:
        if (end := _end(_WHITE, text, at)) > at:
            return end
        char = text[at]
        if char == "]" and self._state == "item":
            return self._close(at)
        self._is_key, self._token = False, ""
        if char == '"':
            self._state = "string"
        elif char in "{[" and len(self._open) == self._most:
            return self._fail(at)
        elif char == "{":
            self._open.append(_Open("object"))
            self._state = "member"
        elif char == "[":
            self._open.append(_Open("array", 0))
            self._state = "item"
        elif char == "-" or "0" <= char <= "9":
            self._state = "number"
            return self._number(text, at)
        elif char in "tfn":
            self._state = "literal"
            return self._literal(text, at)
        else:
            return self._fail(at)
        return at + 1

    def _key(self, text: str, at: int) -> int:
        if (end := _end(_WHITE, text, at)) > at:
            return end
        if text[at] == "}" and self._state == "member":
            return self._close(at)
        if text[at] != '"':
            return self._fail(at)
        self._state, self._is_key, self._token = "string", True, ""
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if (end := _end(_WHITE, text, at)) > at:
            return end
        if text[at] != ":":
            return self._fail(at)
        self._state = "value"
        return at + 1

    def _after(self, text: str, at: int) -> int:
        if (end := _end(_WHITE, text, at)) > at:
            return end
        inner, char = self._open[-1], text[at]
        if char == ("}" if inner.kind == "object" else "]"):
            return self._close(at)
        if char != ",":
            return self._fail(at)
        if inner.kind == "object":
            self._state = "key"
        else:
            assert isinstance(inner.at, int)
            inner.at, self._state = inner.at + 1, "value"
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        """A value has ended."""
        self._state = "after"
        self.complete = not self._open

    def _string(self, text: str, at: int) -> int:
        if (end := _end(_PLAIN, text, at)) > at:
            self._keep(text[at:end])
            return end
        if text[at] == "\\":
            self._state, self._escaped = "escape", ""
        elif text[at] != '"':
            return self._fail(at)
        elif self._is_key:
            self._open[-1].at, self._state = json.loads(f'"{self._token}"'), "colon"
        else:
            self._ended()
        return at + 1

    def _keep(self, text: str) -> None:
        if self._is_key:
            self._token += text

    def _escape(self, text: str, at: int) -> int:
        char, escaped = text[at], self._escaped + text[at]
        whole = char in _ESCAPES if len(escaped) == 1 else len(escaped) == 5
        if not whole and not (escaped == "u" or (len(escaped) > 1 and char in _HEX)):
            return self._fail(at)
        if len(escaped) > 1 and char not in _HEX:
            return self._fail(at)
        self._escaped = escaped
        if whole:
            self._keep("\\" + escaped)
            self._state = "string"
        return at + 1

    def _number(self, text: str, at: int) -> int:
        if (end := _end(_DIGITS, text, at)) > at:
            self._token += text[at:end]
            return end
        if not _NUMBER.fullmatch(self._token):
            return self._fail(at)
        self._ended()
        return at

    def _literal(self, text: str, at: int) -> int:
        token = self._token + text[at]
        if token in _WORDS:
            self._ended()
        elif not any(word.startswith(token) for word in _WORDS):
            return self._fail(at)
        self._token = token
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
