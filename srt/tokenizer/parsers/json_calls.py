"""Calls that are written as JSON objects between marks: the formats of Hermes and Qwen, Mistral, Llama 3."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from sapwood.srt.messages import Incomplete
from sapwood.srt.tokenizer.parsers.calls import ArgumentsReader, CallReader, Calls, held

MAX_HEAD = 1024
"""Characters from an opening to what must be a call's object: white space, mostly."""
_WHITE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Marks(NamedTuple):
    """What stands around the calls of a format: `opening`, `lead`, call, `between`, call, `closing`.

    Between any two of these may be white space. If they are `first`, calls begin the output or there are
    none, and the opening may be left out. With a mark for `arguments`, it stands between a call's name and
    its arguments, each call has the opening, and nothing closes it.
    """

    opening: str
    lead: str = ""
    between: str = ""
    closing: str = ""
    first: bool = False
    arguments: str = ""


HERMES = Marks("<tool_call>", closing="</tool_call>")
MISTRAL = Marks("[TOOL_CALLS]", lead="[", between=",", closing="]")
MISTRAL_ARGS = Marks("[TOOL_CALLS]", arguments="[ARGS]")
LLAMA3 = Marks("<|python_tag|>", between=";", first=True)

State = Literal["start", "seek", "lead", "call", "tail", "plain"]


class JsonCalls:
    """Takes the calls of tools called `names` out of a text in pieces; what is no call flows on.

    Text that looks like the beginning of a call is held until that is known, or it is too long for one. White
    space next to a call is not content. A call that breaks after its arguments have begun stays incomplete,
    and the rest is content.
    """

    def __init__(self, marks: Marks, names: Collection[str], calls: Calls) -> None:
        self._marks = marks
        self._names = names
        self._calls = calls
        self._state: State = "start" if marks.first else "seek"
        self._rest = ""
        self._white: list[str] = []
        """At the end of what is shown."""
        self._raw: list[str] = []
        """Since the opening of what may be a call: so many characters."""
        self._held = 0
        self._reader: CallReader | ArgumentsReader = CallReader(names)
        self._shown: list[str] = []
        self._steps: dict[State, Callable[[], bool]] = {
            "start": self._start, "seek": self._seek, "lead": self._lead, "call": self._call,
            "tail": self._tail, "plain": self._plain,
        }  # fmt: skip

    def feed(self, text: str) -> str:
        """Take text; the content that is certain now."""
        self._rest += text
        while self._rest and self._steps[self._state]():
            pass
        return self._take()

    def finish(self) -> str:
        """The content that was held, at the end of the text."""
        raw = self._take_raw()
        only_between = raw.strip(_WHITE) == self._marks.between
        if self._state in ("lead", "call") and not self._calls.open and not only_between:
            self._show(raw)
        if self._state in ("start", "seek", "lead", "plain"):
            self._show(self._rest)
        if not self._calls.any:
            self._shown += self._white
        return self._take()

    @property
    def place(self) -> Incomplete | None:
        """Where the open call stands; None if there is none."""
        inner = self._reader.place if self._calls.open else None
        return None if inner is None else Incomplete(f"{self._calls.pointer}{inner.pointer}", inner.inside)

    def _take(self) -> str:
        text = "".join(self._shown)
        self._shown.clear()
        return text

    def _show(self, text: str) -> None:
        """Content; white space at its end is held, as a call may follow."""
        stripped = text.rstrip(_WHITE)
        if stripped:
            self._shown += [*self._white, stripped]
            self._white.clear()
        if white := text[len(stripped) :]:
            self._white.append(white)

    def _eat(self, count: int) -> None:
        """So much of the rest belongs to what may be a call."""
        self._raw.append(self._rest[:count])
        self._held += count
        self._rest = self._rest[count:]

    def _take_raw(self) -> str:
        raw = "".join(self._raw)
        self._raw.clear()
        self._held = 0
        return raw

    def _eat_white(self) -> bool:
        """Eat white space; whether something stands behind it."""
        self._eat(len(self._rest) - len(self._rest.lstrip(_WHITE)))
        return bool(self._rest)

    def _begins(self, mark: str) -> bool | None:
        """Whether the rest begins with `mark`; None if that cannot be known yet."""
        if self._rest.startswith(mark):
            return True
        return None if mark.startswith(self._rest) else False

    def _start(self) -> bool:
        stripped = self._rest.lstrip(_WHITE)
        self._white.append(self._rest[: len(self._rest) - len(stripped)])
        self._rest = stripped
        opened = self._begins(self._marks.opening)
        if not stripped or opened is None:
            return False
        self._state = "lead" if opened or stripped[0] == "{" else "plain"
        if opened:
            self._eat(len(self._marks.opening))
        return True

    def _seek(self) -> bool:
        opening = self._marks.opening
        found = self._rest.find(opening)
        if found < 0:
            keep = held(self._rest, opening)
            self._show(self._rest[: len(self._rest) - keep])
            self._rest = self._rest[len(self._rest) - keep :]
            return False
        self._show(self._rest[:found])
        self._rest = self._rest[found:]
        self._take_raw()
        self._eat(len(opening))
        self._state = "lead"
        return True

    def _lead(self) -> bool:
        more = self._eat_white()
        if self._held > MAX_HEAD:
            return self._fail()
        if not more:
            return False
        if self._marks.arguments:
            return self._name()
        lead = self._marks.lead
        if lead and "".join(self._raw).rstrip(_WHITE) == self._marks.opening:
            if self._rest[0] != lead:
                return self._fail()
            self._eat(1)
            return True
        if self._rest[0] != "{":
            return self._fail()
        self._reader, self._state = CallReader(self._names), "call"
        return True

    def _name(self) -> bool:
        """A call's name, and the mark before its arguments."""
        found = _NAME.match(self._rest)
        name, mark = found[0] if found else "", self._marks.arguments
        behind = self._rest[len(name) :]
        if mark.startswith(behind) and behind != mark:
            return False
        arguments = behind[len(mark) :].lstrip(_WHITE) if behind.startswith(mark) else "-"
        if len(self._rest) - len(arguments) > MAX_HEAD:
            return self._fail()
        if not arguments:
            return False
        if name not in self._names or arguments[0] != "{":
            return self._fail()
        self._eat(len(self._rest) - len(arguments))
        self._reader, self._state = ArgumentsReader(name), "call"
        return True

    def _call(self) -> bool:
        reader, calls = self._reader, self._calls
        count = reader.feed(self._rest)
        if calls.open:
            self._rest = self._rest[count:]
        else:
            self._eat(count)
        if reader.begun and not calls.open:
            calls.begin(reader.name)
            self._take_raw()
            self._white.clear()
        if calls.open:
            calls.add(reader.take())
        if reader.failed:
            if not calls.open:
                return self._fail()
            calls.open, self._state = False, self._after
        elif reader.complete:
            calls.end()
            self._state = "tail"
        return True

    def _tail(self) -> bool:
        if not self._eat_white():
            return False
        marks = self._marks
        if marks.between and self._rest[0] == marks.between:
            self._eat(1)
            self._state = "lead"
            return True
        if marks.first and self._rest[0] == "{":
            self._state = "lead"
            return True
        closed = self._begins(marks.closing) if marks.closing else False
        if closed is None:
            return False
        raw = self._take_raw()
        if closed:
            self._rest = self._rest[len(marks.closing) :]
        self._white, self._state = [] if closed else [raw], self._after
        return True

    def _plain(self) -> bool:
        self._show(self._rest)
        self._rest = ""
        return False

    @property
    def _after(self) -> State:
        """What comes when there is no further call here."""
        return "plain" if self._marks.first else "seek"

    def _fail(self) -> bool:
        """It was no call: its first mark is content, and what follows is looked at again."""
        raw, self._state = self._take_raw() + self._rest, self._after
        opening = self._marks.opening
        mark = len(opening) if raw.startswith(opening) else 0
        self._show(raw[:mark])
        self._rest = raw[mark:]
        return True
