"""Reasoning in an output: what stands between <think> and </think>, at its beginning."""

from __future__ import annotations

from typing import Literal

from sapwood.srt.tokenizer.parsers.calls import held

OPENING, CLOSING = "<think>", "</think>"

State = Literal["start", "within", "closed", "content"]


def state_of_prompt(tail: str) -> Literal["open", "closed", "none"]:
    """What a prompt that ends so has done with the reasoning: begun it, ended it, or nothing."""
    stripped = tail.rstrip()
    if stripped.endswith(OPENING):
        return "open"
    return "closed" if stripped.endswith(CLOSING) else "none"


class Reasoning:
    """Takes the reasoning out of a text in pieces. Line ends next to its marks belong to neither part."""

    def __init__(self, opened: bool) -> None:
        self._state: State = "within" if opened else "start"
        self._rest = ""
        self._begun = False

    def feed(self, text: str) -> tuple[str, str]:
        """Take text; the reasoning and the content that are certain now."""
        if self._state == "content":
            return "", text
        self._rest += text
        if self._state == "start":
            self._start()
        reasoning = self._within() if self._state == "within" else ""
        if self._state == "closed" and (rest := self._rest.lstrip("\n")):
            self._rest, self._state = rest, "content"
        content = ""
        if self._state == "content":
            content, self._rest = self._rest, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held, at the end of the text."""
        rest, self._rest = self._rest, ""
        if self._state == "within":
            return (rest if self._begun else rest.lstrip("\n")), ""
        return "", "" if self._state == "closed" else rest

    def _start(self) -> None:
        stripped = self._rest.lstrip()
        if stripped.startswith(OPENING):
            self._rest, self._state = stripped[len(OPENING) :], "within"
        elif not OPENING.startswith(stripped):
            self._state = "content"

    def _within(self) -> str:
        if not self._begun:
            self._rest = self._rest.lstrip("\n")
            self._begun = bool(self._rest)
        found = self._rest.find(CLOSING)
        if found >= 0:
            reasoning = self._rest[:found].rstrip("\n")
            self._rest, self._state = self._rest[found + len(CLOSING) :], "closed"
            return reasoning
        keep = _line_ends(self._rest)
        reasoning, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        return reasoning


def _line_ends(text: str) -> int:
    """How many characters at the end may be line ends before </think>, and its beginning."""
    mark = held(text, CLOSING)
    before = text[: len(text) - mark]
    return mark + len(before) - len(before.rstrip("\n"))
