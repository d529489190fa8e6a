"""What a program's calls were: recorded on their way, counted offline, and made again on another server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import openai

from sapwood.lang.backend import Answer, Backend, Call, Fill, Generate, Piece, Score


@dataclass
class Made:
    """A call: `ids` of its prompt, `outputs` (all ids that were drawn), or the ids of the choices scored;
    `began` and `ended` are seconds of one clock."""

    call: Call
    began: float
    ended: float = 0.0
    ids: tuple[int, ...] = ()
    outputs: list[tuple[int, ...]] = field(default_factory=list)


class Recorder:
    """A Backend that notes what another one is asked and answers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.made: list[Made] = []
        self.reports: list[dict[str, Any]] = []

    def check(self, call: Call) -> None:
        self._backend.check(call)

    async def generate(self, call: Generate) -> Answer:
        return self._note(self._begin(call), await self._backend.generate(call))

    async def stream(self, call: Generate) -> AsyncIterator[Piece]:
        raise NotImplementedError("the programs here do not stream")
        yield

    async def score(self, call: Score) -> Answer:
        return self._note(self._begin(call), await self._backend.score(call))

    async def fill(self, call: Fill) -> Answer:
        return self._note(self._begin(call), await self._backend.fill(call))

    async def end(self, program: str) -> dict[str, Any] | None:
        report = await self._backend.end(program)
        if report is not None:
            self.reports.append(report)
        return report

    async def flush_cache(self) -> None:
        await self._backend.flush_cache()

    async def server_info(self) -> dict[str, Any]:
        return await self._backend.server_info()

    async def aclose(self) -> None:
        await self._backend.aclose()

    def _begin(self, call: Call) -> Made:
        made = Made(call, time.monotonic())
        self.made.append(made)
        return made

    def _note(self, made: Made, answer: Answer) -> Answer:
        made.ended = time.monotonic()
        made.ids = answer.input_ids or ()
        made.outputs = [tuple(output.meta["output_ids"]) for output in answer.outputs]
        made.outputs += [scored.ids for scored in answer.scored]
        return answer


class Counted(NamedTuple):
    """Positions that forward passes have to compute: of prompts, of outputs, and of choices scored, of which
    the last token of each is only judged. `distinct` are the tokens of the programs' prefix tree, `again` the
    last tokens of prompts that were cached as a whole, `unneeded` last tokens that nothing went on from,
    `alike` tokens that were drawn or scored more than once, side by side: the others are
    distinct + again - unneeded + alike.
    """

    prompts: int
    outputs: int
    scored: int
    distinct: int
    again: int
    unneeded: int
    alike: int


class _Trie:
    """Token sequences; each node is a dict of children."""

    def __init__(self) -> None:
        self.root: dict[int, Any] = {}
        self.size = 0

    def match(self, ids: Sequence[int]) -> int:
        node, n = self.root, 0
        for token in ids:
            if token not in node:
                break
            node = node[token]
            n += 1
        return n

    def add(self, ids: Sequence[int]) -> None:
        node = self.root
        for token in ids:
            if token not in node:
                node[token] = {}
                self.size += 1
            node = node[token]


def count(made: Sequence[Made]) -> Counted:
    """What calls cost if nothing that was computed is ever computed again.

    A call finds the prompts of those that began before it, and the outputs of those that had ended.
    """
    known, distinct, needed = _Trie(), _Trie(), _Trie()
    prompts = outputs = scored = again = 0
    ends = sorted(made, key=lambda call: call.ended, reverse=True)
    for call in made:
        while ends and ends[-1].ended <= call.began:
            ended = ends.pop()
            for drawn in ended.outputs:
                known.add((*ended.ids, *drawn[:-1]))
        matched = known.match(call.ids)
        again += matched == len(call.ids)
        prompts += len(call.ids) - min(matched, len(call.ids) - 1)
        known.add(call.ids)
        needed.add(call.ids)
        for drawn in call.outputs:
            distinct.add((*call.ids, *drawn))
            needed.add((*call.ids, *drawn[:-1]))
        if isinstance(call.call, Score):
            scored += len({drawn[:n] for drawn in call.outputs for n in range(1, len(drawn))})
        else:
            outputs += sum(max(0, len(drawn) - 1) for drawn in call.outputs)
        distinct.add(call.ids)
    unneeded = distinct.size - needed.size
    alike = prompts + outputs + scored - again - needed.size
    return Counted(prompts, outputs, scored, distinct.size, again, unneeded, alike)


def reused(counted: Counted, used: dict[str, int]) -> bool:
    """Whether forward passes have computed exactly that, but for surplus steps and refused drafts."""
    decoded = used["decoded_tokens"] + used["accepted_tokens"] - used["surplus_tokens"]
    return used["computed_tokens"] == counted.prompts + counted.scored and decoded == counted.outputs


async def replay_all(made: Sequence[Made], send: Callable[[Made], Awaitable[None]]) -> None:
    """Make the calls again, each once all those have ended that had ended when it began."""
    tasks: list[asyncio.Task[None]] = []

    async def one(call: Made, before: list[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        await send(call)

    for call in made:
        before = [task for other, task in zip(made, tasks, strict=False) if other.ended <= call.began]
        tasks.append(asyncio.create_task(one(call, before)))
    await asyncio.gather(*tasks)


def one_by_one(made: Sequence[Made], url: str) -> None:
    """Make the calls again through the openai client, one after the other: a choice is a completion of no
    tokens whose echo is scored."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600)

    def complete(ids: Sequence[int], **more: Any) -> None:
        client.completions.create(model="default", prompt=[*ids], **more)

    for call in made:
        if isinstance(call.call, Score):
            for ids in call.outputs:
                complete((*call.ids, *ids), max_tokens=0, echo=True, logprobs=0)
        elif isinstance(call.call, Generate):
            complete(call.ids, **_openai_sampling(call))


def _openai_sampling(call: Made) -> dict[str, Any]:
    assert isinstance(call.call, Generate)
    sampling, length = call.call.sampling, max(map(len, call.outputs))
    extra: dict[str, Any] = {"ignore_eos": True}
    if sampling.json_schema is not None:
        extra = {"json_schema": json.loads(sampling.json_schema)}
    if sampling.regex is not None:
        extra = {"regex": sampling.regex}
    return {
        "max_tokens": length,
        "n": sampling.n or 1,
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "seed": sampling.seed,
        "extra_body": extra,
    }


class LlamaCpp:
    """llama.cpp's server, which has no choices of one prompt, and scores nothing: those are calls of their
    own, and a grammar of the choices."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=600)

    async def send(self, call: Made) -> None:
        body: dict[str, Any] = {"prompt": [*call.ids], "cache_prompt": True}
        if isinstance(call.call, Fill):
            await self._complete(body | {"n_predict": 0})
        elif isinstance(call.call, Score):
            options = " | ".join(json.dumps(choice) for choice in call.call.choices)
            longest = max(map(len, call.outputs))
            await self._complete(body | {"n_predict": longest, "grammar": f"root ::= {options}"})
        else:
            sampling = call.call.sampling
            temperature = 1.0 if sampling.temperature is None else sampling.temperature
            body |= {"temperature": temperature}
            if sampling.json_schema is not None:
                body["json_schema"] = json.loads(sampling.json_schema)
            elif sampling.regex is None:
                body["ignore_eos"] = True
            every = [self._complete(body | {"n_predict": len(drawn)}) for drawn in call.outputs]
            await asyncio.gather(*every)

    async def _complete(self, body: dict[str, Any]) -> None:
        (await self._client.post("/completion", json=body)).raise_for_status()
