"""Strings as terminals: literals whose values have the length, patterns and formats that are asked for."""

from __future__ import annotations

import json

from sapwood.srt.grammar.form import String
from sapwood.srt.grammar.formats import FORMATS
from sapwood.srt.grammar.json_text import bounded, found, literal, spelled
from sapwood.srt.grammar.language import NOTHING_TEXT


def terminal(shape: String) -> str | None:
    """A Lark terminal (with json_text.PRELUDE) of the literals of a shape's strings; None without any values.

    Whether there are any with its patterns is the engine's to say (`Engine.admits`). Raises ValueError with
    the reason if a pattern cannot be enforced.
    """
    if shape.values is not None:
        return " | ".join(json.dumps(text) for value in shape.values for text in literals(value)) or None
    if shape.high is not None and shape.low > shape.high:
        return None
    wanted = [found(pattern) for pattern in (*shape.patterns, *(FORMATS[name] for name in shape.formats))]
    if shape.low or shape.high is not None or not wanted:
        wanted.append(bounded(shape.low, shape.high))
    unwanted = [found(pattern) for pattern in shape.unlike]
    if shape.excluded:
        unwanted.append(spelled(*sorted(shape.excluded)))
    parts = wanted + [f"~({pattern})" for pattern in unwanted]
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


def may_be_empty(shape: String, body: str) -> bool:
    """Whether it takes the engine to say if there is a string of a shape, whose terminal is `body`."""
    bound = bool(shape.low or shape.high is not None)
    parts = len(shape.patterns) + len(shape.formats) + len(shape.unlike)
    return parts > 0 and (parts + bound + bool(shape.excluded) > 1 or NOTHING_TEXT in body)


def literals(value: str) -> list[str]:
    """How a given string is written: its own literal, or, if that is another one, the one all in ASCII."""
    return list(dict.fromkeys((literal(value), json.dumps(value))))
