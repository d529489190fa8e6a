"""The engine's process with bombs, whose forks keep their priority: those of a low one hardly get on where
all cores are busy, and die slowly there.
"""

from __future__ import annotations

import sys

import child_with_bombs

from sapwood.srt import bounded_child
from sapwood.srt.grammar import child, compile


def keep(pid: int) -> None:
    pass


if __name__ == "__main__":
    compile.compile_constraint = child_with_bombs.compile_constraint
    child.lower = keep
    bounded_child.main(int(sys.argv[1]), child._serve)
