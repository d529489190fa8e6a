"""A judge: an essay is looked at in five dimensions side by side, each with a verdict in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from bench.lang.data import essays
from sapwood import State, assistant, function, gen, system, user

COUNT = 6
DIMENSIONS = {
    "clarity": "how clearly it is written",
    "originality": "how new its thoughts are",
    "evidence": "how well it supports what it claims",
    "structure": "how well its parts follow from each other",
    "grammar": "how correct its language is",
}


class Verdict(TypedDict):
    reason: Annotated[str, Meta(max_length=120)]
    score: Annotated[int, Meta(ge=1, le=10)]


@function
def program(s: State, essay: str) -> None:
    s += system("You judge essays.")
    s += user("Read this essay:\n\n" + essay)
    branches = s.fork(len(DIMENSIONS))
    for branch, (name, meaning) in zip(branches, DIMENSIONS.items(), strict=True):
        branch += user(f"Judge its {name}, {meaning}: in JSON, a short reason and a score from 1 to 10.")
        branch += assistant(gen("verdict", max_tokens=96, temperature=0, json_schema=Verdict))
    verdicts = [branch["verdict"] for branch in branches]
    s["scores"] = {name: verdict["score"] for name, verdict in zip(DIMENSIONS, verdicts, strict=True)}


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"essay": essay} for essay in essays(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    scores = [score for s in states for score in s["scores"].values()]
    return f"{len(scores)} verdicts, mean score {sum(scores) / len(scores):.1f}"
