"""Logging: one line an event, with the process's name."""

from __future__ import annotations

import logging
import sys


def set_up(role: str, level: str) -> logging.Logger:
    """The logger of this process; lines go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role:<10} %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("sapwood")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger
