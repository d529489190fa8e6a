"""From a request's fields to checked SamplingParams, a name and a deadline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sapwood.srt.client import Prompt
from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import stop_regex
from sapwood.srt.messages import IdsPrompt
from sapwood.srt.params import SamplingParams
from sapwood.srt.server.protocol import CommonFields

MAX_NAME_CHARS = 256
MAX_TIMEOUT = 86_400.0
MAX_READ = 512
"""Logprobs of each prompt token in one answer: every choice tells them again."""
MAX_TOLD = 4_000_000
"""Logprobs of output tokens in the answer to one request: each takes 250 bytes until it is sent."""
MAX_PATTERN_LISTS = 16
"""Different `stop_regex` in one request."""
_RID = re.compile(f"[!-~]{{1,{MAX_NAME_CHARS}}}")

_COPIED = (
    "n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k",
    "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids", "skip_special_tokens",
)  # fmt: skip
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Reading(NamedTuple):
    """The logprobs that a prompt's answer needs.

    `top` alternatives at each place (None: no logprobs at all), of the prompt's tokens from index `start` on
    too (None: of the output alone), and of the tokens `ids` at each place.
    """

    top: int | None = None
    start: int | None = None
    ids: Sequence[int] = ()


def openai(
    request: CommonFields,
    *,
    max_tokens: int | None,
    reading: Reading,
    defaults: Mapping[str, float],
    vocab_size: int,
    n: int | None = None,
) -> SamplingParams:
    """Parameters of an OpenAI request; the model's own `defaults` count where the request says nothing.

    `n`, if given, counts instead of the request's.
    """
    values: dict[str, Any] = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    for name in _COPIED:
        if (value := getattr(request, name)) is not None:
            values[name] = value
    if n is not None:
        values["n"] = n
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=reading.top,
        logprob_start=reading.start,
        logprob_ids=[*reading.ids],
        stop=stop_list(request.stop),
        stop_regex=stop_list(request.stop_regex),
        **values,
    )
    return check_reading(check_patterns(params.check(vocab_size)))


def check_patterns(params: SamplingParams) -> SamplingParams:
    """Refuse a `stop_regex` that cannot be looked for; BadRequest says why."""
    if params.stop_regex:
        stop_regex.check(params.stop_regex, params.n)
    return params


def check_pattern_lists(every: Iterable[str | list[str] | None]) -> None:
    """Refuse prompts that have too many different `stop_regex`: each of these takes its time to read."""
    different = {tuple(stop_list(one)) for one in every}.difference([()])
    if len(different) > MAX_PATTERN_LISTS:
        raise BadRequest(
            f"the prompts of one request may have {MAX_PATTERN_LISTS} different stop_regex, got"
            f" {len(different)}",
            param="stop_regex",
        )


def check_reading(params: SamplingParams) -> SamplingParams:
    """Refuse an answer that would be many times as large as what was computed for it."""
    each = 1 + (params.logprobs or 0) + len(params.logprob_ids)
    if params.logprob_start is not None and params.n * each > MAX_READ:
        raise BadRequest(
            f"each of the {params.n} choices would tell {each} logprobs of each prompt token, which makes"
            f" {params.n * each}; at most {MAX_READ} are told: ask for fewer choices",
            param="n",
        )
    return params


def check_told(items: Sequence[tuple[Prompt, SamplingParams]], longest: int, native: bool) -> None:
    """Refuse a request whose output may come to more than MAX_TOLD logprobs.

    `longest` is the context in tokens, `native` whose names the fields have.
    """
    told = 0
    for prompt, params in items:
        if params.logprobs is not None:
            left = max(0, longest - (len(prompt.ids) // 4 if isinstance(prompt, IdsPrompt) else 1))
            tokens = left if params.max_tokens is None else min(left, params.max_tokens)
            told += params.n * tokens * (1 + params.logprobs + len(params.logprob_ids))
    if told > MAX_TOLD:
        limit, top = ("max_new_tokens", "top_logprobs_num") if native else ("max_tokens", "logprobs")
        chosen = " + the number of token_ids_logprob" if native else ""
        raise BadRequest(
            f"prompts times n times {limit} (or what is left of the context) times (1 + {top}{chosen}) makes"
            f" {told} logprobs; one request may ask for {MAX_TOLD}",
            param=top,
        )


def stop_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def at_least(name: str, value: int | None, low: int) -> int | None:
    if value is not None and value < low:
        raise BadRequest(f"{name} must be at least {low}, got {value}", param=name)
    return value


def check_timeout(timeout: float | None) -> float | None:
    """Seconds that a request may take."""
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT:
        raise BadRequest(
            f"timeout must be above 0 and at most {MAX_TIMEOUT:g} seconds, got {timeout}", param="timeout"
        )
    return timeout


def check_rid(rid: str | None) -> str | None:
    """A client's name for its request; it comes back in a header, hence the narrow choice of characters."""
    if rid is not None and not _RID.fullmatch(rid):
        raise BadRequest(
            f"rid must be from 1 to {MAX_NAME_CHARS} visible ASCII characters, got {len(rid)}: "
            f"{rid[:MAX_NAME_CHARS]!r}",
            param="rid",
        )
    return rid
