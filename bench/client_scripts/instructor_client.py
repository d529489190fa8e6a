"""instructor: pydantic models out of tool calls, JSON mode and JSON schemas.

python instructor_client.py URL/v1 MODEL KEY
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

url, model, key = sys.argv[1:]


class Weather(StrEnum):
    SUN = "sun"
    RAIN = "rain"


class Place(BaseModel):
    """A place and how it is there."""

    # A weak model would add properties for ever.
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    country: str = Field(max_length=24)
    weather: Weather
    degrees: int = Field(ge=-50, le=50)


class Order(BaseModel):
    """What is to be bought."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["tea", "coffee"]
    cups: int = Field(ge=1, le=12)
    extras: list[Literal["milk", "sugar", "lemon"]] = Field(max_length=2)
    place: Place


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
ASKED = ("It is warm in Paris.", "Two cups with milk, please, at the harbour of Oslo.", "Rain again in Cork!")
made = 0
for mode in MODES:
    client = instructor.from_openai(OpenAI(base_url=url, api_key=key, timeout=300), mode=mode)
    for wanted in (Place, Order):
        for text in ASKED:
            answer = client.chat.completions.create(
                model=model,
                response_model=wanted,
                messages=[{"role": "user", "content": text}],
                max_retries=0,
                max_tokens=400,
                temperature=0.7,
                seed=made,
            )
            assert isinstance(answer, wanted), answer
            made += 1
print(f"{made} models in {len(MODES)} modes, none asked for twice")
