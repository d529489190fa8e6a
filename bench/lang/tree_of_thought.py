"""A tree of thought: three plans, three ways to carry each out, three reviews of each; the best is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lang.data import final_number, gsm8k
from sapwood import State, function, gen, select

COUNT = 4
BRANCHES = 3


@function
def program(s: State, question: str) -> None:
    s += "Question: " + question + "\nLet us think of a plan, carry it out, and review the result.\n"
    leaves = []
    plans = s.fork(BRANCHES)
    for number, plan in enumerate(plans):
        plan += f"Plan {number + 1}:"
        plan += gen("plan", max_tokens=32, temperature=0.7, seed=number, stop="\n")
        solutions = plan.fork(BRANCHES)
        for way, solution in enumerate(solutions):
            solution += f"\nSolution {way + 1}:"
            solution += gen("solution", max_tokens=48, temperature=0.7, seed=way, stop="\n\n")
            reviews = solution.fork(BRANCHES)
            for critic, review in enumerate(reviews):
                review += f"\nReviewer {critic + 1}: The final number is"
                review += gen("number", max_tokens=8, temperature=0, stop="\n")
                review += "\nIs this right?"
                review += select("verdict", choices=[" Yes", " No"])
                leaves.append(review)
    votes = [leaf["number"] for leaf in leaves if leaf["verdict"] == " Yes"]
    votes = votes or [leaf["number"] for leaf in leaves]
    s["answer"] = max(votes, key=votes.count)


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"question": row["question"]} for row in gsm8k(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    rows = gsm8k(data)
    found = sum(final_number(s["answer"]) == row["final"] for s, row in zip(states, rows, strict=False))
    return f"{found} of {len(states)} answers right"
