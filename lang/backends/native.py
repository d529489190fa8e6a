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
from sapwood.lang.backends.answers import Asking, reading
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
        got = await self._post("/generate", _generation(call))
        with reading("/generate", got):
            every = got if isinstance(got, list) else [got]
            return Answer(
                outputs=[_output(one) for one, _ in zip(every, range(call.sampling.n or 1), strict=True)],
                input_ids=_input_ids(every[0]),
                rewritten=_rewritten(every[0]),
            )

    async def stream(self, call: Generate) -> AsyncIterator[Piece]:
        """Raises RequestFailed if the stream ends before every output has."""
        outputs = _Outputs(call.sampling.n or 1)
        events = self.door.events("/generate", {**_generation(call), "stream": True})
        try:
            with Asking():
                async for event in events:
                    with reading("/generate", event):
                        piece = outputs.add(event)
                    if piece.text or piece.output is not None:
                        yield piece
        finally:
            await _close(events)
        if outputs.left:
            raise RequestFailed("the stream has ended before the output")

    async def score(self, call: Score) -> Answer:
        body = {"input": _parts(call.segments), "score": list(call.choices), **_program(call.program)}
        got = await self._post("/generate", body)
        with reading("/generate", got):
            scored = _scores(got, len(call.choices))
            told = (_input_ids(got), _rewritten(got), dict(got["meta_info"]))
        answer = Answer(scored=scored, input_ids=told[0], rewritten=told[1], meta=told[2])
        if call.unconditional:
            alone = await self._alone([[*one.ids] for one in scored])
            for one, other in zip(scored, alone, strict=True):
                one.unconditional = other.logprobs
        return answer

    async def fill(self, call: Fill) -> Answer:
        self.check(call)
        body = {
            "input": _parts(call.segments),
            "sampling_params": {"max_new_tokens": 0},
            **_program(call.program),
        }
        got = await self._post("/generate", body)
        with reading("/generate", got):
            return Answer(input_ids=_input_ids(got), rewritten=_rewritten(got))

    async def end(self, program: str) -> dict[str, Any] | None:
        """None if the runtime does not know the program: it has asked for nothing, or long ago."""
        try:
            told: dict[str, Any] = await self._post("/programs/end", {"program": program})
        except RequestFailed as e:
            if e.status == 404:
                return None
            raise
        return told

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._post("/server_info", {})
        return info

    async def aclose(self) -> None:
        close = getattr(self.door, "aclose", None)
        if close is not None:
            await close()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        with Asking():
            return await self.door.post(path, body)

    async def _scores(self, prompt: list[Any], choices: list[list[int]]) -> list[Scored]:
        got = await self._post("/generate", {"input": prompt, "score": choices})
        with reading("/generate", got):
            return _scores(got, len(choices))

    async def _alone(self, choices: list[list[int]]) -> list[Scored]:
        """The choices' logprobs at a document's beginning."""
        if self._beginning is not None:
            return await self._scores(self._beginning, choices)
        try:
            scores = await self._scores([""], choices)
            self._beginning = [""]
        except RequestFailed as e:
            # Without BOS an empty text is no prompt.
            if e.status != 400:
                raise
            info = await self.server_info()
            with reading("/server_info", info):
                eos = info["source"]["eos_ids"]
            if not eos:
                raise LangError("the model has neither BOS nor EOS: nothing begins a document") from e
            beginning = [eos[0]]
            scores = await self._scores(beginning, choices)
            self._beginning = beginning
        return scores


class _Outputs:
    """The outputs of a stream. `left`: those that have not ended."""

    def __init__(self, count: int) -> None:
        self.left = set(range(count))
        self._texts = [""] * count
        self._grown: list[dict[str, list[Any]]] = [{} for _ in range(count)]
        self._ids: tuple[int, ...] | None = None

    def add(self, event: dict[str, Any]) -> Piece:
        """What is new in an event."""
        choice, meta, text = event.get("index", 0), event["meta_info"], event["text"]
        new, self._texts[choice] = text[len(self._texts[choice]) :], text
        _grow(self._grown[choice], meta)
        if meta.get("finish_reason") is None:
            return Piece(choice=choice, text=new)
        self.left.discard(choice)
        meta.update(self._grown[choice])
        # They come with the first choice, which may end before others.
        self._ids = self._ids or _input_ids(event)
        return Piece(
            choice=choice,
            text=new,
            output=_output(event),
            input_ids=self._ids,
            rewritten=_rewritten(event),
        )


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


def _scores(got: dict[str, Any], count: int) -> list[Scored]:
    return [
        Scored(ids=tuple(one["ids"]), logprobs=tuple(one["logprobs"]))
        for one, _ in zip(got["scores"], range(count), strict=True)
    ]


def _output(generated: dict[str, Any]) -> Output:
    meta = {**generated["meta_info"], "output_ids": generated["output_ids"]}
    text = msgspec.convert(generated["text"], str)
    return Output(text=text, content=_content(generated), meta=meta)


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
