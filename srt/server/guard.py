"""What stands between a request's bytes and the routes: size, content type, JSON, nesting, numbers."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from sapwood.srt.errors import BadRequest, RequestTimeout, TooLarge, UnsupportedMediaType

T = TypeVar("T")

BODY_SECONDS = 30.0
"""How long a client may take to send a body: a slow one holds a connection and what it has sent."""

LARGE_BODY = 65_536
"""Bytes."""

_PATH = re.compile(r"`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`|missing required field `([^`]*)`")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read(request: Request, kind: type[T], limit: int) -> T:
    """The request's body, decoded.

    Raises UnsupportedMediaType, TooLarge above `limit` bytes, RequestTimeout after 30 s, and BadRequest with
    the path of what is wrong. A body without a content type is taken as JSON.
    """
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        # A page of another origin may post forms and plain text here unasked, but not JSON.
        raise UnsupportedMediaType(
            f"the content type must be application/json, got {media!r}"
            " (curl: -H 'content-type: application/json')"
        )
    return decode(await _body(request, limit), kind)


async def _body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit, int(declared))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit, len(body))
    except TimeoutError:
        raise RequestTimeout(f"the body has not arrived within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _too_large(limit: int, size: int) -> TooLarge:
    return TooLarge(f"the body may have {limit} bytes (--max-body-bytes), got {size} or more")


def decode(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`; BadRequest says what is wrong and where. Of duplicate keys the last one counts."""
    try:
        with _no_collection(len(body)):
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        message = str(e)
        raise BadRequest(message + _hint(message, kind), param=_param(message), code=_code(message)) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        lone = _SURROGATE.search(_PAIR.sub(b"", body))
        message = "a string has a lone surrogate" if lone else str(e)
        raise BadRequest(f"the body is not valid JSON: {message}", code="invalid_json") from None


@contextlib.contextmanager
def _no_collection(size: int) -> Iterator[None]:
    """A large body of a million small lists would set off the collector again and again, for seconds."""
    pause = size > LARGE_BODY and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def _param(message: str) -> str | None:
    path = _PATH.search(message)
    names = _UNKNOWN.search(message)
    parts = [path[1] if path else "", (names[1] or names[2]) if names else ""]
    return ".".join(p for p in parts if p) or None


def _hint(message: str, kind: type) -> str:
    """What an unknown field of the body itself may have been meant to be."""
    unknown = _UNKNOWN.search(message)
    if unknown is None or not unknown[1] or _PATH.search(message):
        return ""
    close = difflib.get_close_matches(unknown[1], getattr(kind, "__struct_fields__", ()), n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _code(message: str) -> str:
    return "unknown_field" if "unknown field" in message else "invalid_value"
