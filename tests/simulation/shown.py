"""Messages for a person to read: numbers instead of bytes, and no field that has its default."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from sapwood.srt import messages


def shown(value: Any) -> str:
    """A message, or any part of one."""
    if isinstance(value, bytes):
        return str(messages.unpack(value).tolist()) if len(value) % 4 == 0 else value.hex()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if not isinstance(value, msgspec.Struct):
        return f"{value:g}" if isinstance(value, float) else str(value)
    fields = ((name, getattr(value, name), default) for name, default in _fields(type(value)))
    parts = [f"{name}={part(name, held)}" for name, held, default in fields if held != default]
    return f"{type(value).__name__}({', '.join(parts)})"


def part(name: str, value: Any) -> str:
    """The field `name` of a message."""
    if name == "keys" and isinstance(value, bytes):
        return str(np.frombuffer(value, "<i8").tolist())
    if name == "keys" or (name in ("key", "grammar") and isinstance(value, bytes)):
        return str(value)
    return value.hex() if name == "pooled" else shown(value)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Names and defaults."""
    return [
        (field.name, field.default_factory() if callable(field.default_factory) else field.default)
        for field in msgspec.structs.fields(kind)
    ]
