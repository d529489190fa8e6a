"""Request ids, and `--log-requests`: a line when a request starts its prompts, and one when it has ended.

No line holds a text, an id of a token, or a key.
"""

from __future__ import annotations

import contextvars
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sapwood.srt import log
from sapwood.srt.client import Observer, Prompt, Stream
from sapwood.srt.messages import Chunk, Ended, Started
from sapwood.srt.params import SamplingParams

logger = logging.getLogger("sapwood.requests")

HEADER = "x-request-id"
MAX_ID = 256
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos", "logprobs", "logprob_start", "pooling",
)  # fmt: skip
_UNLIMITED_FIELDS = ("stop", "stop_token_ids", "logit_bias", "logprob_ids")
"""Of these only the length is logged: they may be long, and a stop string is text."""


class Tally:
    """What one HTTP request has come to so far, over all its prompts."""

    def __init__(self, scope: Scope, request_id: str) -> None:
        self.began = time.monotonic()
        self.status = 0
        self.first: float | None = None
        self.queued: float | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.finishes: list[str] = []
        self.rid: str | None = None
        self.logged = False
        self.request_id = request_id
        self._name = {"request_id": request_id, "route": f"{scope['method']} {scope['path']}"}

    def start(self, streams: Sequence[Stream], items: Sequence[tuple[Prompt, SamplingParams]]) -> None:
        self.rid = streams[0].name
        self.logged = True
        params = items[0][1]
        fields: dict[str, Any] = {
            **self._name,
            "rid": self.rid,
            "prompts": len(items),
            "n": params.n,
            "max_tokens": params.max_tokens,
        }
        usual = SamplingParams()
        for name in _SAMPLING:
            if (value := getattr(params, name)) != getattr(usual, name):
                fields[name] = value
        for name in _UNLIMITED_FIELDS:
            if value := getattr(params, name):
                fields[f"{name}_count"] = len(value)
        log.event(logger, "request started", fields)

    def end(self) -> None:
        now = time.monotonic()
        fields: dict[str, Any] = {**self._name, "rid": self.rid, "status": self.status}
        if self.logged:
            fields |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "finish": ",".join(dict.fromkeys(self.finishes)) or None,
                "queued_s": None if self.queued is None else round(self.queued, 4),
                "ttft_s": None if self.first is None else round(self.first - self.began, 4),
            }
        log.event(logger, "request ended", {**fields, "total_s": round(now - self.began, 4)})


_current: contextvars.ContextVar[Tally | None] = contextvars.ContextVar("sapwood_request", default=None)


class RequestLog:
    """An Observer of the client that passes everything on to `then`, and counts for the lines."""

    def __init__(self, then: Observer, *, enabled: bool) -> None:
        self.enabled = enabled
        self._then = then
        self._tallies: dict[str, Tally] = {}

    def submitted(self, streams: Sequence[Stream], items: Sequence[tuple[Prompt, SamplingParams]]) -> None:
        """The present HTTP request has started these streams."""
        tally = _current.get()
        if not self.enabled or tally is None:
            return
        self._tallies |= dict.fromkeys((stream.rid for stream in streams), tally)
        tally.start(streams, items)

    def on_started(self, event: Started, namespace: str) -> None:
        self._then.on_started(event, namespace)
        if (tally := self._tallies.get(event.rid)) is not None:
            tally.prompt_tokens += len(event.prompt_ids) // 4
            tally.cached_tokens += event.verdict.matched
            tally.queued = max(event.queued, tally.queued or 0.0)

    def on_chunk(self, event: Chunk, arrived: float, now: float) -> None:
        self._then.on_chunk(event, arrived, now)
        if (tally := self._tallies.get(event.rid)) is not None:
            tally.first = tally.first or now
            tally.completion_tokens += len(event.ids) // 4
            if event.finish is not None:
                tally.finishes.append(event.finish.reason)

    def on_ended(self, event: Ended, arrived: float) -> None:
        self._then.on_ended(event, arrived)
        if (tally := self._tallies.pop(event.rid, None)) is not None and event.error is not None:
            tally.finishes.append(event.error.code)


class RequestIds:
    """ASGI middleware: every answer has an `x-request-id`.

    It is the client's own header where that is 1 to 256 visible ASCII characters, else the request's `rid`,
    else a new one. It names no request inside: two live requests may have the same.
    """

    def __init__(self, app: ASGIApp, requests: RequestLog) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _given(scope["headers"])
        tally = Tally(scope, given or uuid.uuid4().hex)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                tally.status = message["status"]
                headers = MutableHeaders(scope=message)
                if given is not None or HEADER not in headers:
                    headers[HEADER] = tally.request_id
            await send(message)

        token = _current.set(tally)
        try:
            await self._app(scope, receive, named)
        except BaseException:
            tally.status = tally.status or 500
            raise
        finally:
            _current.reset(token)
            if self._requests.enabled and (tally.logged or tally.status >= 400):
                tally.end()


def _given(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == b"x-request-id" and 1 <= len(value) <= MAX_ID and all(0x21 <= c <= 0x7E for c in value):
            return value.decode("ascii")
    return None
