"""The tokenizer process: prompts to ids on the way in, ids to text on the way out, each request's one end.

server ──Generate, Abort──► intake ──► encode (chats, long ones: in threads) ──Submit──► scheduler
   ▲                          └─Compile─► grammar process ─Compiled──┘              │
   └─Started, Read, Chunk, Ended─ delivery ◄─ choices: text, stop strings ◄─PromptRead, Tokens, Done
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sapwood.srt import log, messages
from sapwood.srt.channel import FRAME_WEIGHT, Inbox, Outbox, weight
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest, ErrorInfo, ModelError, Overloaded, SapwoodError
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import (
    Abort,
    Admitted,
    Answer,
    Ask,
    Cancel,
    Compiled,
    Done,
    Ended,
    Finish,
    Generate,
    Ids,
    PartsPrompt,
    PromptRead,
    Refused,
    Started,
    Stats,
    StopAt,
    Submit,
    Tokens,
)
from sapwood.srt.orders import Boot, Drain
from sapwood.srt.tokenizer import checks
from sapwood.srt.tokenizer.background import Background, is_chat, is_long, safely
from sapwood.srt.tokenizer.delivery import Delivery, Sender, overloaded
from sapwood.srt.tokenizer.grammars import Grammars
from sapwood.srt.tokenizer.parts import Encoded
from sapwood.srt.tokenizer.prompts import Prompt, PromptEncoder
from sapwood.srt.tokenizer.questions import Questions
from sapwood.srt.tokenizer.recent import Recent
from sapwood.srt.tokenizer.requests import Choice, NoTexts, Request, Texts
from sapwood.srt.tokenizer.vocabulary import Vocabulary, load
from sapwood.srt.tokenizer.waker import Waker

RECENT_SECONDS = 5.0
MAX_RECENT = 4096
INTAKE_SECONDS = 0.004
"""New prompts are encoded for at most this long (and one prompt) between two looks at the inbox."""
IDLE_SECONDS = 1.0
"""Messages end a wait at once; only a command can come this late."""
RETRY_SECONDS = 0.005
CHAT_THREADS = 2
NOT_ENCODED = "the prompt could not be encoded"

_Job = tuple[Request, Generate]


class TokenizerLoop:
    """All requests of one tokenizer process. `handle` takes messages in; `flush` sends what came of them."""

    def __init__(
        self,
        index: int,
        source: ModelSource,
        encoder: PromptEncoder,
        texts: Texts,
        scheduler: Sender,
        server: Sender,
        grammar: Sender,
        wake: Callable[[], None] | None = None,
        interval: int = 1,
    ) -> None:
        self._index = index
        self._interval = interval
        self._source = source
        self._encoder = encoder
        self._texts = texts
        self._scheduler = scheduler
        self._server = Delivery(server)
        self._next_key = (index << 40) + 1
        self._requests: dict[str, Request] = {}
        self._by_key: dict[int, Request] = {}
        self._choices: dict[int, Choice] = {}
        self._intake: deque[_Job] = deque()
        # Chats wait for another process (see isolation.py), long prompts for each other.
        self._chats: Background[_Job, Encoded] = Background(self._encode, NOT_ENCODED, CHAT_THREADS, wake)
        self._background: Background[_Job, Encoded] = Background(self._encode, NOT_ENCODED, wake=wake)
        self._encoding: dict[int, Prompt] = {}
        self._grammars = Grammars(index, grammar)
        self._questions = Questions(index, encoder, texts, scheduler, wake)
        self._unnamed: deque[PromptRead | Done] = deque()
        self._aborted = Recent(RECENT_SECONDS, MAX_RECENT)
        self._ended = Recent(RECENT_SECONDS, MAX_RECENT)
        self._control: list[StopAt | Cancel] = []
        self._dirty: list[Choice] = []
        self._out: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Generate: self._generate, Abort: self._abort, Ask: self._ask,
            Admitted: self._admitted, PromptRead: self._prompt_read, Tokens: self._tokens, Done: self._done,
            Refused: self._refused, Compiled: self._compiled,
            Answer: self._answer, Stats: self._out.append,
        }  # fmt: skip

    def run(self, inbox: Inbox, commands: queue.SimpleQueue[Any]) -> None:
        """Serve until there is a Drain among the commands."""
        while True:
            self.handle(inbox.receive(self._patience()))
            self.work_some()
            self.flush()
            if not commands.empty() and isinstance(commands.get(), Drain):
                return

    def close(self) -> None:
        """End the processes that render chats; from any thread."""
        self._encoder.close()

    def _patience(self) -> float:
        """Seconds to wait for messages, given what else there is to do."""
        if self._intake or self._unnamed:
            return 0.0
        waiting = self._control or self._out or len(self._server)
        return RETRY_SECONDS if waiting else IDLE_SECONDS

    def handle(self, batch: list[Any]) -> None:
        for message in batch:
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)

    # ---- from the server

    def _generate(self, message: Generate) -> None:
        if message.rid in self._requests:
            logging.getLogger("sapwood").warning("request %s is live; its double is dropped", message.rid)
            return
        try:
            checks.check(message, self._source.vocab_size, self._texts)
        except BadRequest as e:
            self._ended.add(message.rid)
            self._out.append(Ended(message.rid, e.info()))
            return
        asked = (message.params, message.streamed, message.constraint, message.parsing)
        request = Request(message.rid, self._next_key, *asked)
        self._next_key += message.params.n
        self._requests[message.rid] = request
        self._ended.discard(message.rid)
        if self._aborted.discard(message.rid):
            self._abort_unsubmitted(request)
        # One that begins after something may begin at once, which shows at the prompt's end.
        elif message.constraint is None or message.constraint.after or self._begin_grammar(request, message):
            self._intake.append((request, message))

    def _begin_grammar(self, request: Request, message: Generate) -> bool:
        try:
            self._grammars.begin(request, message.scheduling.tenant or message.group or message.rid)
        except Overloaded as e:
            self._end(request, e.info())
            return False
        return True

    def work_some(self) -> None:
        """What takes longer than a token does, for a short while: streams come first."""
        self._out += self._questions.finished()
        for lane in (self._chats, self._background):
            for (request, message), result in lane.finished():
                self._encoding.pop(request.key, None)
                self._encoded(request, message, result)
        self._encode_some()
        self._name_some()

    def _encode_some(self) -> None:
        """Encode new prompts. Long ones go to the threads."""
        deadline = time.monotonic() + INTAKE_SECONDS
        while self._intake:
            request, message = self._intake.popleft()
            if self._requests.get(request.rid) is not request:
                continue
            long = is_long(message.prompt)
            if long or is_chat(message.prompt):
                self._encoding[request.key] = message.prompt
                (self._background if long else self._chats).put((request, message))
                continue
            self._encoded(request, message, safely(self._encode, (request, message), NOT_ENCODED))
            if time.monotonic() > deadline:
                return

    def _encode(self, job: _Job) -> Encoded:
        """The prompt's ids, for nothing if the request has been aborted meanwhile; from any thread."""
        request, message = job
        if self._requests.get(request.rid) is not request:
            return Encoded(b"")
        if isinstance(message.prompt, PartsPrompt):
            return self._encoder.encode_parts(message.prompt, message.namespace)
        return Encoded(self._encoder.encode(message.prompt))

    def _encoded(self, request: Request, message: Generate, result: Encoded | ErrorInfo) -> None:
        if self._requests.get(request.rid) is not request:
            return
        if isinstance(result, ErrorInfo):
            self._end(request, result)
            return
        ids, request.rewritten = result.ids, [*result.rewritten]
        request.settle(self._texts, ids)
        if self._begin_grammar(request, message) and not self._grammars.hold((request, message, ids)):
            self._submit(request, message, ids)

    def _compiled(self, message: Compiled) -> None:
        found = self._grammars.compiled(message)
        if found is None:
            return
        request, encoded = found
        if message.error is not None:
            self._end(request, message.error)
        elif encoded is not None:
            self._submit(*encoded)

    def _submit(self, request: Request, message: Generate, ids: Ids) -> None:
        grammar = self._grammars.take(request)
        place = (message.namespace, message.arrived, message.scheduling)
        submit = Submit(request.key, self._index, request.rid, ids, request.params, *place, grammar)
        if not self._scheduler.send(submit):
            self._end(request, Overloaded("the scheduler's queue is full; try again later").info())
            return
        request.submitted, request.prompt = True, ids
        request.warnings = grammar.warnings if grammar is not None else []
        self._by_key[request.key] = request
        for choice in request.choices(self._texts, self._source.eos_ids, self._interval):
            self._choices[request.key + choice.index] = choice

    def _abort(self, message: Abort) -> None:
        request = self._requests.get(message.rid)
        if request is None:
            if message.rid not in self._ended:
                self._aborted.add(message.rid)
        elif not request.submitted:
            self._abort_unsubmitted(request)
        elif not request.cancelled:
            request.cancelled = True
            self._control.append(Cancel(request.key))

    def _abort_unsubmitted(self, request: Request) -> None:
        for index in range(request.params.n):
            self._out.append(messages.Chunk(request.rid, index, "", b"", None, Finish("abort")))
        self._end(request, None)

    def _ask(self, message: Ask) -> None:
        self._out += self._questions.ask(message)

    # ---- from the scheduler

    def _answer(self, message: Answer) -> None:
        self._out += self._questions.answered(message)

    def _admitted(self, message: Admitted) -> None:
        request = self._by_key.get(message.key)
        if request is not None and request.prompt:
            first = ("", b"")
            if request.params.logprob_start == 0:
                first = self._texts.describe(int(messages.unpack(request.prompt[:4])[0]))
            found = (message.verdict, message.queued, message.saved)
            told = (request.warnings, request.rewritten)
            self._out.append(Started(request.rid, request.prompt, *found, first, *told))
            request.prompt = b""

    def _prompt_read(self, message: PromptRead) -> None:
        request = self._by_key.get(message.key)
        if request is not None:
            request.unnamed += 1
            self._unnamed.append(message)

    def _name_some(self) -> None:
        """Pass on about a frame of what was read of prompts, and the ends that came after it."""
        left = FRAME_WEIGHT
        while self._unnamed and left > 0:
            message = self._unnamed.popleft()
            left -= weight(message)
            request = self._by_key.get(message.key)
            if isinstance(message, Done):
                self._done(message)
            elif request is not None:
                request.unnamed -= 1
                self._out.append(request.read(self._texts, message))

    def _tokens(self, message: Tokens) -> None:
        choices, dirty, logprobs = self._choices, self._dirty, message.logprobs
        keys = np.frombuffer(message.keys, dtype="<i8").tolist()
        for i, (key, token) in enumerate(zip(keys, messages.unpack(message.ids).tolist(), strict=True)):
            choice = choices.get(key)
            if choice is None:
                continue
            if choice.push(token, logprobs.get(i)):
                assert choice.hit is not None
                self._control.append(StopAt(choice.request.key, choice.index, choice.hit))
            if choice.due and not choice.dirty:
                choice.dirty = True
                dirty.append(choice)

    def _done(self, message: Done) -> None:
        choice = self._choices.get(message.key + message.choice)
        if choice is None:
            return
        request = choice.request
        if request.unnamed:
            self._unnamed.append(message)
            return
        request.open -= 1
        if message.reason == "error":
            unsaid = SapwoodError("the request failed, and no reason was given").info()
            self._fail(request, message.error or unsaid)
            return
        last = choice.finish(message)
        if request.failed is not None:
            self._fail(request, request.failed)
            return
        del self._choices[message.key + message.choice]
        self._out.append(last)
        if not request.open:
            self._end(request, None)

    def _refused(self, message: Refused) -> None:
        request = self._by_key.get(message.key)
        if request is not None:
            self._end(request, message.error)

    # ---- ends

    def _fail(self, request: Request, error: ErrorInfo) -> None:
        """End all of a request by an error; the scheduler drops what still runs."""
        if request.submitted and request.open and not request.cancelled:
            self._control.append(Cancel(request.key))
        self._end(request, error)

    def _end(self, request: Request, error: ErrorInfo | None) -> None:
        """The one place where a request ends."""
        for index in range(request.params.n):
            choice = self._choices.pop(request.key + index, None)
            if choice is not None and (chunk := choice.chunk()) is not None and not request.unnamed:
                self._out.append(chunk)
        request.unnamed = 0
        self._by_key.pop(request.key, None)
        self._grammars.forget(request)
        if (prompt := self._encoding.pop(request.key, None)) is not None:
            self._encoder.stop(prompt)
        del self._requests[request.rid]
        self._ended.add(request.rid)
        self._out.append(Ended(request.rid, error))

    def flush(self) -> None:
        """Send what the messages so far have led to: one frame to each side."""
        for choice in self._dirty:
            request = choice.request
            if choice.dirty and not request.unnamed and (chunk := choice.chunk()) is not None:
                if request.failed is not None:
                    self._fail(request, request.failed)
                    continue
                self._out.append(chunk)
        self._dirty = [choice for choice in self._dirty if choice.dirty]
        if self._control and self._scheduler.send(*self._control):
            self._control.clear()
        self._server.retry()
        if self._out:
            self._server.send(self._out.copy())
            self._out.clear()
        if self._server.overfull:
            self._shed()

    def _shed(self) -> None:
        for rid in self._server.shed():
            request = self._requests.get(rid)
            if request is not None:
                self._fail(request, overloaded())


def build(
    boot: Boot, scheduler: Sender, server: Sender, grammar: Sender, wake: Callable[[], None] | None = None
) -> tuple[TokenizerLoop, dict[str, str]]:
    """The loop of this process, and the facts for the start-up message. Raises ModelError.

    `wake` ends the loop's wait for messages; it is called from threads.
    """
    config, source = boot.config, boot.source
    tokenizer: Tokenizer | None = None
    texts: Texts = NoTexts()
    facts = {"tokenizer": "none: token ids only (--skip-tokenizer-init)"}
    if not config.skip_tokenizer_init:
        if source.tokenizer_file is None:
            raise ModelError(
                f"model {source.name} has no tokenizer.json; --skip-tokenizer-init serves ids without one"
            )
        tokenizer = load(source.tokenizer_file)
        texts = vocabulary = Vocabulary(tokenizer)
        template = "a chat template" if source.chat_template is not None else "no chat template"
        facts = {"tokenizer": f"{vocabulary.size} tokens, {vocabulary.kind}, {template}"}
    encoder = PromptEncoder(source, tokenizer, config.split_special_tokens)
    loop = TokenizerLoop(
        boot.index, source, encoder, texts, scheduler, server, grammar, wake, config.stream_interval
    )
    return loop, facts


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Serve until a Drain, or the launcher hangs up. Raises ModelError if the tokenizer cannot be loaded."""
    log.set_up(f"tokenizer{boot.index or ''}", boot.config.log_level, boot.config.log_format)
    # One prompt at a time: the library's thread pool would only take the worker's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    inbox = Inbox(boot.directory, "tokenizer", boot.index)
    scheduler, server, grammar = (Outbox(boot.directory, role) for role in ("scheduler", "server", "grammar"))
    wake = Waker(boot)
    try:
        loop, facts = build(boot, scheduler, server, grammar, wake)
        lifeline.on_orphan = loop.close
        lifeline.ready(facts)
        loop.run(inbox, lifeline.commands)
        loop.close()
    finally:
        for socket in (inbox, scheduler, server, grammar, wake):
            socket.close()
