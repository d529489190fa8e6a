"""A backend without a model, for the tests of programs: it says what it is told to, or the last text."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from sapwood.lang.backend import (
    Answer,
    Call,
    Content,
    Fill,
    Generate,
    Ids,
    Output,
    Piece,
    Score,
    Scored,
    Segments,
    Text,
    Turn,
)
from sapwood.lang.errors import LangError, Unsupported

Rule = Callable[[Any], Any]

BEGIN, END = 0x110000, 0x110001
"""Token ids around a message, next after the last character's. All other ids are characters."""


class Echo:
    """Answers at once, and always the same way. One token is one character.

    `answers` is what outputs say: a list, whose items are used in the order of the calls; a function of the
    call (Generate or Score; it may be `async`); or nothing, for the last text that was sent. An answer is a
    text, or a list of one for each output of `n`; for a `select` it is the choice that wins, and with nothing
    the first one does. Stop strings and `max_new_tokens` cut it; no other sampling parameter changes it.

    `fail(call)` may give an exception to be raised for a call; `delay` are the seconds that each takes, or a
    function of the call; `unsupported` names fields of Sampling that `check` refuses.

    What happened is kept: `calls` in order, `done` and `cancelled` ones, programs that have `ended`, and the
    `most` calls that ran at one time.

    >>> import sapwood as sgl
    >>> backend = sgl.Echo(["Paris"])
    >>> @sgl.function
    ... def program(s):
    ...     s += "The capital is " + sgl.gen("city")
    >>> program.run(backend=backend)["city"]
    'Paris'
    >>> backend.calls[0].segments
    (Text(text='The capital is ', special=False),)
    """

    def __init__(
        self,
        answers: Sequence[Any] | Rule | None = None,
        *,
        delay: float | Callable[[Call], float] = 0.0,
        fail: Callable[[Call], BaseException | None] | None = None,
        unsupported: Sequence[str] = (),
    ) -> None:
        if isinstance(answers, str):
            raise TypeError(f"answers is a list of them or a rule, not one text: [{answers!r}]")
        self._rule = answers if callable(answers) else None
        self._list = iter(answers) if answers is not None and not callable(answers) else None
        self._delay = delay
        self._fail = fail
        self._unsupported = tuple(unsupported)
        self.calls: list[Call] = []
        self.done: list[Call] = []
        self.cancelled: list[Call] = []
        self.ended: list[str] = []
        self.running = 0
        self.most = 0

    def check(self, call: Call) -> None:
        """Refuse what is not to be supported."""
        if isinstance(call, Generate):
            for field in self._unsupported:
                if getattr(call.sampling, field) not in (None, ()):
                    raise Unsupported(f"{field} is not supported", field)

    async def generate(self, call: Generate) -> Answer:
        """All outputs."""
        with self._call(call):
            texts = await self._answer(call)
            await self._wait(call)
        return Answer(outputs=[_output(call, text) for text in texts], input_ids=ids_of(call.segments))

    async def stream(self, call: Generate) -> AsyncIterator[Piece]:
        """The outputs, word by word, the whole taking as long as one that is not streamed."""
        with self._call(call):
            outputs = [_output(call, text) for text in await self._answer(call)]
            await self._wait(call)
            for choice, output in enumerate(outputs):
                for word in _words(output.text):
                    await asyncio.sleep(0)
                    yield Piece(choice=choice, text=word)
                yield Piece(choice=choice, text="", output=output, input_ids=ids_of(call.segments))

    async def score(self, call: Score) -> Answer:
        """The winner's tokens have a logprob of -0.5 each, all others' one of -5.0."""
        with self._call(call):
            won = await self._said(call)
            await self._wait(call)
        if won is not None and won not in call.choices:
            raise LangError(f"Echo was told to choose {won!r}, which is none of {list(call.choices)}")
        winner = call.choices.index(won) if won is not None else 0
        scored = [_scored(call, i, -0.5 if i == winner else -5.0) for i in range(len(call.choices))]
        return Answer(scored=scored, input_ids=ids_of(call.segments))

    async def fill(self, call: Fill) -> Answer:
        """The ids."""
        with self._call(call):
            await self._wait(call)
        return Answer(input_ids=ids_of(call.segments))

    async def end(self, program: str) -> dict[str, Any] | None:
        """How many requests the program has made."""
        self.ended.append(program)
        return {"requests": sum(call.program == program for call in self.calls)}

    async def flush_cache(self) -> None:
        """There is none."""

    async def server_info(self) -> dict[str, Any]:
        """Its name."""
        return {"backend": "echo"}

    async def aclose(self) -> None:
        """Nothing is open."""

    @contextlib.contextmanager
    def _call(self, call: Call) -> Iterator[None]:
        self.calls.append(call)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield
            self.done.append(call)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(call)
            raise
        finally:
            self.running -= 1

    async def _wait(self, call: Call) -> None:
        await asyncio.sleep(self._delay(call) if callable(self._delay) else self._delay)
        if self._fail is not None and (error := self._fail(call)) is not None:
            raise error

    async def _said(self, call: Generate | Score) -> Any:
        if self._list is not None:
            try:
                return next(self._list)
            except StopIteration:
                raise LangError(f"Echo has no answer left for call {len(self.calls)}") from None
        if self._rule is None:
            return None
        said = self._rule(call)
        return await said if inspect.isawaitable(said) else said

    async def _answer(self, call: Generate) -> list[str]:
        said = await self._said(call)
        if said is None:
            said = _last_text(call.segments)
        several = call.sampling.n or 1
        texts = [said] * several if isinstance(said, str) else list(said)
        if len(texts) != several:
            raise LangError(f"Echo was told {len(texts)} outputs, and n is {several}")
        return texts


def _scored(call: Score, number: int, logprob: float) -> Scored:
    tokens = tuple(map(ord, call.choices[number]))
    alone = (-1.0,) * len(tokens) if call.unconditional else ()
    return Scored(ids=tokens, logprobs=(logprob,) * len(tokens), unconditional=alone)


def _output(call: Generate, text: str) -> Output:
    cut = min((at for stop in call.sampling.stop or () if (at := text.find(stop)) >= 0), default=-1)
    reason: dict[str, Any] = {"type": "stop"}
    if cut >= 0:
        text = text[:cut]
    if call.sampling.max_new_tokens is not None and len(text) > call.sampling.max_new_tokens:
        text, reason = text[: call.sampling.max_new_tokens], {"type": "length"}
    meta = {
        "finish_reason": reason,
        "prompt_tokens": len(ids_of(call.segments)),
        "completion_tokens": len(text),
    }
    return Output(text=text, content=(Ids(tuple(map(ord, text)), text),) if text else (), meta=meta)


def _words(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        space = text.find(" ", start + 1)
        end = space if space >= 0 else len(text)
        yield text[start:end]
        start = end


def ids_of(segments: Segments) -> tuple[int, ...]:
    """The tokens of a state: characters, with messages between BEGIN, role and END."""
    found: list[int] = []
    for segment in segments:
        if isinstance(segment, Turn):
            found += (BEGIN, *map(ord, segment.role + "\n"), *_ids_of(segment.content))
            found += () if segment.open else (END,)
        else:
            found += _ids_of((segment,))
    return tuple(found)


def _ids_of(content: Content) -> list[int]:
    return [i for part in content for i in (part.ids if isinstance(part, Ids) else map(ord, part.text))]


def _last_text(segments: Segments) -> str:
    """The last text that is there: of an open message that says nothing yet, the one before."""
    for segment in reversed(segments):
        parts: Content = segment.content if isinstance(segment, Turn) else (segment,)
        text = "".join(part.text for part in parts if isinstance(part, (Text, Ids)))
        if text:
            return text
    return ""
