"""The engine's process, in which a constraint may say itself how it is bad: {"bad": WHAT, ...}."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sapwood.srt import bounded_child
from sapwood.srt.grammar import child, compile
from sapwood.srt.messages import Grammar
from sapwood.srt.params import Constraint

plain = compile.compile_constraint


def compile_constraint(constraint: Constraint, engine: Any) -> Grammar:
    if constraint.text.startswith('{"bad": "endless"'):
        while True:
            pass
    if constraint.text.startswith('{"bad": "greedy"'):
        held = []
        while True:
            held.append(bytearray(2**20))
    if constraint.text.startswith('{"bad": "crash"'):
        os.kill(os.getpid(), signal.SIGSEGV)
    if constraint.text.startswith('{"bad": "deep"'):
        return compile_constraint(constraint, engine)
    if constraint.text.startswith('{"bad": "long"'):
        return Grammar(b"long", "x" * (child.MAX_GRAMMAR_CHARS + 1))
    if constraint.text.startswith('{"bad": "unforeseen"'):
        raise ZeroDivisionError
    return plain(constraint, engine)


if __name__ == "__main__":
    compile.compile_constraint = compile_constraint
    bounded_child.main(int(sys.argv[1]), child._serve)
