"""Prints docs/flags.md: `python -m sapwood.srt.flags > docs/flags.md`."""

from __future__ import annotations

from sapwood.srt.flags.page import markdown

if __name__ == "__main__":
    print(markdown(), end="")
