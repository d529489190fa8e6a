"""The data of the programs: folders `gsm8k` and `mt_bench` of JSON lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.quality_data import read_rows

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def gsm8k(data: Path) -> list[dict[str, Any]]:
    """Questions, worked answers, and `final` numbers."""
    return read_rows(data / "gsm8k" / "test_200.jsonl")


def gsm8k_examples(data: Path, count: int = 8) -> str:
    """Worked examples as one text."""
    rows = read_rows(data / "gsm8k" / "train_first8_for_fewshot.jsonl")[:count]
    return "".join(f"Question: {row['question']}\nAnswer: {_plain(row['answer'])}\n\n" for row in rows)


def mt_bench(data: Path) -> list[dict[str, Any]]:
    """Questions of two `turns`."""
    return read_rows(data / "mt_bench" / "questions_80.jsonl")


def essays(data: Path) -> list[str]:
    """Texts of some paragraphs: questions and worked answers, three at a time."""
    rows = [f"{row['question']} {_plain(row['answer'])}" for row in gsm8k(data)]
    return ["\n\n".join(rows[at : at + 3]) for at in range(0, len(rows), 3)]


def final_number(text: str) -> str:
    """The last number of a text, as the answers have it; "" if there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else ""


def _plain(answer: str) -> str:
    """Without the marks of its sums."""
    return re.sub(r"<<[^>]*>>", "", answer).replace("####", "The final answer is")
