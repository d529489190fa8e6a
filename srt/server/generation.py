"""What `/generate` and the offline Engine have in common: from a checked request to its answers.

Needs no web framework.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from msgspec import UNSET, structs

from sapwood.srt.client import Prompt, Stream
from sapwood.srt.errors import BadRequest, Conflict
from sapwood.srt.messages import Chunk, Finish, Read, Started, unpack
from sapwood.srt.params import MAX_TOP_LOGPROBS, SamplingParams
from sapwood.srt.server import constraints, native_protocol, parts, refused, sampling
from sapwood.srt.server.answers import cache_report, incomplete_report
from sapwood.srt.server.demands import Demands, reasoned
from sapwood.srt.server.native_logprobs import NativeLogprobs
from sapwood.srt.server.native_protocol import (
    AbortReason,
    Generated,
    GenerateRequest,
    KeptReport,
    LengthReason,
    MetaInfo,
    NativeSampling,
    StopReason,
)
from sapwood.srt.server.outcome import ChoiceSoFar, Outcome
from sapwood.srt.server.sampling import Reading
from sapwood.srt.server.service import Service

T = TypeVar("T")


def start(
    service: Service,
    body: GenerateRequest,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    demands: Sequence[Demands],
    key: bytes = b"",
) -> tuple[list[Stream], NativeShape]:
    """Start the prompts of one request, each with its checked parameters and demands; `body` says how to
    answer, `key` whose it is (see keys.key_of).

    Raises BadRequest, Conflict, Overloaded, Unavailable.
    """
    if body.separate_reasoning:
        demands = [reasoned(service, one, body.chat_template_kwargs) for one in demands]
    n = params[0].n
    if any(p.n != n for p in params):
        raise BadRequest("n must be the same for every prompt of a request", param="sampling_params")
    asked = names(body.rid, len(prompts))
    streams = service.submit(
        list(zip(prompts, params, strict=True)),
        place=service.tenants.place(body, key),
        rid=asked,
        timeout=sampling.check_timeout(body.timeout),
        field=body.field,
        streamed=bool(body.stream),
        constraint=[each.constraint for each in demands],
        parsing=demands[0].parsing,
    )
    return streams, NativeShape(body, streams, params)


def prompts(service: Service, body: GenerateRequest) -> Sequence[Prompt]:
    if sum(field is not None for field in (body.text, body.input_ids, body.input)) != 1:
        raise BadRequest("exactly one of text, input_ids and input must be given", param="text")
    if body.input is not None:
        return [parts.prompt_of(service, body.input, body.chat_template_kwargs)]
    if body.chat_template_kwargs:
        raise BadRequest("chat_template_kwargs needs input", param="chat_template_kwargs")
    if body.text is not None:
        return service.prompts(body.text if isinstance(body.text, str) else [*body.text], "text")
    return service.prompts([*(body.input_ids or [])], "input_ids")


def sampling_params(body: GenerateRequest, prompts: int, vocab_size: int) -> list[SamplingParams]:
    """Checked parameters for each prompt. Raises BadRequest naming the field."""
    refused.check(body)
    every = _sampling(body, prompts)
    sampling.check_pattern_lists(one.stop_regex for one in every)
    checked = []
    for index, (one, reading) in enumerate(zip(every, _readings(body, prompts), strict=True)):
        with _entry(body, index):
            checked.append(native_protocol.sampling_params(one, reading, vocab_size))
    return checked


def demands(body: GenerateRequest, prompts: int, whitespace: int) -> list[Demands]:
    """The constraint of each prompt's output: what several share is read once. Raises BadRequest naming the
    field."""
    every = _sampling(body, prompts)
    read: dict[int, Demands] = {}
    for index, one in enumerate(every):
        if id(one) not in read:
            with _entry(body, index):
                found = constraints.read(one, whitespace=whitespace, max_tokens=one.max_new_tokens)
            if found is not None and isinstance(body.sampling_params, list):
                found = structs.replace(found, field=f"sampling_params[{index}].{found.field}")
            read[id(one)] = Demands(found)
    return [read[id(one)] for one in every]


@contextmanager
def _entry(body: GenerateRequest, index: int) -> Iterator[None]:
    """Errors about one entry of a list of `sampling_params` name it."""
    try:
        yield
    except BadRequest as error:
        if not isinstance(body.sampling_params, list):
            raise
        where = f"sampling_params[{index}]"
        param = f"{where}.{error.param}" if error.param else where
        raise BadRequest(f"{where}: {error.message}", param=param, code=error.code) from None


def _sampling(body: GenerateRequest, prompts: int) -> list[NativeSampling]:
    default = NativeSampling()
    return [one or default for one in _for_each("sampling_params", body.sampling_params, prompts)]


def _readings(body: GenerateRequest, prompts: int) -> list[Reading]:
    """What each prompt's answer says of logprobs."""
    wanted = _for_each("return_logprob", body.return_logprob, prompts)
    tops = _for_each("top_logprobs_num", body.top_logprobs_num, prompts)
    starts = _for_each("logprob_start_len", body.logprob_start_len, prompts)
    ids = _ids_for_each(body.token_ids_logprob, prompts)
    if body.return_text_in_logprobs and not any(wanted):
        raise _needs_logprobs("return_text_in_logprobs")
    return [_reading(*each) for each in zip(wanted, tops, starts, ids, strict=True)]


def _reading(wanted: bool | None, top: int | None, start: int | None, ids: list[int] | None) -> Reading:
    top = top or 0
    start = None if start == -1 else start
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise BadRequest(
            f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}, got {top}", param="top_logprobs_num"
        )
    if start is not None and not 0 <= start < 2**31:
        raise BadRequest(
            f"logprob_start_len must be from -1 to {2**31 - 1}, got {start}", param="logprob_start_len"
        )
    if wanted:
        return Reading(top, start, ids or [])
    asked = {"top_logprobs_num": top, "logprob_start_len": start is not None, "token_ids_logprob": ids}
    for name, value in asked.items():
        if value:
            raise _needs_logprobs(name)
    return Reading()


def _needs_logprobs(name: str) -> BadRequest:
    return BadRequest(f"{name} needs return_logprob: true", param=name)


def _for_each(name: str, value: T | Sequence[T | None] | None, prompts: int) -> list[T | None]:
    """A list has one entry for each prompt; anything else is meant for all."""
    if not isinstance(value, list):
        return [cast("T | None", value)] * prompts
    if len(value) != prompts:
        raise BadRequest(
            f"{name} must have one entry for each of the {prompts} prompts, got {len(value)}", param=name
        )
    return [*value]


def _ids_for_each(value: list[int | list[int] | None] | None, prompts: int) -> list[list[int] | None]:
    ids = [one for one in value or () if isinstance(one, int)]
    if value is None or len(ids) == len(value):
        return [ids] * prompts
    if ids:
        raise BadRequest(
            "token_ids_logprob must hold only token ids or only lists of them", param="token_ids_logprob"
        )
    lists = [one if isinstance(one, list) else None for one in value]
    return _for_each("token_ids_logprob", lists, prompts)


def names(rid: str | list[str] | None, prompts: int) -> str | list[str]:
    """The names of a request's prompts, or one for all. Raises BadRequest and Conflict."""
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
    """Choices as SGLang has them. A stream's events are cumulative: of those that wait, the last is sent.

    Only logprobs are not said again and again: a prompt's are in each choice's first and last event, an
    output token's in one.
    """

    def __init__(
        self, body: GenerateRequest, streams: Sequence[Stream], params: Sequence[SamplingParams]
    ) -> None:
        self.outcome = Outcome(len(streams), params[0].n)
        self._params = params
        self._streams = streams
        self._listed = body.batched or params[0].n > 1
        self._with_text = bool(body.return_text_in_logprobs)
        self._with_ids = body.input is not None
        self._inputs: dict[int, NativeLogprobs] = {}
        self._begun: set[int] = set()

    def parts(self) -> Iterator[Generated]:
        for i, choice in enumerate(self.outcome.choices):
            _ = choice.ended
            yield self._generated(i)

    def whole(self, parts: Sequence[Any] | None = None) -> Any:
        """One Generated, or a list of them if several prompts or choices were asked for."""
        generated = [*self.parts()] if parts is None else parts
        return generated if self._listed else generated[0]

    def deltas(self, batch: list[tuple[int, Started | Read | Chunk]]) -> Iterator[Generated]:
        events = [(prompt, event) for prompt, event in batch if isinstance(event, Chunk)]
        for i in dict.fromkeys(self.outcome.index(prompt, chunk) for prompt, chunk in events):
            generated = self._generated(i)
            generated.index = i if self._listed else UNSET
            self.outcome.choices[i].logprobs = []
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
        self._tell_end(meta, prompt, choice)
        params = self._params[prompt]
        if params.logprobs is not None:
            if params.logprob_start is not None and (choice.finish is not None or index not in self._begun):
                self._input(prompt).tell_input(meta)
            self._begun.add(index)
            NativeLogprobs(params, self._with_text).follow(choice.logprobs).tell_output(meta)
        generated = Generated(choice.text, choice.ids, meta)
        started = self.outcome.started[prompt]
        # One list says it for all choices: of a long prompt it is by far the most of an answer.
        first = index % self.outcome.n == 0
        if self._with_ids and first and started is not None and choice.finish is not None:
            generated.input_ids = unpack(started.prompt_ids).tolist()
        return generated

    def _tell_end(self, meta: MetaInfo, prompt: int, choice: ChoiceSoFar) -> None:
        started, finish = self.outcome.started[prompt], choice.finish
        if started is not None and started.warnings:
            meta.warnings = started.warnings
        if started is not None and started.rewritten:
            meta.rewritten = started.rewritten
        if choice.reasoning:
            meta.reasoning_content = "".join(choice.reasoning)
        if finish is not None:
            meta.incomplete = incomplete_report(finish)
            if finish.kept is not None:
                meta.kept = KeptReport(finish.kept.tokens, finish.kept.rest)
            if finish.drafted:
                meta.drafted_tokens, meta.accepted_tokens = finish.drafted, finish.accepted

    def _input(self, prompt: int) -> NativeLogprobs:
        """From the start on the prompt's first token is there too, without any value."""
        shaped = self._inputs.get(prompt)
        if shaped is None:
            params, first = self._params[prompt], self.outcome.first_token(prompt)
            shaped = self._inputs[prompt] = NativeLogprobs(params, self._with_text)
            if params.logprob_start == 0 and first is not None:
                shaped.begin(*first[:2])
            shaped.follow(self.outcome.prompt_logprobs[prompt])
        return shaped


def _reason(finish: Finish | None) -> StopReason | LengthReason | AbortReason | None:
    if finish is None:
        return None
    if finish.reason == "length":
        return LengthReason(finish.completion_tokens)
    return AbortReason() if finish.reason == "abort" else StopReason(finish.matched)
