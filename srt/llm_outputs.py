"""What `LLM` answers with: the objects that vLLM's users know, made from a request's outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sapwood.srt.llm_params import SamplingParams
from sapwood.srt.messages import Incomplete, TextLogprob
from sapwood.srt.server.outcome import Outcome


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token. `rank` is 1 for the likeliest; None for a token that is not among
    the alternatives asked for: its place among all is not known."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
"""For each token of the output: the token itself and the alternatives asked for."""


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. `token_ids` hold an EOS and the tokens of a stop string too; `text` does not.

    `finish_reason` is "stop", "length" or "abort"; `stop_reason` the stop string or stop id, None for EOS.
    `cumulative_logprob` and `logprobs` are there if logprobs were asked for, `reasoning_content` in a chat
    under a constraint, which begins after it. `incomplete` says where a constrained output was cut by its
    length: the JSON pointer of what was being written, and `inside` what; None: it is whole, or free.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    reasoning_content: str | None = None
    incomplete: Incomplete | None = None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `prompt` is None if it was given as ids; a chat's is decoded from its ids.

    `prompt_logprobs` has an entry for each prompt token, None for the first. `num_cached_tokens` of the
    prompt's tokens came from the prefix cache. `warnings` tell what of its constraint is not enforced.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Embedding:
    """`embedding` is a list of floats, `data` the same as float32 [hidden]."""

    data: npt.NDArray[np.float32] = field(repr=False)

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt's vector, in `outputs`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding
    num_cached_tokens: int = 0
    finished: bool = True


def request_output(
    number: int, prompt: str | None, params: SamplingParams, outcome: Outcome
) -> RequestOutput:
    """The answer for the prompt that `outcome` is of."""
    return RequestOutput(
        request_id=str(number),
        prompt=prompt,
        prompt_token_ids=outcome.prompt_ids(0),
        outputs=[_completion(i, params, outcome) for i in range(outcome.n)],
        prompt_logprobs=_prompt_logprobs(params, outcome),
        num_cached_tokens=outcome.verdict(0).matched,
        warnings=outcome.warnings or [],
    )


def _completion(index: int, params: SamplingParams, outcome: Outcome) -> CompletionOutput:
    choice = outcome.choices[index]
    finish = choice.ended
    reason = finish.matched
    if isinstance(reason, int) and reason not in (params.stop_token_ids or ()):
        reason = None
    text = choice.text if params.detokenize else ""
    if params.detokenize and params.include_stop_str_in_output and isinstance(reason, str):
        text += reason
    asked = params.logprobs is not None
    return CompletionOutput(
        index,
        text,
        choice.ids,
        finish.reason,
        reason,
        sum(item.logprob for item in choice.logprobs) if asked else None,
        [_told(item, params.logprobs or 0) for item in choice.logprobs] if asked else None,
        "".join(choice.reasoning) or None,
        finish.incomplete,
    )


def _prompt_logprobs(params: SamplingParams, outcome: Outcome) -> list[dict[int, Logprob] | None] | None:
    top = params.prompt_logprobs
    if top is None:
        return None
    return [None, *(_told(item, top) for item in outcome.prompt_logprobs[0])]


def _told(item: TextLogprob, top: int) -> dict[int, Logprob]:
    """The token itself first, then its `top` best alternatives, it among them or not."""
    ranks = {token: rank for rank, (token, *_) in enumerate(item.top, 1)}
    told = {item.id: Logprob(item.logprob, ranks.get(item.id), item.text)}
    for token, logprob, text, _raw in item.top[:top]:
        told.setdefault(token, Logprob(logprob, ranks[token], text))
    return told
