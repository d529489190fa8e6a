"""What a chat reads and writes: a terminal, with colours and a history of lines, or pipes."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sapwood.srt.loader.packaged import cache_folder

HISTORY_LINES = 1000
BLOCK = '"""'


class Screen(Protocol):
    """Where a conversation takes place."""

    interactive: bool

    def hello(self, model: str) -> None:
        """The beginning: who answers."""

    def read(self) -> str | None:
        """The next message or command, never an empty one; None at the end."""

    def write(self, text: str) -> None:
        """A piece of an answer."""

    def end(self, why: str) -> None:
        """The end of an answer; `why` if it was cut short."""

    def note(self, text: str) -> None:
        """What is not the model's."""

    def error(self, text: str) -> None:
        """What went wrong."""


def open_screen() -> Screen:
    """The terminal if there is one at both ends, else the pipes; those too where rich is not installed."""
    if sys.stdin.isatty() and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return _Terminal()
    return _Pipes()


class _Pipes:
    """Each line is a turn. Answers go to standard output, the rest to standard error."""

    interactive = False

    def hello(self, model: str) -> None:
        self.note(model)

    def read(self) -> str | None:
        return read_message(lambda _more: sys.stdin.readline() or None)

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def end(self, why: str) -> None:
        print(flush=True)
        if why:
            self.note(why)

    def note(self, text: str) -> None:
        if text:
            print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)


class _Terminal:
    """A prompt with editing and history; notes are dim, errors red. NO_COLOR is respected."""

    interactive = True

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._readline = _open_history()

    def hello(self, model: str) -> None:
        self._console.print(f"{model} · /help for help, Ctrl-D to leave", style="dim")

    def read(self) -> str | None:
        while True:
            try:
                return read_message(self._line)
            except KeyboardInterrupt:
                self._console.print("\n(Ctrl-D or /quit to leave)", style="dim")

    def write(self, text: str) -> None:
        self._console.print(printable(text), end="")
        self._console.file.flush()

    def end(self, why: str) -> None:
        self._console.print(f" [{why}]" if why else "", style="dim")

    def note(self, text: str) -> None:
        if text:
            self._console.print(text, style="dim")

    def error(self, text: str) -> None:
        self._console.print(text, style="red")

    def _line(self, more: bool) -> str | None:
        mark = "… " if more else "> "
        if self._readline and self._console.color_system:
            # The marks tell readline that the colours take no room.
            mark = f"\001\033[1;36m\002{mark}\001\033[0m\002"
        try:
            return input(mark) + "\n"
        except EOFError:
            self._console.print()
            return None


def printable(text: str) -> str:
    """A text without control characters: what a model says must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def read_message(line: Callable[[bool], str | None]) -> str | None:
    """One message of `line(more)`, which gives a line with its end, or None at the end.

    A line that ends in a backslash goes on; after a line of three quotes all is taken up to the next of them.
    """
    while (first := line(False)) is not None:
        text = first.rstrip("\n")
        if text.strip() == BLOCK:
            text = _block(line)
        while text.endswith("\\") and (more := line(True)) is not None:
            text = text[:-1] + "\n" + more.rstrip("\n")
        if text.strip():
            return text.strip()
    return None


def _block(line: Callable[[bool], str | None]) -> str:
    lines: list[str] = []
    while (more := line(True)) is not None and more.strip() != BLOCK:
        lines.append(more)
    return "".join(lines)


def _open_history(path: Path | None = None) -> Any | None:
    """The readline module with the lines of earlier chats, which are written at exit; None without it."""
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:
        return None
    path = path or cache_folder() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    atexit.register(_write_history, readline, path)
    return readline


def _write_history(readline: Any, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.write_history_file(path)
