"""An OpenAI-compatible server that answers in a chat."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import httpx

from sapwood.srt.cli.chat_sources import Messages, Piece, Usage
from sapwood.srt.errors import BadRequest, ErrorInfo, ModelNotFound, SapwoodError, Unavailable, from_info

TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class UrlSource:
    """A server with OpenAI's routes at `url`, with or without /v1. Raises SapwoodError if it is not there."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT)
        except (httpx.InvalidURL, UnicodeEncodeError) as e:
            raise BadRequest(f"--url {url!r}: {e}", param="url") from None
        self.name = model or self._first_model()

    def answer(self, messages: Messages, params: dict[str, Any]) -> Generator[Piece, None, None]:
        """Raises SapwoodError. Closing it closes the connection, which ends the request."""
        body = {
            **params,
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise error_of(response)
                for line in _lines(response.iter_bytes()):
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield _piece(data)
        except httpx.HTTPError as e:
            raise _unreachable(e, self._client) from None

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise _unreachable(e, self._client) from None
        if response.status_code != 200:
            raise error_of(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ModelNotFound(f"{self._client.base_url} lists no model: give its name as MODEL") from None

    def __enter__(self) -> UrlSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


def error_of(response: httpx.Response) -> SapwoodError:
    """The error that a server answered with, in whatever shape."""
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = response.text[:300] or response.reason_phrase, ""
    kind = "invalid_request_error" if response.status_code < 500 else "server_error"
    return from_info(ErrorInfo(response.status_code, kind, code, f"{response.status_code}: {message}"))


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines. Not httpx's, which end at any of Unicode's line ends: JSON may hold those."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _piece(data: bytes) -> Piece:
    """One event of a stream. Raises SapwoodError for an error, or what is no event."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(str(event["error"].get("message", event["error"])))
        usage = event.get("usage")
        text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        if not usage:
            return Piece(text, None)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Piece(text, Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise Unavailable(f"the server sent what is no event of a chat: {data[:100]!r} ({e!r})") from None


def _unreachable(error: Exception, client: httpx.Client) -> Unavailable:
    return Unavailable(f"cannot talk with {client.base_url}: {error or type(error).__name__}")
