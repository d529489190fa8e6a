"""What the offline doors run on the loop: any number of requests, side by side as far as there is room."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from sapwood.srt.client import Prompt, Stream, merge
from sapwood.srt.errors import from_info
from sapwood.srt.messages import Chunk, Ended, Read, Started
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import generation, score
from sapwood.srt.server.demands import Demands
from sapwood.srt.server.generation import NativeShape
from sapwood.srt.server.native_protocol import Generated, GenerateRequest
from sapwood.srt.server.outcome import Outcome
from sapwood.srt.server.service import Service
from sapwood.srt.server.tenants import Place

T = TypeVar("T")


class Gate:
    """Lets in at most `limit` prompts at once, first come, first served. Belongs to one asyncio loop.

    A prompt makes room when its stream has ended, even if what came is still to be read: a program that looks
    away from one answer may ask for another.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def start(self, count: int, start: Callable[[], tuple[list[Stream], T]]) -> tuple[list[Stream], T]:
        """What `start` gives, called once there is room for the `count` streams, at most `limit`, that it
        starts."""
        # Only the first in the queue looks for room, so that many small calls cannot starve a large one.
        async with self._turn:
            while self._free < count:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        try:
            streams, rest = start()
        except BaseException:
            self._leave(count)
            raise
        for stream in streams:
            stream.on_end = self._leave
        return streams, rest

    def _leave(self, count: int = 1) -> None:
        self._free += count
        self._freed.set()


class Call(NamedTuple):
    """One call of the Engine: its prompts, each with its checked parameters; `body` says how to answer.

    `names` are the requests' ids: one each, or None, which draws them; `demands` has one for each prompt.
    """

    body: GenerateRequest
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    names: Sequence[str] | None
    demands: Sequence[Demands]

    def part(self, begin: int, end: int) -> Call:
        """The prompts from `begin` to before `end`."""
        text, ids = self.body.text, self.body.input_ids
        names = None if self.names is None else list(self.names[begin:end])
        body = msgspec.structs.replace(
            self.body,
            text=text[begin:end] if isinstance(text, list) else text,
            input_ids=ids[begin:end] if ids and self.body.batched else ids,
            sampling_params=None,
            rid=names,
        )
        return Call(body, self.prompts[begin:end], self.params[begin:end], names, self.demands[begin:end])


class Work(NamedTuple):
    """One prompt whose outcome is wanted as it is."""

    prompt: Prompt
    params: SamplingParams
    place: Place = Place()
    demands: Demands = Demands()


async def side_by_side(
    count: int, limit: int, work: Callable[[int], Awaitable[T]], done: Callable[[], None]
) -> list[T]:
    """`work(0)` to `work(count - 1)`, at most `limit` at a time; `done` is called after each.

    The first error cancels the rest and is raised.
    """
    results: dict[int, T] = {}
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for number in numbers:
            results[number] = await work(number)
            done()

    tasks = [asyncio.create_task(one_after_another()) for _ in range(min(count, limit))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(count)]


async def outcomes(
    service: Service, gate: Gate, items: Sequence[Work], done: Callable[[], None]
) -> list[Outcome]:
    """What each of `items` gives, in order. The first error cancels the rest and is raised."""

    async def one(number: int) -> Outcome:
        prompt, params, place, demands = items[number]

        def start() -> tuple[list[Stream], Outcome]:
            rid = uuid.uuid4().hex
            streams = service.submit(
                [(prompt, params)],
                place=place,
                rid=rid,
                streamed=False,
                constraint=demands.constraint,
                parsing=demands.parsing,
            )
            return streams, Outcome(1, params.n)

        streams, outcome = await gate.start(1, start)
        async for _ in _events(streams, outcome):
            pass
        return outcome

    return await side_by_side(len(items), gate.limit, one, done)


async def gather(service: Service, gate: Gate, call: Call, done: Callable[[], None]) -> list[Generated]:
    """All choices of all prompts, prompt by prompt. The first error cancels the rest and is raised."""

    async def one(number: int) -> list[Generated]:
        streams, shape = await _start(service, gate, call.part(number, number + 1))
        async for _ in _events(streams, shape.outcome):
            pass
        return list(shape.parts())

    answers = await side_by_side(len(call.prompts), gate.limit, one, done)
    return [choice for choices in answers for choice in choices]


async def scored(service: Service, gate: Gate, body: GenerateRequest) -> Generated:
    """The logprobs of a request's choices (see score.py)."""

    async def once_there_is_room(count: int, begin: Callable[[], list[Stream]]) -> list[Stream]:
        streams, _ = await gate.start(count, lambda: (begin(), None))
        return streams

    return await score.answer(service, body, start=once_there_is_room)


async def pieces(service: Service, gate: Gate, call: Call) -> AsyncGenerator[list[Generated], None]:
    """Each choice again and again, each time all of it so far; the last time with its finish reason.

    Prompts beyond what the gate holds begin when those before them have ended.
    """
    first = 0
    for begin in range(0, len(call.prompts), gate.limit):
        streams, shape = await _start(service, gate, call.part(begin, begin + gate.limit))
        async for batch in _events(streams, shape.outcome):
            generated = list(shape.deltas(batch))
            for one in generated:
                if one.index is not UNSET:
                    one.index += first
            if generated:
                yield generated
        first += len(shape.outcome.choices)


async def _start(service: Service, gate: Gate, call: Call) -> tuple[list[Stream], NativeShape]:
    body, prompts, params, _, demands = call
    return await gate.start(len(prompts), lambda: generation.start(service, body, prompts, params, demands))


async def _events(
    streams: Sequence[Stream], outcome: Outcome
) -> AsyncIterator[list[tuple[int, Started | Read | Chunk]]]:
    """What the streams bring, once `outcome` has it. Raises the first error; aborts what is left early."""
    try:
        async for batch in merge(streams):
            events = []
            for i, event in batch:
                if not isinstance(event, Ended):
                    outcome.add(i, event)
                    events.append((i, event))
                elif event.error is not None:
                    raise from_info(event.error)
            yield events
    finally:
        for stream in streams:
            stream.cancel()
