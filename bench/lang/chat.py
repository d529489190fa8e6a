"""A chat of several turns: each turn finds all the turns before it in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lang.data import mt_bench
from sapwood import State, assistant, function, gen, system, user

COUNT = 8


@function
def program(s: State, turns: list[str]) -> None:
    s += system("You are a helpful assistant.")
    for number, turn in enumerate(turns):
        s += user(turn)
        s += assistant(gen(f"answer {number}", max_tokens=80, temperature=0))
    s += user("Thank you. Now say in one sentence what we have talked about.")
    s += assistant(gen("summary", max_tokens=48, temperature=0))


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"turns": row["turns"]} for row in mt_bench(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    return f"{sum(len(s['summary'].split()) for s in states)} words of summaries"
