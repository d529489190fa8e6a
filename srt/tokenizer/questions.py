"""Questions: what the tokenizer knows it answers itself; the others go on to the scheduler, and their answers
come back with text.

    Ask ──thread──► Answer                                        tokenize, detokenize
    Ask ──thread──► ids ──► scheduler ──► Answer ──thread──► Answer with text      explain
    Ask ──► scheduler ──► Answer ──thread──► Answer with text                      tree

Long ones and chats have threads of their own: whoever asks them, and does not even wait, holds up only those
who ask such.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sapwood.srt.errors import BadRequest, ErrorInfo, Overloaded, Unavailable
from sapwood.srt.messages import ASK_SECONDS, Answer, AnyPrompt, Ask, ChatPrompt, Ids, IdsPrompt, PartsPrompt
from sapwood.srt.tokenizer.background import LONG_CHARS, Background, is_chat, size_of
from sapwood.srt.tokenizer.delivery import Sender
from sapwood.srt.tokenizer.explained import detokenized, explained, pictured, tokenized
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.requests import NoTexts, Texts

MAX_TOKENS = 1_000_000
"""Tokens of one answer: the streams wait while it is written."""
MAX_PENDING = 256
"""Questions that may wait for the threads of their kind."""
MAX_PENDING_BYTES = 16 * 2**20
"""What those may hold together; one alone may be larger."""


class _Asked(NamedTuple):
    """A question with the ids of its prompt, and the scheduler's answer to it, if that has come. `since` is
    `time.monotonic()` of its arrival, `size` about the bytes of its prompt."""

    ask: Ask
    since: float
    size: int
    ids: Ids = b""
    answer: Answer | None = None


class Questions:
    """The questions of one tokenizer process; what takes long is done in threads, so that no stream waits."""

    def __init__(
        self,
        index: int,
        encoder: PromptEncoder,
        texts: Texts,
        scheduler: Sender,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._index = index
        self._encoder = encoder
        self._texts = texts
        self._scheduler = scheduler
        self._asked: dict[int, _Asked] = {}
        self._working: dict[int, _Asked] = {}
        self._short, self._long, self._chats = (_lane(self._work, wake) for _ in range(3))

    def ask(self, ask: Ask) -> Iterator[Answer]:
        """Take a question in; if it can be answered at once, the answer."""
        if ask.what == "cancel":
            self._cancel(ask.call)
            return
        asked = _Asked(ask, time.monotonic(), 0 if ask.prompt is None else size_of(ask.prompt))
        if ask.what not in ("tokenize", "detokenize", "explain"):
            yield from self._pass_on(asked)
        elif (full := _full(self._lane_of(asked), asked.size)) is not None:
            yield Answer(ask.call, full.info(), {})
        else:
            self._put(asked)

    def answered(self, answer: Answer) -> Iterator[Answer]:
        """Take the scheduler's answer in; if no text is missing it goes on as it is."""
        asked = self._asked.pop(answer.call, None)
        if asked is None or answer.error is not None or asked.ask.what not in ("explain", "tree"):
            yield answer
        else:
            self._put(asked._replace(answer=answer))

    def finished(self) -> Iterator[Answer]:
        """The answers that have become ready."""
        for lane in (self._short, self._chats, self._long):
            for job, result in lane.finished():
                if self._working.pop(job.ask.call, None) is None:
                    continue  # cancelled
                if isinstance(result, ErrorInfo):
                    yield Answer(job.ask.call, result, {})
                elif isinstance(result, Answer):
                    yield result
                else:
                    yield from self._pass_on(result)

    def _put(self, asked: _Asked) -> None:
        self._working[asked.ask.call] = asked
        self._lane_of(asked).put(asked)

    def _lane_of(self, asked: _Asked) -> _Lane:
        if asked.size > (4 * LONG_CHARS if isinstance(asked.ask.prompt, IdsPrompt) else LONG_CHARS):
            return self._long
        return self._chats if is_chat(asked.ask.prompt) else self._short

    def _cancel(self, call: int) -> None:
        """Nobody waits for the answer any more: give what it takes to others."""
        self._asked.pop(call, None)
        asked = self._working.pop(call, None)
        if asked is None or self._lane_of(asked).drop(lambda job: job.ask.call == call):
            return
        if asked.ask.prompt is not None and is_chat(asked.ask.prompt):
            self._encoder.stop(asked.ask.prompt)

    def _pass_on(self, asked: _Asked) -> Iterator[Answer]:
        ask = asked.ask
        prompt = IdsPrompt(asked.ids) if asked.ids else None
        if self._scheduler.send(Ask(ask.call, ask.what, self._index, prompt, ask.namespace, ask.options)):
            self._asked[ask.call] = asked
        else:
            yield Answer(ask.call, Overloaded("the scheduler's queue is full; try again later").info(), {})

    def _work(self, asked: _Asked) -> _Asked | Answer:
        """Runs in a thread."""
        ask, answer = asked.ask, asked.answer
        if time.monotonic() - asked.since > ASK_SECONDS and not ask.patient:
            raise Unavailable(f"{ask.what} was not begun within {ASK_SECONDS:g} s: nobody waits for it now")
        if answer is None and ask.what == "explain":
            return asked._replace(ids=self._encoder.encode(_prompt_of(ask)))
        if answer is None:
            return Answer(ask.call, None, self._own(ask))
        if ask.what == "explain":
            data = explained(ask, asked.ids, answer.data, self._texts, self._render_for(ask))
        else:
            data = pictured(answer.data, self._texts)
        return Answer(ask.call, None, data)

    def _render_for(self, ask: Ask) -> Callable[[ChatPrompt], str]:
        return lambda prompt: self._encoder.render(prompt, ask.prompt)

    def _own(self, ask: Ask) -> dict[str, object]:
        if isinstance(self._texts, NoTexts):
            raise BadRequest(f"{ask.what} needs a tokenizer (--skip-tokenizer-init is set)")
        prompt = _prompt_of(ask)
        told: dict[str, object] = {}
        if isinstance(prompt, PartsPrompt):
            encoded = self._encoder.tokenize_parts(prompt, ask.namespace)
            ids = encoded.ids
            told = {"parts": [*encoded.lengths], "rewritten": [*encoded.rewritten]}
        else:
            ids = self._encoder.tokenize(prompt)
        if len(ids) // 4 > MAX_TOKENS:
            raise BadRequest(
                f"{ask.what} takes at most {MAX_TOKENS} tokens, got {len(ids) // 4}", param="prompt"
            )
        if ask.what == "tokenize":
            return tokenized(ids, self._texts, ask.options.get("texts") is not False) | told
        skips = ask.options.get("skip_special_tokens") is True
        lengths: list[int] | None = ask.options.get("lengths")
        if lengths is None:
            return detokenized(ids, self._texts, skips)
        ends = itertools.accumulate(lengths)
        parts = [ids[4 * (end - length) : 4 * end] for length, end in zip(lengths, ends, strict=True)]
        return {"texts": [detokenized(part, self._texts, skips)["text"] for part in parts]}


_Lane = Background[_Asked, _Asked | Answer]


def _lane(work: Callable[[_Asked], _Asked | Answer], wake: Callable[[], None] | None) -> _Lane:
    return Background(work, "the question could not be answered", wake=wake, weigh=lambda asked: asked.size)


def _full(lane: _Lane, size: int) -> Overloaded | None:
    if lane.pending >= MAX_PENDING:
        return Overloaded(f"{MAX_PENDING} questions wait for the tokenizer; try again later")
    if lane.held and lane.held + size > MAX_PENDING_BYTES:
        return Overloaded(
            f"questions of {lane.held} bytes wait for the tokenizer, and with this one there may be"
            f" {MAX_PENDING_BYTES}; try again later"
        )
    return None


def _prompt_of(ask: Ask) -> AnyPrompt:
    if ask.prompt is None:
        raise BadRequest(f"{ask.what} needs a prompt", param="prompt")
    return ask.prompt
