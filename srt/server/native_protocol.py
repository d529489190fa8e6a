"""Requests and answers of `/generate`, in SGLang's shape. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import protocol, sampling
from sapwood.srt.server.answers import CacheReport

DEFAULT_MAX_NEW_TOKENS = 128


class NativeSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params` of one prompt; null means absent."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None

    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /generate`: exactly one of `text` and `input_ids`, each for one prompt or for a list of them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    cache_salt: str | None = None

    @property
    def batched(self) -> bool:
        """Whether a list of prompts was sent, which is answered by a list, of however many."""
        if self.text is not None:
            return isinstance(self.text, list)
        return isinstance((self.input_ids or [0])[0], list)


_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop_token_ids", "ignore_eos", "skip_special_tokens", "n", "seed",
)  # fmt: skip


def sampling_params(given: NativeSampling, logprobs: int | None, vocab_size: int) -> SamplingParams:
    """Checked parameters of one prompt. Raises BadRequest naming the field as SGLang spells it."""
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        if getattr(given, name) is not None:
            raise protocol.unsupported(name)
    limit = sampling.at_least_one("max_new_tokens", given.max_new_tokens)
    limit = DEFAULT_MAX_NEW_TOKENS if limit is None else limit
    least = given.min_new_tokens or 0
    if not 0 <= least <= limit:
        raise BadRequest(
            f"min_new_tokens must be from 0 to max_new_tokens, which is {limit}, got {least}",
            param="min_new_tokens",
        )
    values = {name: value for name in _COPIED if (value := getattr(given, name)) is not None}
    if given.sampling_seed is not None:
        values.setdefault("seed", given.sampling_seed)
    params = SamplingParams(
        max_tokens=limit, min_tokens=least, logprobs=logprobs, stop=sampling.stop_list(given.stop), **values
    )
    return params.check(vocab_size)


class StopReason(msgspec.Struct, tag="stop", tag_field="type"):
    matched: int | str | None


class LengthReason(msgspec.Struct, tag="length", tag_field="type"):
    length: int


class AbortReason(msgspec.Struct, tag="abort", tag_field="type"):
    message: str = "the request was aborted"


Triple = tuple[float, int, str | None]
"""(logprob, token id, text or null)"""


class MetaInfo(msgspec.Struct):
    """Counts are tokens, `e2e_latency` seconds since the request arrived."""

    id: str
    finish_reason: StopReason | LengthReason | AbortReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: CacheReport
    e2e_latency: float
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple]] | UnsetType = UNSET


class Generated(msgspec.Struct):
    """One choice; in a stream all of it so far. `index` (prompt * n + choice) is there if there are more."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
