"""Which line of a program something comes from, for the notes of its errors."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_OURS = str(Path(__file__).parent) + "/"


class Where(NamedTuple):
    """A line of source."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}: {text}" if text else f"{self.file}:{self.line}"


def here() -> Where:
    """The line that called into the language: the innermost one outside of this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return Where(frame.f_code.co_filename, frame.f_lineno)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)


def as_one(errors: Iterable[BaseException]) -> BaseException | None:
    """The first of them; the others are told in notes of it, once."""
    every = list({id(error): error for error in errors}.values())
    if not every:
        return None
    first, *others = every
    notes = Counter(f"another branch failed too: {type(other).__name__}: {other}" for other in others)
    for text in (notes - Counter(getattr(first, "__notes__", ()))).elements():
        first.add_note(text)
    return first


def note(error: BaseException, where: Where, branch: str) -> None:
    """Say in an error which line had added what failed, and in which branch; the first to say so is right."""
    start = "added to the program by "
    if not any(line.startswith(start) for line in getattr(error, "__notes__", ())):
        error.add_note(f"{start}{where}" + (f" ({branch})" if branch else ""))
