"""Errors of the language."""

from __future__ import annotations


class LangError(Exception):
    """A program cannot be run as it is written, or could not be run to its end.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "Hello" + sgl.user_end()
    >>> try:
    ...     program.run(backend=sgl.Echo())
    ... except sgl.LangError as error:
    ...     print(error)
    a message of user ends, but no message is open
    """


class Unsupported(LangError, NotImplementedError):
    """The backend cannot do what a program asks; `field` is what. Nothing was sent.

    >>> raise Unsupported("images are not supported", "image")
    Traceback (most recent call last):
    ...
    sapwood.lang.errors.Unsupported: images are not supported
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestFailed(LangError):
    """The server answered with an error, or not at all (`status` 0).

    >>> RequestFailed("the server is draining", 503, "unavailable").status
    503
    """

    def __init__(self, message: str, status: int = 0, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
