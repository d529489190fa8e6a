"""Requests and answers of `/generate`, in SGLang's shape. Unknown fields are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sapwood.srt.errors import BadRequest
from sapwood.srt.params import MAX_LOGPROB_IDS, SamplingParams
from sapwood.srt.server import constraints, refused, sampling
from sapwood.srt.server.answers import CacheReport, IncompleteReport
from sapwood.srt.server.sampling import Reading
from sapwood.srt.server.tenants import PlaceFields

DEFAULT_MAX_NEW_TOKENS = 128


@refused.fields(refused.NATIVE_SAMPLING)
@constraints.fields
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
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None


class InputPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a chat, or `special`, text whose special tokens are meant as such.

    A message has a `role`, and one of `text` and `content`, which is text, or a list of texts and lists of
    token ids. An `open` one must be the last part of all: the model goes on with it.
    """

    special: str | None = None
    role: str | None = None
    text: str | None = None
    content: str | list[str | list[int]] | None = None
    open: bool = False


@refused.fields(refused.NATIVE)
class GenerateRequest(PlaceFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /generate`: exactly one of `text` and `input_ids`, each for one prompt or for a list of them, and
    `input`, one prompt in parts: texts (in which a special token's string is text), token ids, lists of them,
    and messages. Its answer has `input_ids`, the tokens of all of it. With `score` nothing is generated: the
    answer has the logprobs of each of these ways on.

    With `separate_reasoning` the model's reasoning, if it writes any, is in `meta_info.reasoning_content` and
    not in `text`; `output_ids` are the tokens of both.

    What is about logprobs may be a list too, with one entry for each prompt. `logprob_start_len` is the first
    prompt token whose logprob is told; -1: none is.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input: list[int | str | list[int] | InputPart] | None = None
    score: list[str | list[int]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    return_logprob: bool | list[bool | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    timeout: float | None = None

    @property
    def field(self) -> str:
        """Where its prompts are."""
        if self.input is not None:
            return "input"
        return "input_ids" if self.text is None else "text"

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


def sampling_params(given: NativeSampling, reading: Reading, vocab_size: int) -> SamplingParams:
    """Checked parameters of one prompt. Raises BadRequest naming the field as SGLang spells it."""
    refused.check(given)
    limit = sampling.at_least("max_new_tokens", given.max_new_tokens, 0)
    limit = DEFAULT_MAX_NEW_TOKENS if limit is None else limit
    least = given.min_new_tokens or 0
    if not 0 <= least <= limit:
        raise BadRequest(
            f"min_new_tokens must be from 0 to max_new_tokens, which is {limit}, got {least}",
            param="min_new_tokens",
        )
    _check_ids(reading.ids, vocab_size)
    values = {name: value for name in _COPIED if (value := getattr(given, name)) is not None}
    if given.sampling_seed is not None:
        values.setdefault("seed", given.sampling_seed)
    params = SamplingParams(
        max_tokens=limit,
        min_tokens=least,
        logprobs=reading.top,
        logprob_start=reading.start,
        logprob_ids=[*reading.ids],
        stop=sampling.stop_list(given.stop),
        stop_regex=sampling.stop_list(given.stop_regex),
        **values,
    )
    return sampling.check_reading(sampling.check_patterns(params.check(vocab_size)))


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) > MAX_LOGPROB_IDS:
        raise BadRequest(
            f"token_ids_logprob may have {MAX_LOGPROB_IDS} token ids, got {len(ids)}",
            param="token_ids_logprob",
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"a token id in token_ids_logprob must be from 0 to {vocab_size - 1}, got {token}",
                param="token_ids_logprob",
            )


class StopReason(msgspec.Struct, tag="stop", tag_field="type"):
    matched: int | str | None


class LengthReason(msgspec.Struct, tag="length", tag_field="type"):
    length: int


class AbortReason(msgspec.Struct, tag="abort", tag_field="type"):
    message: str = "the request was aborted"


Triple = tuple[float | None, int, str | None]
"""(logprob or null for a prompt's first token, token id, text or null)"""

Triples = list[list[Triple] | None]
"""At each place several, as they were asked for; null for a prompt's first token."""


class KeptReport(msgspec.Struct):
    """Of an output that a stop string or pattern has cut: the text of its first `tokens` tokens and `rest`,
    a part of what comes next, are all of the output's text before the cut, reasoning included."""

    tokens: int
    rest: str


class MetaInfo(msgspec.Struct):
    """Counts are tokens, `e2e_latency` seconds since the request arrived. Of the tokens `drafted_tokens` had
    been proposed, and `accepted_tokens` of these were drawn; they are there at the end, if there were drafts.
    `incomplete` says where a constrained output was cut off, `kept` which tokens a stop string has left.
    `rewritten` are the messages of `input`, by their number among these from 0 on, at which the chat template
    changed what came before, so that all up to there was tokenised anew.

    `input_...` is of the prompt's tokens from `logprob_start_len` on; `..._top_logprobs` has the most likely
    tokens, best first, `..._token_ids_logprobs` those of `token_ids_logprob`, in their order. `output_...` is
    in a stream of the tokens that have come since the choice's last event.
    """

    id: str
    finish_reason: StopReason | LengthReason | AbortReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: CacheReport
    e2e_latency: float
    drafted_tokens: int | UnsetType = UNSET
    accepted_tokens: int | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    incomplete: IncompleteReport | UnsetType = UNSET
    kept: KeptReport | UnsetType = UNSET
    rewritten: list[int] | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: Triples | UnsetType = UNSET
    output_top_logprobs: Triples | UnsetType = UNSET
    input_token_ids_logprobs: Triples | UnsetType = UNSET
    output_token_ids_logprobs: Triples | UnsetType = UNSET


class Score(msgspec.Struct):
    """The tokens of one choice of `score`, and each one's natural logprob after the prompt and those before
    it; `texts` with `return_text_in_logprobs`."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str] | UnsetType = UNSET


class Generated(msgspec.Struct):
    """One choice; in a stream all of its text and ids so far. `index` (prompt * n + choice) is there if
    there are more. `input_ids` are the tokens of `input`, told with the first choice, at its end, and those
    of a prompt with `score`; `scores` are the answer to that, in its order."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    input_ids: list[int] | UnsetType = UNSET
    scores: list[Score] | UnsetType = UNSET
