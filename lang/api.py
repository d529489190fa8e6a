"""What a program adds to its state beside plain text and what it asks for (`outputs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sapwood.lang.errors import Unsupported
from sapwood.lang.ir import (
    Concat,
    Constant,
    Expr,
    Generation,
    RoleBegin,
    RoleEnd,
    Tokens,
    parts_of,
)


def special(text: str) -> Expr:
    """Text whose special tokens are meant; in all other text they are plain text.

    >>> import sapwood as sgl
    >>> "a" + sgl.special("<|im_end|>")
    Concat(parts=(Constant(text='a', special=False), Constant(text='<|im_end|>', special=True)))
    """
    return Constant(text, special=True)


def ids(token_ids: Sequence[int]) -> Expr:
    """Token ids, as they are. They show no text.

    >>> import sapwood as sgl
    >>> sgl.ids([1, 2])
    Tokens(ids=(1, 2))
    """
    given = tuple(token_ids)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in given):
        raise TypeError("token ids must be integers of at least 0")
    return Tokens(given)


def _message(role: str, expr: Expr | str | None) -> Expr:
    return Concat((RoleBegin(role), *(parts_of(expr) if expr is not None else ()), RoleEnd(role)))


def system(expr: Expr | str | None = None) -> Expr:
    """A system message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.system("Hello")
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'system', 'content': 'Hello'}]
    """
    return _message("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    """A user's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.user("Hello")
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'user', 'content': 'Hello'}]
    """
    return _message("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    """An assistant's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.assistant("Hello")
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'assistant', 'content': 'Hello'}]
    """
    return _message("assistant", expr)


def system_begin() -> Expr:
    """The beginning of a system message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.system_begin() + "Hello"
    ...     s += sgl.system_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'system', 'content': 'Hello'}]
    """
    return RoleBegin("system")


def system_end() -> Expr:
    """The end of a system message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.system_begin() + "Hello"
    ...     s += sgl.system_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'system', 'content': 'Hello'}]
    """
    return RoleEnd("system")


def user_begin() -> Expr:
    """The beginning of a user's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.user_begin() + "Hello"
    ...     s += sgl.user_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'user', 'content': 'Hello'}]
    """
    return RoleBegin("user")


def user_end() -> Expr:
    """The end of a user's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.user_begin() + "Hello"
    ...     s += sgl.user_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'user', 'content': 'Hello'}]
    """
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """The beginning of an assistant's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.assistant_begin() + "Hello"
    ...     s += sgl.assistant_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'assistant', 'content': 'Hello'}]
    """
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """The end of an assistant's message.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += sgl.assistant_begin() + "Hello"
    ...     s += sgl.assistant_end()
    >>> program.run(backend=sgl.Echo()).messages()
    [{'role': 'assistant', 'content': 'Hello'}]
    """
    return RoleEnd("assistant")


def separate_reasoning(expr: Expr | None = None, model_type: str | None = None) -> Expr:
    """`expr`, with each output's reasoning in a variable of its own, `NAME_reasoning_content`, and only the
    rest in `NAME`. The model's own parser tells them apart; `model_type` is taken for SGLang's programs. The
    state keeps the tokens of both.

    >>> import sapwood as sgl
    >>> sgl.separate_reasoning(sgl.gen("answer")).parts[0].reasoning
    True
    """
    parts = parts_of(expr) if expr is not None else ()
    return Concat(tuple(replace(p, reasoning=True) if isinstance(p, Generation) else p for p in parts))


def image(expr: Any) -> NoReturn:
    """Not supported: raises Unsupported.

    >>> import sapwood as sgl
    >>> sgl.image("cat.png")
    Traceback (most recent call last):
    ...
    sapwood.lang.errors.Unsupported: images are not supported
    """
    raise Unsupported("images are not supported", "image")


def video(path: str, num_frames: int) -> NoReturn:
    """Not supported: raises Unsupported.

    >>> import sapwood as sgl
    >>> sgl.video("cat.mp4", 8)
    Traceback (most recent call last):
    ...
    sapwood.lang.errors.Unsupported: videos are not supported
    """
    raise Unsupported("videos are not supported", "video")
