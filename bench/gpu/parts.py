"""The parts of the bench in the order of their worth, and how long each may take; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REASON = 1000
"""Characters of a reason: a compiler's may have a hundred thousand."""


@dataclass(frozen=True, slots=True)
class Part:
    """`limit`: seconds after which it is ended. `least`: with less left it is not begun. `spare`: what it
    leaves of the time for those after it, though it may always have 30 s."""

    name: str
    limit: float
    least: float = 5.0
    spare: float = 0.0


PARTS = (
    Part("found", 45),
    Part("kernels", 110),
    Part("rates", 30),
    Part("model", 120, 15),
    Part("decode", 60, 10),
    Part("prefill", 40),
    Part("first_token", 30),
    Part("switches", 40),
    Part("gaps", 30),
    Part("cascade", 30),
    Part("baseline", 40),
    Part("tests", 120, 10, spare=60),
    Part("fp8", 100, 20),
    Part("deterministic", 70, 20),
)
NAMES = tuple(part.name for part in PARTS)
BACKEND = ("kernels", "model")
"""What must go well with FlashInfer; else plain torch is what is measured."""
MODEL_LESS = ("found", "kernels", "rates", "tests")
"""What can be had where no model runs."""
RAN = "steps without graphs"
"""The row of the part `model` that says that these run."""
ATTENTION, OPS, FA3, CASCADE = "attention", "the layer's operations", "FlashAttention 3", "cascades"
SINGLE = "decode of a query head a KV head"
"""What of FlashInfer a kernel is for. Without ATTENTION plain torch is what is left, the others are done
without; SINGLE only the tests have."""


def limit_of(name: str, given: Mapping[str, float] | None = None) -> float:
    """`given`: other limits than those above."""
    return (given or {}).get(name) or _of(name).limit


def limits_of(options: Sequence[str]) -> dict[str, float]:
    """Of `NAME=SECONDS` each. Raises ValueError."""
    pairs = [option.partition("=") for option in options]
    for name, _, _seconds in pairs:
        if name not in NAMES:
            raise ValueError(f"{name}: parts are {', '.join(NAMES)}")
    return {name: float(seconds) for name, _, seconds in pairs}


def least_of(name: str) -> float:
    return _of(name).least


def time_for(name: str, left: float, after: Sequence[str], given: Mapping[str, float]) -> float:
    """The seconds that a part has, of those that are `left` for it and the parts after it."""
    spare = _of(name).spare if after else 0.0
    return min(limit_of(name, given), max(left - spare, min(left, 30.0)))


def needed(asked: Sequence[str]) -> list[str]:
    """The parts that were asked for, and those that must come before: in their order."""
    before = {"found"}
    if set(asked) - {"found", "rates"}:
        before.add("kernels")
    if set(asked) - set(MODEL_LESS):
        before.add("rates")
    return [name for name in NAMES if name in {*before, *asked}]


def short(text: str) -> str:
    """What there is room for of a reason: its first line, and the last ones that speak of an error."""
    first, *others = [line.strip() for line in text.replace("\0", "").splitlines() if line.strip()] or [""]
    if len(text) <= REASON:
        return " | ".join([first, *others])
    lines = [first, *[line for line in others if "error" in line.lower()][-3:]]
    return " | ".join(line[: REASON // len(lines) - 3] for line in lines)


def _of(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)
