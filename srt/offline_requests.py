"""Requests of the offline Engine: checked as over HTTP, run side by side, gathered or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from sapwood.srt import messages
from sapwood.srt.client import Prompt, Stream, merge
from sapwood.srt.errors import BadRequest, from_info
from sapwood.srt.messages import Chunk, Ended, Read, Started
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import generation, native_protocol
from sapwood.srt.server.chat_prompt import chat_prompt
from sapwood.srt.server.native_protocol import Generated, GenerateRequest, NativeSampling
from sapwood.srt.server.protocol import ChatRequest
from sapwood.srt.server.service import Service

T = TypeVar("T")

Sampling = dict[str, Any] | SamplingParams

_SYNONYMS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class Call(NamedTuple):
    """One call of the Engine: its prompts, each with its checked parameters; `body` says how to answer."""

    body: GenerateRequest
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]


def generate(service: Service, values: dict[str, Any], sampling: Sampling | list[Sampling] | None) -> Call:
    """A call to go on with bare prompts; `values` are fields of `/generate`. Raises BadRequest."""
    body = _convert(values, GenerateRequest)
    prompts = generation.prompts(service, body)
    return _call(service, body, prompts, sampling)


def chat(service: Service, values: dict[str, Any], chat: dict[str, Any], sampling: Sampling | None) -> Call:
    """A call to answer a chat; `chat` are fields of a chat request. Raises BadRequest."""
    prompt = chat_prompt(_convert(chat, ChatRequest))
    return _call(service, _convert(values, GenerateRequest), [prompt], sampling)


def _call(
    service: Service,
    body: GenerateRequest,
    prompts: Sequence[Prompt],
    sampling: Sampling | list[Sampling] | None,
) -> Call:
    for prompt in prompts:
        _check_encodable(prompt)
    logprobs = generation.wanted_logprobs(body)
    vocab_size = service.source.vocab_size
    if not isinstance(sampling, (list, tuple)):
        return Call(body, prompts, [_params(sampling or {}, logprobs, vocab_size)] * len(prompts))
    if len(sampling) != len(prompts):
        raise BadRequest(
            f"sampling_params must have one entry for each of the {len(prompts)} prompts, "
            f"got {len(sampling)}",
            param="sampling_params",
        )
    return Call(body, prompts, [_params(one, logprobs, vocab_size) for one in sampling])


def _params(given: Sampling, logprobs: int | None, vocab_size: int) -> SamplingParams:
    """Checked parameters; how many logprobs there are, the call says."""
    if isinstance(given, SamplingParams):
        values = {**msgspec.structs.asdict(given), "logprobs": logprobs}
        return _convert(values, SamplingParams).check(vocab_size)
    spelled: dict[str, Any] = {}
    for name, value in given.items():
        name = _SYNONYMS.get(name, name)
        if name in spelled:
            raise BadRequest(f"{name} is given twice", param=name)
        spelled[name] = value
    return native_protocol.sampling_params(_convert(spelled, NativeSampling), logprobs, vocab_size)


def _convert(values: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as e:
        raise BadRequest(str(e)) from None


def _check_encodable(prompt: Prompt) -> None:
    try:
        messages.encode([prompt])
    except UnicodeEncodeError:
        raise BadRequest("a text has a lone surrogate") from None
    except (TypeError, OverflowError) as e:
        raise BadRequest(f"a chat message holds what JSON cannot: {e}") from None


async def gather(
    service: Service, gate: asyncio.Semaphore, call: Call, done: Callable[[], None]
) -> list[Generated]:
    """All choices of all prompts, prompt by prompt. The first error cancels the rest and is raised.

    The prompts run side by side, as many as `gate` lets in; `done` is called after each.
    """
    tasks = [asyncio.create_task(_whole(service, gate, one, done)) for one in _split(call)]
    try:
        return [choice for choices in await asyncio.gather(*tasks) for choice in choices]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _split(call: Call) -> list[Call]:
    """A call for each prompt. One rid for all is told apart by a number."""
    count = len(call.prompts)
    rids = call.body.rid
    if isinstance(rids, str) and count > 1:
        rids = [f"{rids}_{i}" for i in range(count)]
    if not isinstance(rids, list):
        rids = [rids] * count  # type: ignore[list-item]
    if len(rids) != count:
        raise BadRequest(
            f"rid must have one entry for each of the {count} prompts, got {len(rids)}", param="rid"
        )
    return [
        Call(msgspec.structs.replace(call.body, text=None, input_ids=None, rid=rid), [prompt], [params])
        for rid, prompt, params in zip(rids, call.prompts, call.params, strict=True)
    ]


async def _whole(
    service: Service, gate: asyncio.Semaphore, call: Call, done: Callable[[], None]
) -> list[Generated]:
    async with gate:
        streams, shape = generation.start(service, *call)
        async for _ in _events(streams, shape):
            pass
    done()
    whole = shape.whole()
    return whole if isinstance(whole, list) else [whole]


async def pieces(
    service: Service, gate: asyncio.Semaphore, call: Call
) -> AsyncGenerator[list[Generated], None]:
    """Each choice again and again, each time all of it so far; the last time with its finish reason."""
    async with gate:
        streams, shape = generation.start(service, *call)
        async for batch in _events(streams, shape):
            if generated := list(shape.deltas(batch)):
                yield generated


async def _events(
    streams: Sequence[Stream], shape: generation.NativeShape
) -> AsyncIterator[list[tuple[int, Started | Read | Chunk]]]:
    """What the streams bring, once `shape` has it. Raises the first error; aborts what is left early."""
    try:
        async for batch in merge(streams):
            events = []
            for i, event in batch:
                if not isinstance(event, Ended):
                    shape.outcome.add(i, event)
                    events.append((i, event))
                elif event.error is not None:
                    raise from_info(event.error)
            yield events
    finally:
        for stream in streams:
            stream.cancel()
