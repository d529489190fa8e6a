"""`score` of `/generate`: how likely each of some ways on is after one prompt. Nothing is generated.

    prompt and choices ──tokenize──► their ids ──► ChoiceTree ──rows──► requests that judge their last token
                                                       ▲                      │ logprobs
                                                       └──────────────────────┘
The first row computes the prompt; the others find it, and what else comes before them, in the cache. One that
does not, because it was evicted or there is no cache, computes it: the values are the same. Needs no web
framework.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, structs

from sapwood.srt.client import Prompt, Stream, merge
from sapwood.srt.errors import BadRequest, ContextTooLong, ErrorInfo, Unavailable, from_info, require_unicode
from sapwood.srt.messages import Ended, Ids, IdsPart, IdsPrompt, PartsPrompt, TextPart, pack, unpack
from sapwood.srt.names import Held
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import generation, refused, sampling
from sapwood.srt.server.answers import cache_report
from sapwood.srt.server.choice_tree import ChoiceTree, Row
from sapwood.srt.server.logprobs import finite
from sapwood.srt.server.native_protocol import Generated, GenerateRequest, LengthReason, MetaInfo, Score
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.service import Service
from sapwood.srt.server.tenants import Place

MAX_CHOICES = 256
MAX_TOKENS = 65_536
"""Of all choices together."""
KEEP_SECONDS = 5.0
"""So long the prompt stays in the cache, if there is room, for the rows that come after the first."""

OF_OUTPUT: dict[str, tuple[Any, ...]] = {
    "sampling_params": (None,),
    "return_logprob": (None, False),
    "top_logprobs_num": (None, 0),
    "logprob_start_len": (None, -1),
    "token_ids_logprob": (None, []),
    "stream": (None, False),
    "separate_reasoning": (None, False),
}
"""Fields of a request that do not go with `score`, but for the values that ask for nothing."""

Start = Callable[[int, Callable[[], list[Stream]]], Awaitable[list[Stream]]]
"""Starts so many requests by that call, once there is room for them."""


async def at_once(_count: int, start: Callable[[], list[Stream]]) -> list[Stream]:
    """The Start of a server, which refuses what there is no room for."""
    return start()


class _Asked(NamedTuple):
    """A checked request. `name` is that of all its rows."""

    prompt: Prompt
    choices: Sequence[str | list[int]]
    place: Place
    name: str
    timeout: float | None
    arrived: float
    field: str
    with_texts: bool


class _Tokens(NamedTuple):
    """The ids of a prompt and of its choices, and the messages at which the prompt was rewritten."""

    prompt: Ids
    choices: list[list[int]]
    rewritten: list[int]


async def answer(
    service: Service, body: GenerateRequest, key: bytes = b"", start: Start = at_once
) -> Generated:
    """The logprobs of the request's choices, in their order; `key` is whose it is (see keys.key_of).

    Raises BadRequest naming the field, ContextTooLong, DeadlineExceeded, and what `Service.submit` raises;
    cancelled, it leaves nothing behind.
    """
    asked = _check(service, body, key)
    # Between two rows no stream is live, and yet it can be aborted, and a server that is to end waits for it.
    async with service.client.holding(asked.name, asked.timeout) as held:
        tokens = await _tokenized(service, asked)
        return await _Scoring(service, asked, held, tokens, start).run()


def _check(service: Service, body: GenerateRequest, key: bytes) -> _Asked:
    choices = body.score or []
    refused.check(body)
    for name, neutral in OF_OUTPUT.items():
        if getattr(body, name) not in neutral:
            raise BadRequest(f"{name} cannot be used with score, which draws nothing", param=name)
    if body.batched:
        raise BadRequest(f"score takes one prompt, {body.field} is a list of them", param=body.field)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise BadRequest(
            f"score must have from 1 to {MAX_CHOICES} choices, got {len(choices)}", param="score"
        )
    if isinstance(body.rid, list):
        raise BadRequest("rid must be one name with score", param="rid")
    _require_tokens(sum(len(choice) for choice in choices if isinstance(choice, list)))
    for i, choice in enumerate(choices):
        if not choice:
            raise BadRequest(f"score[{i}] is empty; at least one token is needed", param=f"score[{i}]")
        if isinstance(choice, list):
            service.packed(choice, f"score[{i}]")
        elif service.config.skip_tokenizer_init:
            raise BadRequest(
                f"score[{i}]: this server takes token ids only (--skip-tokenizer-init)", param=f"score[{i}]"
            )
        else:
            require_unicode(choice, f"score[{i}]")
    (prompt,) = generation.prompts(service, body)
    rid = generation.names(body.rid, 1)
    assert isinstance(rid, str)
    return _Asked(
        prompt,
        choices,
        service.tenants.place(body, key),
        rid,
        sampling.check_timeout(body.timeout),
        time.monotonic(),
        body.field,
        bool(body.return_text_in_logprobs),
    )


def _require_tokens(count: int) -> None:
    if count > MAX_TOKENS:
        raise BadRequest(
            f"the choices of score may have {MAX_TOKENS} tokens together, got {count}", param="score"
        )


async def _tokenized(service: Service, asked: _Asked) -> _Tokens:
    prompt, rewritten = await _prompt_ids(service, asked)
    tokens = _Tokens(prompt, await _choice_ids(service, asked.choices), rewritten)
    _check_lengths(service, asked, tokens)
    return tokens


async def _prompt_ids(service: Service, asked: _Asked) -> tuple[Ids, list[int]]:
    """The prompt's ids, and the messages at which it was rewritten."""
    if isinstance(asked.prompt, IdsPrompt):
        return asked.prompt.ids, []
    try:
        found = await _told(service, asked.prompt, asked.place.namespace)
    except BadRequest as e:
        raise from_info(_named(e.info(), asked.field)) from None
    return pack(found["tokens"]), found.get("rewritten", [])


async def _choice_ids(service: Service, choices: Sequence[str | list[int]]) -> list[list[int]]:
    """Texts go on in the midst of a text, whatever was before: each has tokens of its own."""
    texts = [choice for choice in choices if isinstance(choice, str)]
    told = iter(await _continuations(service, texts) if texts else [])
    return [next(told) if isinstance(choice, str) else choice for choice in choices]


async def _continuations(service: Service, texts: list[str]) -> list[list[int]]:
    # The first part begins a prompt, which no choice does: any token will do.
    parts = PartsPrompt([IdsPart(pack([0])), *map(TextPart, texts)])
    try:
        found = await _told(service, parts)
    except BadRequest as e:
        raise from_info(structs.replace(e.info(), param="score")) from None
    ends = np.cumsum(found["parts"]).tolist()
    return [found["tokens"][begin:end] for begin, end in itertools.pairwise(ends)]


async def _told(service: Service, prompt: Prompt, namespace: str = "") -> dict[str, Any]:
    async with service.questions:
        return await service.client.ask(
            "tokenize", None, prompt=prompt, namespace=namespace, options={"texts": False}
        )


def _named(error: ErrorInfo, field: str) -> ErrorInfo:
    """An error of another process, which knows one prompt only."""
    return structs.replace(error, param=field) if error.param == "prompt" else error


def _check_lengths(service: Service, asked: _Asked, tokens: _Tokens) -> None:
    length = len(tokens.prompt) // 4
    if not length:
        raise BadRequest(f"{asked.field} is empty; at least one token is needed", param=asked.field)
    _require_tokens(sum(map(len, tokens.choices)))
    for i, ids in enumerate(tokens.choices):
        if not ids:
            raise BadRequest(
                f"score[{i}] has no tokens; at least one is needed, got {asked.choices[i]!r:.100}",
                param=f"score[{i}]",
            )
        if length + len(ids) > service.longest:
            raise ContextTooLong(
                f"{asked.field} has {length} tokens and score[{i}] {len(ids)}; together they may"
                f" have {service.longest}",
                param=f"score[{i}]",
            )


class _Scoring:
    """One request's rows, as many at a time as the scheduler can run."""

    def __init__(self, service: Service, asked: _Asked, held: Held, tokens: _Tokens, start: Start) -> None:
        self._service = service
        self._asked = asked
        self._held = held
        self._tokens = tokens
        self._start = start
        self._length = len(tokens.prompt) // 4
        self._tree = ChoiceTree(tokens.choices)

    async def run(self) -> Generated:
        rows = self._tree.rows()
        assert len(rows) == 1, "the first row computes the prompt, for all"
        first = await self._judge(rows, self._place_of_first())
        place = self._asked.place._replace(
            # It has had its turn.
            scheduling=structs.replace(self._asked.place.scheduling, queue_timeout=None)
        )
        config = self._service.config
        together = min(config.rows, config.max_queued_requests)
        while rows := self._tree.rows():
            for at in range(0, len(rows), together):
                await self._judge(rows[at : at + together], place)
        return self._generated(first)

    def _place_of_first(self) -> Place:
        place = self._asked.place
        if self._tree.over or self._service.config.disable_radix_cache:
            return place
        keep = max(place.scheduling.keep, KEEP_SECONDS)
        return place._replace(scheduling=structs.replace(place.scheduling, keep=keep))

    async def _judge(self, rows: Sequence[Row], place: Place) -> Outcome:
        streams = await self._start(len(rows), lambda: self._submit(rows, place))
        outcome = Outcome(len(rows), 1)
        try:
            async for batch in merge(streams):
                for i, event in batch:
                    if not isinstance(event, Ended):
                        outcome.add(i, event)
                    elif event.error is not None:
                        raise from_info(_named(event.error, self._asked.field))
        finally:
            for stream in streams:
                stream.cancel()
        for i, row in enumerate(rows):
            if outcome.choices[i].ended.reason == "abort":
                raise Unavailable("the request was aborted before its choices were judged", code="aborted")
            self._tree.tell(row, outcome.prompt_logprobs[i])
        return outcome

    def _submit(self, rows: Sequence[Row], place: Place) -> list[Stream]:
        prompt, length = self._tokens.prompt, self._length
        items: list[tuple[Prompt, SamplingParams]] = [
            (
                IdsPrompt(prompt + pack(row.before + row.path)),
                SamplingParams(
                    max_tokens=0,
                    logprobs=0,
                    logprob_start=length + len(row.before),
                    logprob_ids=row.beside,
                    judges_last=True,
                    seed=0,
                ),
            )
            for row in rows
        ]
        asked, client = self._asked, self._service.client
        if not rows[0].before:
            return self._service.submit(items, place=place, rid=self._held, field=asked.field, streamed=False)
        # What has begun goes on, though others may not begin any more.
        return client.submit_all(
            items, place.namespace, self._held, scheduling=place.scheduling, streamed=False
        )

    def _generated(self, first: Outcome) -> Generated:
        verdict = first.verdict(0)
        meta = MetaInfo(
            self._asked.name,
            LengthReason(0),
            self._length,
            0,
            verdict.matched,
            cache_report(verdict),
            time.monotonic() - self._asked.arrived,
        )
        if self._tokens.rewritten:
            meta.rewritten = self._tokens.rewritten
        scores = [self._score(i) for i in range(len(self._tokens.choices))]
        return Generated("", [], meta, input_ids=unpack(self._tokens.prompt).tolist(), scores=scores)

    def _score(self, choice: int) -> Score:
        judged = self._tree.judged(choice)
        texts = [text for _, _, text in judged] if self._asked.with_texts else UNSET
        return Score([token for token, _, _ in judged], [finite(value) for _, value, _ in judged], texts)
