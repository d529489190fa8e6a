"""What a program asks a model for: outputs (`gen`) and choices (`select`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Unpack

from sapwood.lang.choices import Method, check, token_length_normalized
from sapwood.lang.dtypes import regex_of_dtype, stops_of_dtype
from sapwood.lang.ir import Expr, Generation, Selection
from sapwood.lang.options import Added, logprobs_of, sampling_of
from sapwood.lang.schema import converter_of, schema_of

Stop = str | Sequence[str] | None


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: Method | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    ebnf: str | None = None,
    logprobs: int | None = None,
    **options: Unpack[Added],
) -> Expr:
    """An output of the model, kept as variable `name`. With `n` > 1 the variable is a list, and the state
    goes on with its first item.

    What the output must be: `dtype` (int, float, bool or str; the value is its text, as in SGLang), `regex`,
    `ebnf`, or `json_schema`: a schema as a text or a dict, or a type (pydantic model, dataclass, TypedDict,
    msgspec.Struct ...), of which the value then is. With `choices` it is a `select`; where a temperature
    above 0 is given, one of them is drawn. `logprobs=k` is `return_logprob` with `top_logprobs_num=k`.

    Raises TypeError, ValueError or re.error for arguments that do not fit, alone or together.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "The sky is" + sgl.gen("colour", max_tokens=4, stop=".") + "."
    >>> program.run(backend=sgl.Echo([" blue. Or not."]))["colour"]
    ' blu'
    """
    given: dict[str, Any] = dict(locals())
    return _output(**given.pop("options"), **given)


def _output(
    name: str | None,
    max_tokens: int | None,
    min_tokens: int | None,
    dtype: type | str | None,
    choices: Sequence[str] | None,
    choices_method: Method | None,
    regex: str | None,
    json_schema: Any,
    ebnf: str | None,
    logprobs: int | None,
    **options: Any,
) -> Expr:
    constraint = _constraint(dtype=dtype, regex=regex, json_schema=json_schema, ebnf=ebnf, choices=choices)
    if choices is not None and not options["temperature"]:
        _refuse_for_select({"min_tokens": min_tokens, "logprobs": logprobs, **options})
        return select(name, choices, choices_method=choices_method or token_length_normalized)
    if choices_method is not None:
        raise ValueError("choices_method says how a select decides: it needs choices, and no temperature")
    if dtype is not None and (ends := stops_of_dtype(dtype)):
        stop = options["stop"]
        options["stop"] = (*((stop,) if isinstance(stop, str) else stop or ()), *ends)
    if logprobs is not None:
        options |= {"return_logprob": True, "top_logprobs_num": logprobs}
    return Generation(
        name,
        sampling_of({"max_new_tokens": max_tokens, "min_new_tokens": min_tokens, **options, **constraint}),
        logprobs_of(options),
        converter_of(json_schema) if json_schema is not None else None,
    )


_CHANGES_NO_SELECT = (
    "temperature", "top_p", "top_k", "min_p", "seed", "skip_special_tokens", "return_logprob",
)  # fmt: skip
_QUIET = {"n": 1, "repetition_penalty": 1, "logprob_start_len": -1}
"""Values that ask for what happens anyway."""


def _refuse_for_select(options: dict[str, Any]) -> None:
    """A choice is taken whole, by its score, which is told; so how an output is drawn, how long it may be
    and whether its logprobs are told changes nothing. Raises ValueError for all else."""
    for name, value in options.items():
        if value and name not in _CHANGES_NO_SELECT and value != _QUIET.get(name):
            raise ValueError(
                f"{name} cannot be used with choices, one of which is taken by its score: got {value!r}; "
                "with a temperature above 0 one is drawn"
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
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    **options: Unpack[Added],
) -> Expr:
    """An output that is an integer; the variable is its text.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "1 + 1 = " + sgl.gen_int("sum")
    >>> program.run(backend=sgl.Echo(["2"]))["sum"]
    '2'
    """
    given: dict[str, Any] = dict(locals())
    return gen(dtype=int, **given.pop("options"), **given)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    **options: Unpack[Added],
) -> Expr:
    """An output that is a text in double quotes; the variable has them too.

    >>> import sapwood as sgl
    >>> @sgl.function
    ... def program(s):
    ...     s += "name = " + sgl.gen_string("name")
    >>> print(program.run(backend=sgl.Echo(['"Ada"']))["name"])
    "Ada"
    """
    given: dict[str, Any] = dict(locals())
    return gen(dtype=str, **given.pop("options"), **given)


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
    if not callable(choices_method) or not hasattr(choices_method, "needs_unconditional"):
        raise TypeError(
            "choices_method is token_length_normalized, greedy_token_selection or"
            f" unconditional_likelihood_normalized, got {choices_method!r}"
        )
    return Selection(name, _texts(choices), choices_method)


def _texts(choices: Sequence[str] | None) -> tuple[str, ...]:
    given: Any = () if choices is None else choices
    check(given)
    return tuple(given)
