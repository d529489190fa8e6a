"""Multiple choice by `select`: which of four numbers answers a question, after four examples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench.lang.data import gsm8k, gsm8k_examples
from sapwood import State, function, select

COUNT = 100


@function
def program(s: State, examples: str, question: str, options: list[str]) -> None:
    s += examples
    s += "Question: " + question + "\nAnswer: The final answer is "
    s += select("answer", choices=options)


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    examples = gsm8k_examples(data, 4)
    rows = gsm8k(data)[:count]
    return [
        {"examples": examples, "question": row["question"], "options": _options(row["final"], number)}
        for number, row in enumerate(rows)
    ]


def right(data: Path, states: list[State]) -> str:
    """How many choices are right."""
    rows = gsm8k(data)
    found = sum(s["answer"] == row["final"] for s, row in zip(states, rows, strict=False))
    return f"{found} of {len(states)} choices right"


def _options(final: str, seed: int) -> list[str]:
    """The right number among three near it."""
    rng = random.Random(seed)
    value = int(final.replace(",", ""))
    others: set[int] = set()
    while len(others) < 3:
        other = value + rng.choice([-1, 1]) * rng.randint(1, max(3, abs(value) // 2))
        others |= {other} - {value}
    options = [final, *map(str, sorted(others))]
    rng.shuffle(options)
    return options
