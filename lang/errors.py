"""Errors of the language."""

from __future__ import annotations


class LangError(Exception):
    """A program cannot be run as it is written, or could not be run to its end."""


class Unsupported(LangError, NotImplementedError):
    """The backend cannot do what a program asks; `field` is what. Nothing was sent."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestFailed(LangError):
    """The server answered with an error, or not at all (`status` 0)."""

    def __init__(self, message: str, status: int = 0, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
