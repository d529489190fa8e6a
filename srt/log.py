"""Logging: one line an event, with the process's name, for people or as a JSON object for programs."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

LIBRARIES = ("uvicorn", "asyncio")
_FIELDS = "sapwood_fields"


def set_up(role: str, level: str, form: Literal["text", "json"] = "text") -> logging.Logger:
    """The logger of this process; lines go to stderr, and so do the warnings of what runs its loop."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(role) if form == "json" else _TextLines(role))
    logger = logging.getLogger("sapwood")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    for name in LIBRARIES:
        logging.getLogger(name).handlers[:] = [handler]
        logging.getLogger(name).propagate = False
    return logger


def event(logger: logging.Logger, message: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Log a message with named values: `name=value` after it in text, keys of the object in JSON.

    Values are JSON values; those that are None are left out.
    """
    if logger.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, message, extra={_FIELDS: given})


class _TextLines(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s {role:<10} %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _one_line(super().formatMessage(record))
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in fields.items())])


class _JsonLines(logging.Formatter):
    """`ts` is Unix time in seconds; a traceback is in `exception`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 3),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "role": self._role,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _one_line(text: str) -> str:
    """What a client has sent must not forge a line of its own."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isprintable() and " " not in text and '"' not in text and text != ""
    return text if plain or not isinstance(value, str) else json.dumps(text)
