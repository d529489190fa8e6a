"""From a request's fields to checked SamplingParams and a cache namespace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import SamplingParams
from sapwood.srt.server.protocol import CommonFields

MAX_NAME_CHARS = 256
_RID = re.compile(f"[!-~]{{1,{MAX_NAME_CHARS}}}")

_COPIED = (
    "n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k",
    "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids", "skip_special_tokens",
)  # fmt: skip
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def openai(
    request: CommonFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: Mapping[str, float],
    vocab_size: int,
) -> SamplingParams:
    """Parameters of an OpenAI request; the model's own `defaults` count where the request says nothing."""
    values: dict[str, Any] = {name: defaults[name] for name in _MODEL_DEFAULTS if name in defaults}
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    for name in _COPIED:
        if (value := getattr(request, name)) is not None:
            values[name] = value
    params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop=stop_list(request.stop), **values)
    return params.check(vocab_size)


def stop_list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1, got {value}", param=name)
    return value


def namespace(cache_salt: str | None) -> str:
    """The cache namespace of a request: requests with different salts share nothing."""
    if cache_salt is None:
        return ""
    if not 1 <= len(cache_salt) <= MAX_NAME_CHARS:
        raise BadRequest(
            f"cache_salt must have from 1 to {MAX_NAME_CHARS} characters, got {len(cache_salt)}",
            param="cache_salt",
        )
    return f"salt:{cache_salt}"


def check_rid(rid: str | None) -> str | None:
    """A client's name for its request; it comes back in a header, hence the narrow choice of characters."""
    if rid is not None and not _RID.fullmatch(rid):
        raise BadRequest(
            f"rid must be from 1 to {MAX_NAME_CHARS} visible ASCII characters, got {len(rid)}: "
            f"{rid[:MAX_NAME_CHARS]!r}",
            param="rid",
        )
    return rid
