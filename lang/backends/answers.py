"""Answers and errors of runtimes: whatever comes, a program sees a RequestFailed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from sapwood.lang.errors import LangError, RequestFailed

_SHOWN = 200
"""Characters of an answer that an error shows."""

_MISREAD = (LookupError, TypeError, ValueError, AttributeError, msgspec.ValidationError)


@contextlib.contextmanager
def reading(route: str, answer: Any) -> Iterator[None]:
    """Around what reads an answer of `route`: one that is not what the route answers is a RequestFailed."""
    try:
        yield
    except _MISREAD as e:
        raise RequestFailed(f"{route} has answered something else than expected: {answer!r:.{_SHOWN}}") from e


class Asking:
    """Around what asks a door: an error with a `status`, as a runtime's own ones have, becomes a
    RequestFailed, of which it is the cause."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status, code = getattr(error, "status", None), getattr(error, "code", None)
        if isinstance(error, Exception) and not isinstance(error, LangError) and isinstance(status, int):
            raise RequestFailed(str(error), status, str(code or ""), getattr(error, "param", None)) from error
