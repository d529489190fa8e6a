"""The backend that programs run on if they are not told another."""

from __future__ import annotations

from typing import Any

from sapwood.lang.backend import Backend
from sapwood.lang.errors import LangError
from sapwood.lang.loop import background
from sapwood.lang.trace import refuse


class _Default:
    backend: Any = None


_default = _Default()


def set_default_backend(backend: Any) -> None:
    """Run programs on `backend` from now on, in this process: a RuntimeEndpoint, Runtime, Engine, OpenAI,
    Echo or anything else that is a backend; None: on none.

    >>> import sapwood as sgl
    >>> sgl.set_default_backend(sgl.Echo(["hello"]))
    >>> sgl.function(lambda s: s.__iadd__(sgl.gen("a"))["a"]).run().ret_value
    'hello'
    >>> sgl.set_default_backend(None)
    """
    _default.backend = None if backend is None else backend_of(backend)


def get_default_backend() -> Backend | None:
    """The backend that was set, if one was.

    >>> import sapwood as sgl
    >>> sgl.get_default_backend() is None
    True
    """
    found: Backend | None = _default.backend
    return found


def backend_of(backend: Any = None) -> Backend:
    """The backend that something is or has; the default one for None. Raises LangError if there is none."""
    from sapwood.lang.backends import native
    from sapwood.lang.trace import refuse

    refuse()  # a program that is traced sends nothing
    if backend is None:
        backend = _default.backend
    if backend is None:
        raise LangError("no backend: call set_default_backend(...) or give backend=...")
    return native.of(backend)


def flush_cache(backend: Any = None) -> None:
    """Have the backend forget every cached prefix that nothing uses.

    >>> import sapwood as sgl
    >>> sgl.flush_cache(sgl.Echo())
    """
    refuse()
    background().wait(backend_of(backend).flush_cache())


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend says of itself.

    >>> import sapwood as sgl
    >>> sgl.get_server_info(sgl.Echo())
    {'backend': 'echo'}
    """
    refuse()
    return background().wait(backend_of(backend).server_info())
