"""A backend over a runtime's own routes: states travel as parts, and their token ids come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from sapwood.lang.backend import (
    Answer,
    Backend,
    Call,
    Content,
    Door,
    Fill,
    Generate,
    Ids,
    Logprobs,
    Output,
    Piece,
    Sampling,
    Score,
    Scored,
    Segment,
    Segments,
    Text,
    Turn,
)
from sapwood.lang.backends.endpoint import RuntimeEndpoint
from sapwood.lang.errors import LangError, RequestFailed, Unsupported

_METHODS = ("check", "generate", "stream", "score", "fill", "end", "server_info", "aclose")
_KNOWN = "_sapwood_lang_backend"
"""Where a door or a running server has its Native."""
_GROWING = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Meta information of which a stream's event has only what is new; all else in it is of the whole output."""


def of(backend: Any) -> Backend:
    """What answers a program's calls for `backend`: itself, if it is a Backend; Native over it, if it is a
    Door (`sapwood.Engine`, RuntimeEndpoint); over an endpoint at its `url`, if it is a running server
    (`sapwood.Runtime`), which is kept alive. Raises TypeError for anything else."""
    if all(callable(getattr(backend, name, None)) for name in _METHODS):
        found: Backend = backend
        return found
    known = getattr(backend, _KNOWN, None)
    if isinstance(known, Native):
        return known
    door, url = backend, getattr(backend, "url", None)
    if not isinstance(backend, Door) and isinstance(url, str):
        door = RuntimeEndpoint(url, getattr(backend, "api_key", None), owner=backend)
    if isinstance(door, Door):
        made = Native(door)
        # With itself, so that it is made once, and ends with it.
        with contextlib.suppress(AttributeError):
            setattr(backend, _KNOWN, made)
        return made
    raise TypeError(
        "a backend is a RuntimeEndpoint, Runtime, Engine, OpenAI or Echo, or has the methods of "
        f"sapwood.lang.backend.Backend; got {type(backend).__name__}"
    )


class Native:
    """Answers calls by `/generate` of `door`. An output's meta information has all its `output_ids` too.

    For `unconditional` scores a choice stands where a document begins: after what the tokenizer puts before
    every text (BOS), or, where that is nothing, after the model's first EOS id, which ends a document.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self._beginning: list[Any] | None = None

    def check(self, call: Call) -> None:
        """Raises Unsupported for special text within a message, whose content is text and token ids."""
        for turn in call.segments:
            if isinstance(turn, Turn) and any(
                isinstance(part, Text) and part.special for part in turn.content
            ):
                raise Unsupported(
                    f"special text is not supported within a message (role {turn.role})", field="special"
                )

    async def generate(self, call: Generate) -> Answer:
        got = await self.door.post("/generate", _generation(call))
        every = got if isinstance(got, list) else [got]
        return Answer(
            outputs=[_output(one) for one in every],
            input_ids=_input_ids(every[0]),
            rewritten=_rewritten(every[0]),
        )

    async def stream(self, call: Generate) -> AsyncIterator[Piece]:
        """Raises RequestFailed if the stream ends before every output has."""
        left = set(range(call.sampling.n or 1))
        texts = dict.fromkeys(left, "")
        grown: dict[int, dict[str, list[Any]]] = {choice: {} for choice in left}
        ids: tuple[int, ...] | None = None
        events = self.door.events("/generate", {**_generation(call), "stream": True})
        try:
            async for event in events:
                choice = event.get("index", 0)
                _grow(grown[choice], event["meta_info"])
                new, texts[choice] = event["text"][len(texts[choice]) :], event["text"]
                if event["meta_info"].get("finish_reason") is None:
                    if new:
                        yield Piece(choice=choice, text=new)
                    continue
                left.discard(choice)
                event["meta_info"].update(grown[choice])
                # They come with the first choice, which may end before others.
                ids = ids or _input_ids(event)
                yield Piece(
                    choice=choice,
                    text=new,
                    output=_output(event),
                    input_ids=ids,
                    rewritten=_rewritten(event),
                )
        finally:
            await _close(events)
        if left:
            raise RequestFailed("the stream has ended before the output")

    async def score(self, call: Score) -> Answer:
        body = {"input": _parts(call.segments), "score": list(call.choices), **_program(call.program)}
        got = await self.door.post("/generate", body)
        scores = got["scores"]
        alone: list[dict[str, Any]] = [{}] * len(scores)
        if call.unconditional:
            alone = await self._alone([one["ids"] for one in scores])
        scored = [
            Scored(
                ids=tuple(one["ids"]),
                logprobs=tuple(one["logprobs"]),
                unconditional=tuple(other.get("logprobs", ())),
            )
            for one, other in zip(scores, alone, strict=True)
        ]
        return Answer(scored=scored, input_ids=_input_ids(got), rewritten=_rewritten(got))

    async def fill(self, call: Fill) -> Answer:
        self.check(call)
        body = {
            "input": _parts(call.segments),
            "sampling_params": {"max_new_tokens": 0},
            **_program(call.program),
        }
        got = await self.door.post("/generate", body)
        return Answer(input_ids=_input_ids(got), rewritten=_rewritten(got))

    async def end(self, program: str) -> dict[str, Any] | None:
        """None if the runtime does not know the program: it has asked for nothing, or long ago."""
        try:
            told: dict[str, Any] = await self.door.post("/programs/end", {"program": program})
        except RequestFailed as e:
            if e.status == 404:
                return None
            raise
        return told

    async def flush_cache(self) -> None:
        await self.door.post("/flush_cache", {})

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self.door.post("/server_info", {})
        return info

    async def aclose(self) -> None:
        close = getattr(self.door, "aclose", None)
        if close is not None:
            await close()

    async def _scores(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        scores: list[dict[str, Any]] = (await self.door.post("/generate", body))["scores"]
        return scores

    async def _alone(self, choices: list[list[int]]) -> list[dict[str, Any]]:
        """The choices' logprobs at a document's beginning."""
        if self._beginning is not None:
            return await self._scores({"input": self._beginning, "score": choices})
        try:
            scores = await self._scores({"input": [""], "score": choices})
            self._beginning = [""]
        # A 400, of a server or of an engine: without BOS an empty text is no prompt.
        except (RequestFailed, ValueError) as e:
            if getattr(e, "status", 400) != 400:
                raise
            eos = (await self.server_info())["source"]["eos_ids"]
            if not eos:
                raise LangError("the model has neither BOS nor EOS: nothing begins a document") from e
            beginning = [eos[0]]
            scores = await self._scores({"input": beginning, "score": choices})
            self._beginning = beginning
        return scores


def _generation(call: Generate) -> dict[str, Any]:
    body = {
        "input": _parts(call.segments),
        "sampling_params": _sampling(call.sampling),
        **_program(call.program),
    }
    if call.reasoning:
        body["separate_reasoning"] = True
    return body if call.logprobs is None else {**body, **_readings(call.logprobs)}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    given = msgspec.to_builtins(sampling)
    return {name: [*value] if isinstance(value, tuple) else value for name, value in given.items()}


def _readings(logprobs: Logprobs) -> dict[str, Any]:
    return {
        "return_logprob": True,
        "top_logprobs_num": logprobs.top,
        "logprob_start_len": -1 if logprobs.start is None else logprobs.start,
        "return_text_in_logprobs": logprobs.texts,
    }


def _program(program: str) -> dict[str, Any]:
    return {"program": program} if program else {}


def _parts(segments: Segments) -> list[Any]:
    """`input` of `/generate`. Nothing is an empty text, which a tokenizer with BOS makes a prompt of."""
    return [part for segment in segments for part in _part(segment)] or [""]


def _part(segment: Segment) -> Iterator[Any]:
    if isinstance(segment, Turn):
        content = [part for each in segment.content for part in _part(each)]
        turn: dict[str, Any] = {"role": segment.role, "content": content}
        yield {**turn, "open": True} if segment.open else turn
    elif isinstance(segment, Ids):
        if segment.ids:
            yield list(segment.ids)
    elif segment.text:
        yield {"special": segment.text} if segment.special else segment.text


def _output(generated: dict[str, Any]) -> Output:
    meta = {**generated["meta_info"], "output_ids": generated["output_ids"]}
    return Output(text=generated["text"], content=_content(generated), meta=meta)


def _content(generated: dict[str, Any]) -> Content:
    """The ids that were drawn, without a token that ended them; what a stop string has cut off ends within a
    token, of which the text before the cut is left."""
    ids, text, meta = generated["output_ids"], generated["text"], generated["meta_info"]
    matched = (meta.get("finish_reason") or {}).get("matched")
    if isinstance(matched, int):
        ids = ids[:-1] if ids and ids[-1] == matched else ids
        return _nonempty(Ids(tuple(ids), text))
    if matched is None:
        return _nonempty(Ids(tuple(ids), text))
    kept = meta.get("kept") or {"tokens": 0, "rest": text}
    rest = kept["rest"]
    whole = Ids(tuple(ids[: kept["tokens"]]), text[: len(text) - len(rest)])
    return _nonempty(whole, Text(rest))


def _nonempty(*parts: Ids | Text) -> Content:
    return tuple(part for part in parts if (part.ids if isinstance(part, Ids) else part.text))


def _input_ids(generated: dict[str, Any]) -> tuple[int, ...] | None:
    ids: Sequence[int] | None = generated.get("input_ids")
    return None if ids is None else tuple(ids)


def _rewritten(generated: dict[str, Any]) -> tuple[int, ...]:
    return tuple(generated.get("meta_info", {}).get("rewritten", ()))


def _grow(grown: dict[str, list[Any]], meta: dict[str, Any]) -> None:
    for name in _GROWING:
        if name in meta:
            grown.setdefault(name, []).extend(meta[name])


async def _close(events: AsyncIterator[Any]) -> None:
    """Ends an iterator early: a generator that is only dropped would be ended by the collector, some day."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
