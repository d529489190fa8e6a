"""The options of `run` and of `gen` by the names that SGLang's language gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from sapwood.lang.backend import Logprobs, Sampling

MAX_NEW_TOKENS = 128
"""Of a `gen` that says nothing, in a run that says nothing."""


class Added(TypedDict, total=False):
    """What SGLang's `gen` does not have."""

    repetition_penalty: float | None
    seed: int | None
    skip_special_tokens: bool | None


class RunOptions(Added, total=False):
    """What every `gen` of a run does that says nothing else. `backend`: not the default one."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    backend: Any


_SEQUENCES = ("stop", "stop_token_ids", "stop_regex")
_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
NAMES = RunOptions.__required_keys__ | RunOptions.__optional_keys__


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for every output of a run that does not say it itself."""

    sampling: Sampling
    logprobs: Logprobs | None


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """Raises TypeError, naming the option, for one that does not exist or a value of another type."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _LOGPROBS:
            continue
        given[name] = ((value,) if isinstance(value, str) else tuple(value)) if name in _SEQUENCES else value
    unknown = given.keys() - set(Sampling.__struct_fields__)
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(given, Sampling)
    except msgspec.ValidationError as e:
        raise TypeError(f"wrong option: {e}") from None


def logprobs_of(options: Mapping[str, Any]) -> Logprobs | None:
    """None if they are not asked for."""
    if not options.get("return_logprob"):
        return None
    start = options.get("logprob_start_len")
    return Logprobs(
        top=options.get("top_logprobs_num") or 0,
        start=None if start is None or start < 0 else start,
        texts=bool(options.get("return_text_in_logprobs")),
    )


def defaults_of(options: Mapping[str, Any]) -> Defaults:
    """Of a run's options."""
    given = {name: value for name, value in options.items() if name != "backend"}
    sampling = sampling_of({"max_new_tokens": MAX_NEW_TOKENS} | given)
    return Defaults(sampling, logprobs_of(given))


def merged(own: Sampling, default: Sampling) -> Sampling:
    """What an output says itself, and else the default. An empty list of stops says that there are none."""
    given = msgspec.structs.asdict(default)
    given.update({name: value for name, value in msgspec.structs.asdict(own).items() if value is not None})
    return Sampling(**{name: value for name, value in given.items() if value != ()})
