"""Few-shot question answering: GSM8K after eight worked examples, which all questions share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lang.data import final_number, gsm8k, gsm8k_examples
from sapwood import State, function, gen

COUNT = 24


@function
def program(s: State, examples: str, question: str) -> None:
    s += examples
    s += "Question: " + question + "\nAnswer:"
    s += gen("answer", max_tokens=96, stop=["Question", "\n\n"], temperature=0)


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    examples = gsm8k_examples(data)
    return [{"examples": examples, "question": row["question"]} for row in gsm8k(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    """How many final numbers are right."""
    rows = gsm8k(data)
    found = sum(final_number(s["answer"]) == row["final"] for s, row in zip(states, rows, strict=False))
    return f"{found} of {len(states)} answers right"
