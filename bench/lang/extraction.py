"""JSON extraction: what a text is about, as a pydantic model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from bench.lang.data import gsm8k
from sapwood import State, function, gen

COUNT = 16


class Facts(BaseModel):
    """What is asked of a text."""

    people: list[Annotated[str, Field(max_length=24)]] = Field(max_length=4)
    numbers: list[int] = Field(max_length=8)
    asks_for: str = Field(max_length=60)


@function
def program(s: State, text: str) -> None:
    s += INSTRUCTIONS
    s += "Text: " + text + "\nJSON: "
    s += gen("facts", max_tokens=256, temperature=0, json_schema=Facts)


INSTRUCTIONS = """Read the text and write down as JSON which people it names, which numbers it has,
and what it asks for.

Text: Anna buys 3 apples for $2 each. How much does she pay?
JSON: {"people": ["Anna"], "numbers": [3, 2], "asks_for": "the price"}

"""


def arguments(data: Path, count: int = COUNT) -> list[dict[str, Any]]:
    return [{"text": row["question"]} for row in gsm8k(data)[:count]]


def right(data: Path, states: list[State]) -> str:
    return f"{sum(isinstance(s['facts'], Facts) for s in states)} of {len(states)} are whole"
