"""How much a constraint may ask for: its size, and the work of reading it."""

from __future__ import annotations

MAX_TEXT = 64 * 1024
"""Bytes of a constraint's text."""
MAX_DEPTH = 64
"""Arrays and objects within each other, in a schema's text."""
MAX_REPEAT = 10_000
"""Times that a counted repeat asks for the same."""
MAX_SHORTEST = 65_536
"""Characters of the shortest text of a pattern. What of it is forced is walked through for one mask: so many
take 50 ms."""
MAX_CHOICES = 4096
"""Texts of which the output is one."""
MAX_EBNF_RULES = 500
MAX_ENUM = 4096
"""Values in all the enums of a schema together."""
MAX_ALTERNATIVES = 256
"""Shapes of one place in a schema."""
MAX_ITEMS = 1_000_000
"""Items of an array and characters of a string that are counted."""
MAX_UNIQUE = 32
"""Values of which no two may be equal in an array."""
MAX_STEPS = 25_000
"""Shapes compared, and properties in them, while a schema is read."""
MAX_RULES = 4096
"""Places, and combinations of places, that a schema leads to."""
MAX_DIGITS = 400
"""Digits before and behind the point of a number in a schema."""


class Inexact(Exception):
    """What is asked for cannot be enforced to the letter; `keyword` is the one at fault, if one is known."""

    def __init__(self, reason: str, keyword: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.keyword = keyword


class TooMuch(Exception):
    """Reading the constraint takes more than the limit; the message names it."""


class Budget:
    """Counts the steps of reading one schema. Raises TooMuch beyond the limit."""

    def __init__(self, limit: int = MAX_STEPS) -> None:
        self.limit = limit
        self.left = limit

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuch(f"reading the schema takes more than {self.limit} steps")
