"""A tokenizer's end of the sockets that says what a test has scripted, and a real server before it."""

from __future__ import annotations

import asyncio
import itertools
import queue
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.client import Client
from sapwood.srt.config import Config, ModelSource, make
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import (
    Abort,
    Answer,
    Ask,
    ChatPrompt,
    Chunk,
    Ended,
    Finish,
    Generate,
    IdsPrompt,
    Message,
    Read,
    Started,
    TextLogprob,
    TextPrompt,
    Verdict,
    pack,
    unpack,
)
from sapwood.srt.metrics import Metrics
from sapwood.srt.orders import Serve
from sapwood.srt.server import app, process
from sapwood.srt.server.process import Listener
from sapwood.srt.server.request_log import RequestLog
from sapwood.srt.server.service import Service

T = TypeVar("T")
Script = Callable[[Generate], Sequence[Message]]

PROMPT_IDS = list(range(10, 50))
VOCAB = 1000


def source(**changes: Any) -> ModelSource:
    values: dict[str, Any] = {
        "name": "tiny",
        "format": "dummy",
        "path": "tiny",
        "files": [],
        "architecture": "LlamaForCausalLM",
        "config": {},
        "vocab_size": VOCAB,
        "context_length": 2048,
        "eos_ids": [2],
        "tokenizer_file": None,
        "chat_template": None,
        "template_vars": {},
        "sampling_defaults": {},
    }
    return ModelSource(**{**values, **changes})


def started(g: Generate, matched: int = 0, stopped: Any = "cold") -> Started:
    ids = unpack(g.prompt.ids) if isinstance(g.prompt, IdsPrompt) else PROMPT_IDS
    return Started(g.rid, pack(ids), Verdict(matched, stopped), 0.25)


def answer(
    g: Generate,
    texts: Sequence[str] = ("Pa", "ris"),
    *,
    matched: int = 0,
    stopped: Any = "cold",
    finish: Any = "stop",
    matched_stop: int | str | None = 2,
) -> list[Message]:
    """A whole answer: each text is one token, the same for each choice; then each choice's finish."""
    said: list[Message] = [started(g, matched, stopped)]
    for choice in range(g.params.n):
        for i, text in enumerate(texts):
            logprobs = None
            if g.params.logprobs is not None:
                top = [(100 + j, -0.5 - j, f"t{j}", f"t{j}".encode()) for j in range(g.params.logprobs)]
                logprobs = [TextLogprob(50 + i, -0.25 * (i + 1), text, text.encode(), top)]
            said.append(Chunk(g.rid, choice, text, pack([50 + i]), logprobs))
        said.append(Chunk(g.rid, choice, "", b"", None, Finish(finish, matched_stop, len(texts))))
    return [*said, Ended(g.rid)]


def refuse(g: Generate, status: int = 400, code: str = "context_length_exceeded") -> list[Message]:
    return [Ended(g.rid, ErrorInfo(status, "invalid_request_error", code, "800 tokens, limit 512", "prompt"))]


def pieces(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> list[str]:
    """A prompt's tokens as text: its words, or its ids."""
    if isinstance(prompt, TextPrompt):
        return re.findall(r"\s*\S+|\s+", prompt.text)
    assert isinstance(prompt, IdsPrompt)
    return [f" <{token}>" for token in unpack(prompt.ids).tolist()]


def detokenize(ask: Ask) -> dict[str, Any]:
    """The answer to that question, with the words of `pieces`, for each of its prompts."""
    assert isinstance(ask.prompt, IdsPrompt)
    words = iter(pieces(ask.prompt))
    return {"texts": ["".join(itertools.islice(words, length)) for length in ask.options["lengths"]]}


def top_of(g: Generate, text: str, best: float) -> list[tuple[int, float, str, bytes]]:
    return [(100 + i, best - i, f"{text}{i}", f"{text}{i}".encode()) for i in range(g.params.logprobs or 0)]


def reading(g: Generate) -> list[Message]:
    """An answer of `max_tokens` tokens that tells the prompt's logprobs, or what was pooled, if it was asked.

    Token i of the prompt has the id 200 + i (or its own) and the logprob -i; the last is the most likely one.
    """
    texts = pieces(g.prompt)
    ids = unpack(g.prompt.ids).tolist() if isinstance(g.prompt, IdsPrompt) else range(200, 200 + len(texts))
    ids = list(ids)
    params, start = g.params, g.params.logprob_start
    verdict = Verdict(0, "cold" if start is None else "logprobs")
    said: list[Message] = [Started(g.rid, pack(ids), verdict, 0.25)]
    if start is not None:
        if start == 0:
            said = [Started(g.rid, pack(ids), verdict, 0.25, 0.0, (texts[0], texts[0].encode()))]
        values = [
            TextLogprob(
                token, -float(i), text, text.encode(), top_of(g, "p", -0.5),
                [(chosen, -7.0, f"c{chosen}", b"c") for chosen in params.logprob_ids],
            )
            for i, (token, text) in enumerate(zip(ids, texts, strict=True))
        ]  # fmt: skip
        begin = max(1, start)
        values = values[begin:]
        half = len(values) // 2
        said += [Read(g.rid, begin, values[:half]), Read(g.rid, begin + half, values[half:])]
    if params.pooling is not None:
        said.append(Read(g.rid, pooled=struct.pack("<3f", 3.0, len(texts), 4.0)))
    for choice in range(params.n):
        for i in range(params.max_tokens or 0):
            value = -0.25 * (i + 1) - (choice % 3)
            chosen = [(one, -8.0, f"c{one}", b"c") for one in params.logprob_ids]
            item = TextLogprob(50 + i, value, f" o{i}", f" o{i}".encode(), top_of(g, "t", -0.5), chosen)
            logprobs = None if params.logprobs is None else [item]
            said.append(Chunk(g.rid, choice, f" o{i}", pack([50 + i]), logprobs))
        finish = Finish("length", None, params.max_tokens or 0)
        said.append(Chunk(g.rid, choice, "", b"", None, finish))
    return [*said, Ended(g.rid)]


class ScriptedTokenizer:
    """Runs `script` for each Generate and sends what it returns; `received` is all that came."""

    def __init__(self, directory: str, index: int = 0) -> None:
        self.script: Script = answer
        self.answers: dict[str, Callable[[Ask], dict[str, Any]] | dict[str, Any] | ErrorInfo | None] = {}
        self.received: list[Any] = []
        self._say: queue.SimpleQueue[tuple[Message, ...]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._inbox = Inbox(directory, "tokenizer", index)
        self._outbox = Outbox(directory, "server")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.script = answer
        self.answers = {}
        self.received = []

    def say(self, *messages: Message) -> None:
        """Send messages that no script answers with; callable from any thread."""
        self._say.put(messages)

    def wait_for(self, kind: type[T], count: int = 1, timeout: float = 20.0) -> list[T]:
        deadline = time.monotonic() + timeout
        while len(found := [m for m in self.received if isinstance(m, kind)]) < count:
            assert time.monotonic() < deadline, f"{count} {kind.__name__} wanted, {self.received} came"
            time.sleep(0.002)
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._inbox.close()
        self._outbox.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._inbox.receive(0.002):
                self.received.append(message)
                self._react(message)
            while not self._say.empty():
                self._outbox.send(*self._say.get())

    def _react(self, message: Any) -> None:
        if isinstance(message, Generate):
            for said in self.script(message):
                self._outbox.send(said)
        elif isinstance(message, Ask):
            data = self.answers.get(message.what, {})
            if callable(data):
                data = data(message)
            if isinstance(data, ErrorInfo):
                self._outbox.send(Answer(message.call, data, {}))
            elif data is not None:
                self._outbox.send(Answer(message.call, None, data))


def answer_aborts(tokenizer: ScriptedTokenizer, seconds: float = 20.0) -> threading.Thread:
    """What a real tokenizer does with an abort: an "abort" finish and the end, once one comes."""

    def run() -> None:
        for abort in tokenizer.wait_for(Abort, timeout=seconds):
            finish = Finish("abort", None, 1)
            tokenizer.say(Chunk(abort.rid, 0, "", b"", None, finish), Ended(abort.rid))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def client(harness: Harness) -> httpx.Client:
    # Without certificates, which take longer to load than most tests run.
    return httpx.Client(base_url=harness.url, trust_env=False, timeout=30, verify=False)


class Harness:
    """The application on a real socket, with its loop in a thread, and the scripted tokenizers behind it."""

    def __init__(self, config: Config | None = None, model: ModelSource | None = None) -> None:
        self.config = config or make()
        self.directory = tempfile.mkdtemp(prefix="sw-")
        self.tokenizers = [ScriptedTokenizer(self.directory, i) for i in range(self.config.tokenizer_workers)]
        self.tokenizer = self.tokenizers[0]
        self.metrics = Metrics()
        self.requests = RequestLog(self.metrics, enabled=self.config.log_requests)
        self.client = Client(self.config, self.directory, self.requests)
        self.metrics.follow(lambda: self.client.latest_stats)
        self.service = Service(self.config, model or source(), self.client)
        self.service.requests = self.requests
        self.service.take(Serve(0, {}, "cpu"))
        self.service.state = "ready"
        # With its protocol named, as asyncio sets TCP_NODELAY only then.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.client.start()
        application = app.create(self.service, self.metrics)
        listening = process.listening(application)
        listening.timeout_graceful_shutdown = 1
        self.listener = Listener(listening)
        self.loop.call_later(0.01, self._up.set)
        await self.listener.serve(sockets=[self._socket])
        await self.client.close()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the server's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not self.call(condition):
            assert time.monotonic() < deadline, "the condition has not come true"
            time.sleep(0.002)

    def reset(self) -> None:
        for tokenizer in self.tokenizers:
            tokenizer.reset()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.listener.leave)
        self._thread.join()
        for tokenizer in self.tokenizers:
            tokenizer.close()
        shutil.rmtree(self.directory)
