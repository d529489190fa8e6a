"""Skeleton of thought (arXiv 2307.15337): a list of points, then all of them written out side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.lang.data import mt_bench
from sapwood import State, assistant, function, gen, system, user

COUNT = 8
POINTS = 4


@function
def program(s: State, question: str) -> None:
    s += system("You are a helpful writer.")
    s += user(f"{question}\nFirst list {POINTS} points that your answer will make, numbered, one a line.")
    s += assistant(gen("skeleton", max_tokens=96, temperature=0))
    points = re.findall(r"^\s*\d+[.)]\s*(.+)$", s["skeleton"], re.MULTILINE)[:POINTS] or [s["skeleton"]]
    branches = s.fork(len(points))
    for branch, point in zip(branches, points, strict=True):
        branch += user(f"Write one or two sentences about this point: {point}")
        branch += assistant(gen("text", max_tokens=64, temperature=0))
    s["answer"] = "\n".join(branch["text"] for branch in branches)


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"question": row["turns"][0]} for row in mt_bench(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    return f"{sum(len(s['answer'].split()) for s in states)} words"
