"""Calls of tools as they are told to the server, and the reading of one that is written in JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection

from sapwood.srt.messages import CallDelta, Incomplete
from sapwood.srt.tokenizer.partial_json import JsonScanner

MAX_CALL_CHARS = 65_536
"""Of what may be a call, until it is one: so long it is held."""
MAX_NAME_CHARS = 64
MAX_DEPTH = 512
"""Of a call's arguments: others, and programs, read them with recursion."""
_ARGUMENTS = ("arguments", "parameters")
_BEFORE = ("id", "type")
"""What else may come before a call has begun: other members are those of other objects."""


class Calls:
    """The calls of one output: what is new of them, how many are `complete`, and whether one is `open`."""

    def __init__(self) -> None:
        self.complete = 0
        self.open = False
        self._begun = 0
        self._new: list[CallDelta] = []

    @property
    def any(self) -> bool:
        return self._begun > 0

    @property
    def whole(self) -> bool:
        """Whether there are calls, and each that has begun is complete."""
        return self.any and self.complete == self._begun

    @property
    def pointer(self) -> str:
        """Where the last call that has begun stands in the answer's message."""
        return f"/tool_calls/{self._begun - 1}/function"

    def begin(self, name: str) -> None:
        self._new.append(CallDelta(self._begun, id=f"call_{secrets.token_hex(12)}", name=name))
        self._begun += 1
        self.open = True

    def add(self, arguments: str) -> None:
        """More of the open call's arguments."""
        index = self._begun - 1
        if self._new and self._new[-1].index == index:
            self._new[-1].arguments += arguments
        elif arguments:
            self._new.append(CallDelta(index, arguments))

    def end(self) -> None:
        """The open call is complete."""
        self.complete += 1
        self.open = False

    def take(self) -> list[CallDelta]:
        new, self._new = self._new, []
        return new


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}` (or `parameters`) in pieces.

    It has `begun` when the name, one of `names`, is known and the arguments' object has begun; from then on
    `take` gives their text, as it was written. A call without arguments has "{}". Other members are skipped;
    before it has begun only `id` and `type` may be there.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""
        self.failed = False
        self._names = names
        self._scanner = JsonScanner(MAX_DEPTH)
        self._chars = 0
        self._written_name = ""
        self._key = ""
        """Of the arguments: what they are called here."""
        self._closed: set[str] = set()
        self._new: list[str] = []

    @property
    def complete(self) -> bool:
        return self._scanner.complete and not self.failed

    @property
    def begun(self) -> bool:
        return bool(self.name and self._key)

    @property
    def place(self) -> Incomplete | None:
        """What is being written, by a pointer from the call's function; None if the call is complete."""
        found, key = self._scanner.place, f"/{self._key}"
        if found is None or not f"{found.pointer}/".startswith(f"{key}/"):
            return found
        return Incomplete(f"/{_ARGUMENTS[0]}{found.pointer[len(key) :]}", found.inside)

    def feed(self, text: str) -> int:
        """Take text; how many characters of it belong to the call."""
        scanner, at = self._scanner, 0
        while at < len(text) and scanner.live and not self.failed:
            before = scanner.member
            end = scanner.step(text, at)
            after = scanner.member
            key = after if before is None else before
            if key is not None:
                self._read(key, text[at:end])
                if after is None:
                    self._close(key)
            self._chars += end - at
            at = end
            self.failed = self.failed or (self._chars > MAX_CALL_CHARS and not self.begun)
        if scanner.complete and not self._key and not self.failed:
            self._key, self._new = _ARGUMENTS[0], ["{}"]
        self.failed = self.failed or scanner.broken or (scanner.complete and not self.name)
        return at

    def take(self) -> str:
        """The text of the arguments that has come since the last time."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def _read(self, key: str, piece: str) -> None:
        if key in self._closed:
            self.failed = True  # given twice
        elif key in _ARGUMENTS:
            if not self._key and piece.startswith("{"):
                self._key = key
            self.failed = self._key != key
            if not self.failed:
                self._new.append(piece)
        elif key == "name":
            self._written_name += piece
            # Any escape has six characters at most.
            short = len(self._written_name) <= 6 * MAX_NAME_CHARS + 2
            self.failed = not short or not self._written_name.startswith('"')
        elif key not in _BEFORE and not self.begun:
            self.failed = True

    def _close(self, key: str) -> None:
        """The value of a member has ended."""
        if key == "name" and not self.failed:
            name = json.loads(self._written_name)
            self.failed = not isinstance(name, str) or name not in self._names
            self.name = "" if self.failed else name
        if key == "name" or key in _ARGUMENTS:
            self._closed.add(key)


class ArgumentsReader:
    """Reads the arguments `{...}` of a call whose name is known, as a CallReader does the whole of one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._scanner = JsonScanner(MAX_DEPTH)
        self._new: list[str] = []

    @property
    def failed(self) -> bool:
        return self._scanner.broken

    @property
    def complete(self) -> bool:
        return self._scanner.complete

    @property
    def begun(self) -> bool:
        return bool(self._new)

    @property
    def place(self) -> Incomplete | None:
        found = self._scanner.place
        return None if found is None else Incomplete(f"/{_ARGUMENTS[0]}{found.pointer}", found.inside)

    def feed(self, text: str) -> int:
        at = self._scanner.feed(text)
        self._new.append(text[:at])
        return at

    def take(self) -> str:
        new = "".join(self._new)
        self._new.clear()
        return new


def held(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
