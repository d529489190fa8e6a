"""Self-consistency: eight samples of a worked answer, of which the most frequent number counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lang.data import final_number, gsm8k, gsm8k_examples
from sapwood import State, function, gen

COUNT = 6
SAMPLES = 8


@function
def program(s: State, examples: str, question: str) -> None:
    s += examples
    s += "Question: " + question + "\nAnswer:"
    s += gen("answers", n=SAMPLES, max_tokens=64, stop=["Question", "\n\n"], temperature=0.7, seed=1)
    numbers = [final_number(answer) for answer in s["answers"]]
    s["answer"] = max(numbers, key=numbers.count)


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    examples = gsm8k_examples(data, 4)
    return [{"examples": examples, "question": row["question"]} for row in gsm8k(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    rows = gsm8k(data)
    found = sum(s["answer"] == row["final"] for s, row in zip(states, rows, strict=False))
    return f"{found} of {len(states)} answers right"
