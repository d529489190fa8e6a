"""The tokenizer process: prompts to ids on the way in, ids to text on the way out, each request's one end.

server ──Generate, Abort──► intake ──► encode (long ones in threads) ──Submit──► scheduler
   ▲                                                                                │
   └──Started, Chunk, Ended── delivery ◄── choices: text, stop strings ◄──Tokens, Done
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
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest, ErrorInfo, ModelError, Overloaded, SapwoodError
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import (
    Abort,
    Admitted,
    Answer,
    Ask,
    Boot,
    Cancel,
    Done,
    Drain,
    Ended,
    Finish,
    Generate,
    Ids,
    Refused,
    Started,
    Stats,
    StopAt,
    Submit,
    Tokens,
)  # fmt: skip
from sapwood.srt.tokenizer.background import Background, encode_safely, is_long
from sapwood.srt.tokenizer.delivery import Delivery, Sender, overloaded
from sapwood.srt.tokenizer.prompts import PromptEncoder
from sapwood.srt.tokenizer.recent import Recent
from sapwood.srt.tokenizer.requests import Choice, NoTexts, Request, Texts
from sapwood.srt.tokenizer.vocabulary import Vocabulary, load

RECENT_SECONDS = 5.0
MAX_RECENT = 4096
INTAKE_SECONDS = 0.004
"""New prompts are encoded for at most this long (and one prompt) between two looks at the inbox."""
IDLE_SECONDS = 0.2
RETRY_SECONDS = 0.005


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
    ) -> None:
        self._index = index
        self._source = source
        self._encoder = encoder
        self._texts = texts
        self._scheduler = scheduler
        self._server = Delivery(server)
        self._next_key = (index << 40) + 1
        self._requests: dict[str, Request] = {}
        self._by_key: dict[int, Request] = {}
        self._choices: dict[int, Choice] = {}
        self._intake: deque[tuple[Request, Generate]] = deque()
        self._background: Background[tuple[Request, Generate]] = Background(encoder.encode)
        self._aborted = Recent(RECENT_SECONDS, MAX_RECENT)
        self._ended = Recent(RECENT_SECONDS, MAX_RECENT)
        self._control: list[StopAt | Cancel] = []
        self._dirty: list[Choice] = []
        self._out: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Generate: self._generate, Abort: self._abort, Ask: self._ask,
            Admitted: self._admitted, Tokens: self._tokens, Done: self._done, Refused: self._refused,
            Answer: self._out.append, Stats: self._out.append,
        }  # fmt: skip

    def run(self, inbox: Inbox, commands: queue.SimpleQueue[Any]) -> None:
        """Serve until the launcher says that it is over."""
        while True:
            self.handle(inbox.receive(self._patience()))
            self.encode_some()
            self.flush()
            if not commands.empty() and isinstance(commands.get(), (Drain, type(None))):
                return

    def _patience(self) -> float:
        """Seconds to wait for messages, given what else there is to do."""
        if self._intake:
            return 0.0
        waiting = self._background.pending or self._control or self._out or len(self._server)
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
            message.params.check(self._source.vocab_size)
            if message.params.stop and isinstance(self._texts, NoTexts):
                raise BadRequest("stop strings need a tokenizer (--skip-tokenizer-init is set)", param="stop")
        except BadRequest as e:
            self._ended.add(message.rid)
            self._out.append(Ended(message.rid, e.info()))
            return
        request = Request(message.rid, self._next_key, message.params)
        self._next_key += message.params.n
        self._requests[message.rid] = request
        self._ended.discard(message.rid)
        if self._aborted.discard(message.rid):
            self._abort_unsubmitted(request)
        else:
            self._intake.append((request, message))

    def encode_some(self) -> None:
        """Encode new prompts for a short while; streams come first. Long ones go to the threads."""
        for (request, message), result in self._background.finished():
            self._submit(request, message, result)
        deadline = time.monotonic() + INTAKE_SECONDS
        while self._intake:
            request, message = self._intake.popleft()
            if self._requests.get(request.rid) is not request:
                continue
            if is_long(message.prompt):
                self._background.put((request, message), message.prompt)
                continue
            self._submit(request, message, encode_safely(self._encoder.encode, message.prompt))
            if time.monotonic() > deadline:
                return

    def _submit(self, request: Request, message: Generate, result: Ids | ErrorInfo) -> None:
        if self._requests.get(request.rid) is not request:
            return
        if isinstance(result, ErrorInfo):
            self._end(request, result)
            return
        submit = Submit(
            request.key, self._index, request.rid, result, request.params, message.namespace, message.arrived
        )
        if not self._scheduler.send(submit):
            self._end(request, Overloaded("the scheduler's queue is full; try again later").info())
            return
        request.submitted, request.prompt = True, result
        self._by_key[request.key] = request
        for choice in request.choices(self._texts, self._source.eos_ids):
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
        if not self._scheduler.send(Ask(message.call, message.what, self._index)):
            error = Overloaded("the scheduler's queue is full; try again later").info()
            self._out.append(Answer(message.call, error, {}))

    # ---- from the scheduler

    def _admitted(self, message: Admitted) -> None:
        request = self._by_key.get(message.key)
        if request is not None and request.prompt:
            self._out.append(Started(request.rid, request.prompt, message.verdict, message.queued))
            request.prompt = b""

    def _tokens(self, message: Tokens) -> None:
        choices, dirty, logprobs = self._choices, self._dirty, message.logprobs
        keys = np.frombuffer(message.keys, dtype="<i8").tolist()
        for i, (key, token) in enumerate(zip(keys, messages.unpack(message.ids).tolist(), strict=True)):
            choice = choices.get(key)
            if choice is None:
                continue
            if not choice.dirty:
                choice.dirty = True
                dirty.append(choice)
            if choice.push(token, logprobs.get(i)):
                assert choice.hit is not None
                self._control.append(StopAt(choice.request.key, choice.index, choice.hit))

    def _done(self, message: Done) -> None:
        choice = self._choices.get(message.key + message.choice)
        if choice is None:
            return
        request = choice.request
        request.open -= 1
        if message.reason == "error":
            unsaid = SapwoodError("the request failed, and no reason was given").info()
            self._fail(request, message.error or unsaid)
            return
        del self._choices[message.key + message.choice]
        self._out.append(choice.finish(message))
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
            if choice is not None and (chunk := choice.chunk()) is not None:
                self._out.append(chunk)
        self._by_key.pop(request.key, None)
        del self._requests[request.rid]
        self._ended.add(request.rid)
        self._out.append(Ended(request.rid, error))

    def flush(self) -> None:
        """Send what the messages so far have led to: one frame to each side."""
        for choice in self._dirty:
            if choice.dirty and (chunk := choice.chunk()) is not None:
                self._out.append(chunk)
        self._dirty.clear()
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


def build(boot: Boot, scheduler: Sender, server: Sender) -> tuple[TokenizerLoop, dict[str, str]]:
    """The loop of this process, and the facts for the start-up message. Raises ModelError."""
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
    return TokenizerLoop(boot.index, source, encoder, texts, scheduler, server), facts


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Serve until a Drain (or the launcher's end). Raises ModelError if the tokenizer cannot be loaded."""
    log.set_up(f"tokenizer{boot.index or ''}", boot.config.log_level)
    # One prompt at a time: the library's thread pool would only take the worker's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    inbox = Inbox(boot.directory, "tokenizer", boot.index)
    scheduler, server = Outbox(boot.directory, "scheduler"), Outbox(boot.directory, "server")
    try:
        loop, facts = build(boot, scheduler, server)
        lifeline.ready(facts)
        loop.run(inbox, lifeline.commands)
    finally:
        for socket in (inbox, scheduler, server):
            socket.close()
