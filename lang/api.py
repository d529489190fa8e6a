"""What a program is written with: expressions that its state is added."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn, Unpack

from sapwood.lang.choices import Method, check, token_length_normalized
from sapwood.lang.dtypes import regex_of_dtype, stops_of_dtype
from sapwood.lang.errors import Unsupported
from sapwood.lang.ir import (
    Concat,
    Constant,
    Expr,
    Generation,
    RoleBegin,
    RoleEnd,
    Selection,
    Tokens,
    parts_of,
)
from sapwood.lang.options import Drawing, logprobs_of, sampling_of
from sapwood.lang.schema import converter_of, schema_of

Stop = str | Sequence[str] | None


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    *,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: Method | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    ebnf: str | None = None,
    logprobs: int | None = None,
    **options: Unpack[Drawing],
) -> Expr:
    """An output of the model, kept as variable `name`. With `n` > 1 the variable is a list, and the state
    goes on with its first item.

    What the output must be: `dtype` (int, float, bool or str; the value is its text, as in SGLang), `regex`,
    `ebnf`, or `json_schema`: a schema as a text or a dict, or a type (pydantic model, dataclass, TypedDict,
    msgspec.Struct ...), of which the value then is. With `choices` it is a `select`; where a temperature
    above 0 is given, one of them is drawn. `logprobs=k` is `return_logprob` with `top_logprobs_num=k`.

    Raises TypeError, ValueError or re.error for arguments that do not fit.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "The sky is" + sgl.gen("colour", max_tokens=4, stop=".") + "."
    >>> program.run(backend=sgl.Echo([" blue. Or not."]))["colour"]
    ' blu'
    """
    if choices is not None and not options.get("temperature"):
        return select(name, choices, choices_method=choices_method or token_length_normalized)
    given: dict[str, Any] = {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "n": n, "stop": stop}
    given.update(_constraint(dtype=dtype, regex=regex, json_schema=json_schema, ebnf=ebnf, choices=choices))
    if dtype is not None:
        given["stop"] = (*((stop,) if isinstance(stop, str) else stop or ()), *stops_of_dtype(dtype))
    if logprobs is not None:
        options["return_logprob"], options["top_logprobs_num"] = True, logprobs
    return Generation(
        name,
        sampling_of(given | dict(options)),
        logprobs_of(options),
        converter_of(json_schema) if json_schema is not None else None,
    )


def _constraint(
    *, dtype: type | str | None, regex: str | None, json_schema: Any, ebnf: str | None, choices: Any
) -> dict[str, Any]:
    """Sampling's field that says what an output must be."""
    given = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf, "choices": choices}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"only one of {', '.join(names)} can say what an output must be")
    if regex is not None:
        re.compile(regex)
        return {"regex": regex}
    if dtype is not None:
        return {"regex": regex_of_dtype(dtype)}
    if json_schema is not None:
        return {"json_schema": schema_of(json_schema)}
    if choices is not None:
        return {"choices": _texts(choices)}
    return {"ebnf": ebnf}


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    **options: Unpack[Drawing],
) -> Expr:
    """An output that is an integer; the variable is its text.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "1 + 1 = " + sgl.gen_int("sum")
    >>> program.run(backend=sgl.Echo(["2"]))["sum"]
    '2'
    """
    return gen(name, max_tokens, None, n, stop, dtype=int, **options)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    **options: Unpack[Drawing],
) -> Expr:
    """An output that is a text in double quotes; the variable has them too.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "name = " + sgl.gen_string("name")
    >>> print(program.run(backend=sgl.Echo(['"Ada"']))["name"])
    "Ada"
    """
    return gen(name, max_tokens, None, n, stop, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: Method = token_length_normalized,
) -> Expr:
    """The best of `choices` by their logprobs, kept as variable `name`; its meta information has the scores.

    Raises ValueError for no choices, an empty one, or a temperature (`gen(choices=..., temperature=...)`
    draws one).

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "Is water wet? " + sgl.select("answer", ["yes", "no"])
    >>> program.run(backend=sgl.Echo(["no"])).text()
    'Is water wet? no'
    """
    if temperature > 1e-5:
        raise ValueError(f"select takes the best choice: temperature must be 0, got {temperature}")
    return Selection(name, _texts(choices), choices_method)


def _texts(choices: Sequence[str] | None) -> tuple[str, ...]:
    given: Any = () if choices is None else choices
    check(given)
    return tuple(given)


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
