"""What `/generate` and the offline Engine have in common: from a checked request to its answers.

Needs no web framework.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from sapwood.srt.client import Prompt, Stream
from sapwood.srt.errors import BadRequest, Conflict
from sapwood.srt.messages import Chunk, Finish, IdsPrompt, Read, Started, TextLogprob, TextPrompt
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import native_protocol, protocol, sampling
from sapwood.srt.server.answers import cache_report
from sapwood.srt.server.logprobs import finite
from sapwood.srt.server.native_protocol import (
    AbortReason,
    Generated,
    GenerateRequest,
    LengthReason,
    MetaInfo,
    NativeSampling,
    StopReason,
    Triple,
)
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.service import Service


def start(
    service: Service, body: GenerateRequest, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> tuple[list[Stream], NativeShape]:
    """Start the prompts of one request, each with its checked parameters; `body` says how to answer.

    Raises BadRequest, Conflict, Overloaded, Unavailable.
    """
    n = params[0].n
    if any(p.n != n for p in params):
        raise BadRequest("n must be the same for every prompt of a request", param="sampling_params")
    names = _names(body.rid, len(prompts))
    streams = service.submit(
        list(zip(prompts, params, strict=True)), namespace=sampling.namespace(body.cache_salt), rid=names
    )
    return streams, NativeShape(body, streams, n)


def prompts(service: Service, body: GenerateRequest) -> list[TextPrompt | IdsPrompt]:
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("exactly one of text and input_ids must be given", param="text")
    if body.text is not None:
        return service.prompts(body.text if isinstance(body.text, str) else [*body.text], "text")
    return service.prompts([*(body.input_ids or [])], "input_ids")


def sampling_params(body: GenerateRequest, prompts: int, vocab_size: int) -> list[SamplingParams]:
    given = body.sampling_params or NativeSampling()
    each = given if isinstance(given, list) else [given] * prompts
    if len(each) != prompts:
        raise BadRequest(
            f"sampling_params must have one entry for each of the {prompts} prompts, got {len(each)}",
            param="sampling_params",
        )
    logprobs = wanted_logprobs(body)
    return [native_protocol.sampling_params(one, logprobs, vocab_size) for one in each]


def wanted_logprobs(body: GenerateRequest) -> int | None:
    if body.logprob_start_len not in (None, -1):
        raise protocol.unsupported("logprob_start_len")
    top = body.top_logprobs_num or 0
    if not 0 <= top <= 20:
        raise BadRequest(f"top_logprobs_num must be from 0 to 20, got {top}", param="top_logprobs_num")
    if body.return_logprob:
        return top
    if top or body.return_text_in_logprobs:
        name = "top_logprobs_num" if top else "return_text_in_logprobs"
        raise BadRequest(f"{name} needs return_logprob: true", param=name)
    return None


def _names(rid: str | list[str] | None, prompts: int) -> str | list[str]:
    if not isinstance(rid, list):
        return sampling.check_rid(rid) or uuid.uuid4().hex
    if len(rid) != prompts:
        raise BadRequest(
            f"rid must have one entry for each of the {prompts} prompts, got {len(rid)}", param="rid"
        )
    if len(set(rid)) < len(rid):
        raise Conflict("rid names two prompts of one request the same", param="rid")
    for name in rid:
        sampling.check_rid(name)
    return rid


class NativeShape:
    """Choices as SGLang has them. A stream's events are cumulative: of those that wait, the last is sent."""

    def __init__(self, body: GenerateRequest, streams: Sequence[Stream], n: int) -> None:
        self.outcome = Outcome(len(streams), n)
        self._body = body
        self._streams = streams
        self._listed = body.batched or n > 1

    def whole(self) -> Generated | list[Generated]:
        for choice in self.outcome.choices:
            _ = choice.ended
        generated = [self._generated(i) for i in range(len(self.outcome.choices))]
        return generated if self._listed else generated[0]

    def deltas(self, batch: list[tuple[int, Started | Read | Chunk]]) -> Iterator[Generated]:
        events = [(prompt, event) for prompt, event in batch if isinstance(event, Chunk)]
        for i in dict.fromkeys(self.outcome.index(prompt, chunk) for prompt, chunk in events):
            generated = self._generated(i)
            generated.index = i if self._listed else UNSET
            yield generated

    def closing(self) -> Iterator[Generated]:
        return iter(())

    def _generated(self, index: int) -> Generated:
        choice = self.outcome.choices[index]
        prompt = index // self.outcome.n
        stream = self._streams[prompt]
        verdict = self.outcome.verdict(prompt)
        meta = MetaInfo(
            stream.name,
            _reason(choice.finish),
            self.outcome.prompt_tokens(prompt),
            self.outcome.completion_tokens(index),
            verdict.matched,
            cache_report(verdict),
            time.monotonic() - stream.arrived,
        )
        if self._body.return_logprob:
            meta.output_token_logprobs = [self._triple(lp.logprob, lp.id, lp.text) for lp in choice.logprobs]
            if self._body.top_logprobs_num:
                meta.output_top_logprobs = [self._top(lp) for lp in choice.logprobs]
        return Generated(choice.text, choice.ids, meta)

    def _top(self, item: TextLogprob) -> list[Triple]:
        return [self._triple(value, token, text) for token, value, text, _raw in item.top]

    def _triple(self, logprob: float, token: int, text: str) -> Triple:
        return finite(logprob), token, text if self._body.return_text_in_logprobs else None


def _reason(finish: Finish | None) -> StopReason | LengthReason | AbortReason | None:
    if finish is None:
        return None
    if finish.reason == "length":
        return LengthReason(finish.completion_tokens)
    return StopReason(finish.matched) if finish.reason == "stop" else AbortReason()
