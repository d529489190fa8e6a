"""One request on its way: the text of its choices, where each one ends, and what the server is told."""

from __future__ import annotations

import struct
from typing import Protocol

from msgspec import structs

from sapwood.srt.channel import FRAME_WEIGHT
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.grammar.stop_regex import automaton
from sapwood.srt.messages import (
    Chunk,
    Done,
    Finish,
    Ids,
    Incomplete,
    PromptRead,
    Read,
    TextLogprob,
    TokenLogprob,
    unpack,
)
from sapwood.srt.params import Constraint, Parsing, SamplingParams
from sapwood.srt.tokenizer.background import safely
from sapwood.srt.tokenizer.detokenizer import NoText, TextStream
from sapwood.srt.tokenizer.kept import Borders
from sapwood.srt.tokenizer.parsers.output import OutputParser, Told, marks_of
from sapwood.srt.tokenizer.parsers.thinking import state_of_prompt
from sapwood.srt.tokenizer.partial_json import JsonScanner
from sapwood.srt.tokenizer.stops import StopScanner, StopStrings

_INT32 = struct.Struct("<i").pack

WHOLE_PIECE = 256
"""Tokens in a Chunk that nobody sees by itself: enough to make its cost nothing, and few to hold."""


TAIL = 16
"""Tokens at the end of a prompt that tell whether it has begun the reasoning."""


class Texts(Protocol):
    """What a request needs of a Vocabulary."""

    def stream(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> TextStream: ...

    def describe(self, token: int) -> tuple[str, bytes]: ...


class NoTexts:
    """The vocabulary of a server that takes token ids only."""

    def stream(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> TextStream:
        return NoText()

    def describe(self, token: int) -> tuple[str, bytes]:
        return "", b""


def named(texts: Texts, value: TokenLogprob, logprob_ids: list[int]) -> TextLogprob:
    """A logprob with the text and the bytes of each token; its `chosen` values are those of `logprob_ids`."""
    describe = texts.describe
    top = [(token, logprob, *describe(token)) for token, logprob in value.top]
    further = zip(logprob_ids, value.chosen, strict=True)
    chosen = [(token, logprob, *describe(token)) for token, logprob in further]
    return TextLogprob(value.id, value.logprob, *describe(value.id), top, chosen)


class Choice:
    """One choice's output. `push` takes its tokens in order; `chunk` gives what the server has not had yet.

    `hit` is the output token at which a stop string was complete, or a match of a pattern. From there on
    tokens are surplus.
    A token that may be the end (EOS, a stop id) is kept from the text until it is known whether it was.
    Once something was to be seen, a chunk is `due` when `piece` tokens wait for it.
    """

    __slots__ = (
        "_borders",
        "_held",
        "_ids",
        "_json",
        "_least",
        "_logprobs",
        "_min_tokens",
        "_parser",
        "_parts",
        "_piece",
        "_scanner",
        "_stop_ids",
        "_stream",
        "_texts",
        "_wait",
        "count",
        "dirty",
        "hit",
        "index",
        "request",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        texts: Texts,
        stop_ids: frozenset[int],
        scanner: StopScanner | None,
        piece: int = 1,
        parser: OutputParser | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.count = 0
        self.hit: int | None = None
        self.dirty = False
        shown = [] if parser is None else [request.marks]
        self._stream = texts.stream(params.skip_special_tokens, *shown)
        self._texts = texts
        self._parser = parser
        kind = request.constraint.kind if request.constraint is not None else ""
        self._json = JsonScanner() if kind == "json_schema" else None
        self._scanner = scanner
        self._borders = Borders() if scanner is not None else None
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens
        self._held: int | None = None
        self._parts: list[str] = []
        self._ids = bytearray()
        self._piece = piece
        self._least = 1
        # Without a reader of pieces, or text in them, any first token will do.
        self._wait = request.streamed and not isinstance(texts, NoTexts)
        self._logprobs: list[TextLogprob] | None = None if params.logprobs is None else []

    def push(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Take the next token. True if a stop string or pattern is complete now, for the first time."""
        if self.hit is not None:
            return False
        if self._held is not None and self._release():
            return True
        self.count += 1
        self._ids += _INT32(token)
        if logprob is not None and self._logprobs is not None:
            self._logprobs.append(named(self._texts, logprob, self.request.params.logprob_ids))
        if token in self._stop_ids:
            self._held = token
            return False
        return self._spell(token)

    def _release(self) -> bool:
        """The token that was kept back did not end the choice: show it."""
        assert self._held is not None
        token, self._held = self._held, None
        return self._spell(token)

    def _spell(self, token: int) -> bool:
        text = self._stream.push(token)
        if self._borders is not None:
            self._borders.token(text, self._stream.pending())
        return bool(text) and self._show(text)

    def _show(self, text: str) -> bool:
        scanner = self._scanner
        if scanner is not None and self._borders is not None:
            text = scanner.feed(text, self.count >= self._min_tokens)
            self._borders.show(len(text))
            if scanner.matched is not None:
                self.hit = self.count
        if text:
            self._parts.append(text)
        return self.hit is not None

    @property
    def due(self) -> bool:
        """Whether what is new should go out."""
        return len(self._ids) >= 4 * self._least

    def chunk(self, finish: Finish | None = None) -> Chunk | None:
        """All that is new; None if that is nothing."""
        self.dirty = False
        if finish is None and not self._ids and not self._parts:
            return None
        logprobs = self._logprobs
        told = self._told("".join(self._parts), last=finish is not None)
        if finish is not None:
            finish = self._judged(finish)
        name = (self.request.rid, self.index)
        chunk = Chunk(
            *name, told.content, bytes(self._ids), logprobs, finish, told.reasoning, list(told.calls)
        )
        if any(told) or not self._wait:
            self._least = self._piece
        self._parts.clear()
        self._ids.clear()
        if logprobs is not None:
            self._logprobs = []
        return chunk

    def _told(self, text: str, last: bool) -> Told:
        """A piece of the text, taken apart; nothing if that fails, which ends the request."""
        if self._parser is None and self._json is None:
            return Told(content=text)
        told = safely(lambda piece: self._taken_apart(piece, last), text, "the output could not be parsed")
        if isinstance(told, ErrorInfo):
            self.request.failed = told
            return Told()
        return told

    def _taken_apart(self, text: str, last: bool) -> Told:
        told = Told(content=text)
        if self._parser is not None:
            told = self._parser.feed(text)
            if last:
                told = told.and_then(self._parser.finish())
        if self._json is not None:
            self._json.feed(told.content)
        return told

    def _judged(self, finish: Finish) -> Finish:
        """What the text says of its end: that it was to call tools, or where a document was cut off.

        Calls count only where the output has ended by itself, and not by a stop string.
        """
        if finish.reason == "stop" and not isinstance(finish.matched, str):
            called = self._parser is not None and self._parser.called
            return structs.replace(finish, reason="tool_calls") if called else finish
        if finish.reason != "length" or self.request.constraint is None:
            return finish
        return structs.replace(finish, incomplete=self._place())

    def _place(self) -> Incomplete | None:
        """Where a constrained output stands; None if it is a whole document."""
        scanner = self._json
        if scanner is not None and not scanner.broken:
            return scanner.place
        place = self._parser.place if self._parser is not None else None
        return place or Incomplete("", "text")

    def finish(self, done: Done) -> Chunk | None:
        """The last chunk. Where a stop string and another end have crossed, the lower position is the end."""
        rest = self._flush(done) if self.hit is None else ""
        drafts = (None, done.drafted, done.accepted)
        if self.hit is not None and self._scanner is not None and self.hit <= done.n:
            kept = None if self._borders is None else self._borders.kept(rest)
            return self.chunk(Finish("stop", self._scanner.matched, self.hit, *drafts, kept))
        assert done.reason != "error"
        return self.chunk(Finish(done.reason, done.matched, done.n, *drafts))

    def _flush(self, done: Done) -> str:
        """Show what was held: the beginning of a stop string that never came, and incomplete characters.
        The latter are returned."""
        ended_by = done.matched if done.reason == "stop" else None
        if self._held is not None and self._held != ended_by:
            self._release()
        rest = ""
        if self.hit is None and (rest := self._stream.finish()):
            self._show(rest)
        if self.hit is None and self._scanner is not None:
            self._parts.append(self._scanner.release())
        return rest


class Request:
    """A request from its Generate to its Ended. `open` choices have not had their finish yet; `unnamed`
    messages about its prompt wait for their tokens' texts, and all that comes after them waits too. It has
    `failed` if what came of it cannot be told."""

    __slots__ = (
        "cancelled", "constraint", "failed", "key", "open", "params", "parsing", "prompt", "rewritten", "rid",
        "streamed", "submitted", "unnamed", "warnings",
    )  # fmt: skip

    def __init__(
        self,
        rid: str,
        key: int,
        params: SamplingParams,
        streamed: bool = True,
        constraint: Constraint | None = None,
        parsing: Parsing | None = None,
    ) -> None:
        self.rid = rid
        self.key = key
        self.params = params
        self.streamed = streamed
        self.constraint = constraint
        self.parsing = parsing
        self.open = params.n
        self.prompt: Ids = b""
        self.unnamed = 0
        self.warnings: list[str] = []
        self.rewritten: list[int] = []
        self.submitted = False
        self.cancelled = False
        self.failed: ErrorInfo | None = None

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that its parser must see."""
        return frozenset() if self.parsing is None else marks_of(self.parsing)

    def settle(self, texts: Texts, prompt: Ids) -> None:
        """See from the end of the prompt where the reasoning stands: begun, or over, so that a constraint is
        in force at once."""
        parsing = self.parsing
        if parsing is None or not parsing.reasoning_format:
            return
        tail = "".join(texts.describe(token)[0] for token in unpack(prompt)[-TAIL:].tolist())
        state = state_of_prompt(tail)
        if state == "open":
            self.parsing = structs.replace(parsing, reasons=True)
            if self.constraint is not None:
                self.constraint = structs.replace(self.constraint, opening="")
        elif state == "closed":
            self.parsing = structs.replace(parsing, reasoning_format="", reasons=False)
            if self.constraint is not None:
                self.constraint = structs.replace(self.constraint, after="", opening="")

    def read(self, texts: Texts, message: PromptRead) -> Read:
        """What was read of the prompt, for the server."""
        values = [named(texts, value, self.params.logprob_ids) for value in message.logprobs]
        return Read(self.rid, message.start, values, message.pooled)

    def choices(self, texts: Texts, eos_ids: list[int], interval: int = 1) -> list[Choice]:
        """A new state for each choice; a stream's chunks hold `interval` tokens."""
        params = self.params
        # A constraint allows EOS at its end only.
        ends = [] if params.ignore_eos and self.constraint is None else eos_ids
        stop_ids = frozenset((*params.stop_token_ids, *ends))
        piece = self._piece(interval)
        scanners = self._scanners()
        return [
            Choice(self, index, texts, stop_ids, scanner, piece, self._parser())
            for index, scanner in enumerate(scanners)
        ]

    def _scanners(self) -> list[StopScanner | None]:
        """What each choice's text is scanned by; what the choices share is made once."""
        params = self.params
        if not params.stop and not params.stop_regex:
            return [None] * params.n
        stops, names = StopStrings(params.stop), params.stop_regex
        patterns = automaton(tuple(names)) if names else None
        return [StopScanner(stops, patterns, names) for _ in range(params.n)]

    def _parser(self) -> OutputParser | None:
        parsing = self.parsing
        tells = parsing is not None and bool(parsing.tool_format or parsing.reasoning_format)
        return OutputParser(parsing, parsing.reasons) if parsing is not None and tells else None

    def _piece(self, interval: int) -> int:
        """Tokens that a chunk waits for: with their logprobs they are no more than a frame."""
        params = self.params
        each = 1 if params.logprobs is None else 1 + params.logprobs + len(params.logprob_ids)
        return max(1, min(interval if self.streamed else WHOLE_PIECE, FRAME_WEIGHT // each))
