"""The grammar process over an engine with bombs."""

from __future__ import annotations

from sapwood.srt.grammar import compiler, process
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    compiler.CHILD = "child_with_bombs"
    process.main(boot, lifeline)
