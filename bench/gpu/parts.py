"""The parts of the bench in the order of their worth, and how long each may take; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """`limit`: seconds after which it is ended. `least`: with less left it is not begun."""

    name: str
    limit: float
    least: float = 5.0


PARTS = (
    Part("found", 45),
    Part("kernels", 110),
    Part("rates", 30),
    Part("model", 70, 15),
    Part("decode", 60, 10),
    Part("prefill", 40),
    Part("first_token", 30),
    Part("switches", 40),
    Part("gaps", 30),
    Part("cascade", 30),
    Part("baseline", 40),
    Part("tests", 120, 10),
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


def limit_of(name: str) -> float:
    return next(part.limit for part in PARTS if part.name == name)


def least_of(name: str) -> float:
    return next(part.least for part in PARTS if part.name == name)
