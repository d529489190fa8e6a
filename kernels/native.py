"""The optional C++ extension: loaded on first use, with one instruction set and thread count a process."""

from __future__ import annotations

import importlib
from typing import Any

from sapwood.kernels.machine import choose_threads

ISAS = ("amx", "avx512", "avx2", "portable")
"""Instruction sets, best first; amx is avx512 with tiles for many rows, and equal to it in every bit."""

_active: Any = None


def load(isa: str = "auto", threads: int | None = None) -> str:
    """Choose what the kernels of this process run with, and return the instruction set's name.

    `isa` is one of `ISAS`, or "auto" for the best that both the build and this CPU have; `threads`
    defaults to what `choose_threads` says. May be called again, but not while a kernel runs. Raises
    RuntimeError when the extension was not built, or when the choice is impossible here.
    """
    global _active
    extension = _import_extension()
    choices = available()
    chosen = choices[0] if isa == "auto" else isa
    if chosen not in choices:
        raise RuntimeError(
            f"the CPU kernels cannot run with instruction set {isa!r}: this build on this CPU has "
            + ", ".join(choices)
        )
    count = choose_threads()[0] if threads is None else threads
    if count < 1:
        raise RuntimeError(f"the CPU kernels need at least 1 thread, got {count}")
    extension.select(chosen, count)
    _active = extension
    return chosen


def available() -> list[str]:
    """The instruction sets that both the build and this CPU have, best first; RuntimeError if not built."""
    usable = _import_extension().usable()
    return [isa for isa in ISAS if isa in usable]


def kernels() -> Any:
    """The extension, ready to be called; its functions take addresses, sizes and floats only."""
    if _active is None:
        load()
    return _active


def _import_extension() -> Any:
    try:
        return importlib.import_module("sapwood.kernels._C")
    except ImportError as e:
        raise RuntimeError(
            f"the C++ kernels of Sapwood were not built ({e}): install a C++17 compiler, such as "
            "g++, then reinstall with `pip install --force-reinstall --no-deps sapwood`, "
            "or in a clone with `pip install -e .`"
        ) from None
