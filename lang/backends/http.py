"""HTTP for the backends: JSON answers and server-sent events, from any number of loops at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from sapwood.lang.errors import RequestFailed

CONNECT_SECONDS = 10.0
MAX_CONNECTIONS = 1000
"""Of one loop; further requests wait for one of them. A process may often have 1,024 open files."""
BRIEF_CONNECTIONS = 4
"""Of one loop, for requests that are answered at once: these wait only for their like."""
SHARD = 32
"""Connections of one client: finding a free one takes a client as long as it has connections."""

_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "rate_limit_error": 429,
    "timeout_error": 504,
}
"""What an error within a stream would have been answered with (else 500)."""
_LATER = frozenset(("unavailable", "process_died", "slow_reader", "aborted", "closed", "draining", "loading"))
"""Codes of errors of the server for which it answers 503: the request may be retried."""


class Http:
    """A server at `url`. Requests of a loop share its connections, which end with the loop (as asyncio.run
    ends one), by `aclose`, or with the object.

    `verify`: a file of certificates to trust in place of the system's, or False to trust any. `timeout`: the
    seconds for which the server may send nothing (None: an answer takes as long as it takes). Every failure
    is a RequestFailed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"the url of a server must be http://... or https://..., got {url!r}")
        self.url = url.rstrip("/")
        self._options: dict[str, Any] = {
            "headers": {"Content-Type": "application/json", **_bearer(api_key)},
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            # A proxy of the environment is not for this machine.
            "trust_env": parsed.host not in ("localhost", "127.0.0.1", "::1"),
            "verify": _trusted(parsed.scheme, verify),
        }
        self._loops: dict[asyncio.AbstractEventLoop, _Clients] = {}
        # What loops still hold open must be closed on them, not by the collector.
        weakref.finalize(self, _close, self._loops).atexit = False

    async def send(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, brief: bool = False
    ) -> Any:
        """The JSON value of an answer. A `brief` request is answered at once: it does not wait until one of
        many long ones has ended."""
        content = None if body is None else _json(body)
        async with self._client(brief) as client:
            try:
                answer = await client.request(method, self.url + path, content=content)
            except httpx.TransportError as e:
                raise self._unreachable(e) from None
        return self._value(method, path, answer.status_code, answer.content)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of a stream of server-sent events until its `[DONE]`; closed early, it closes the
        connection, by which the server knows that nobody listens."""
        async with self._client() as client:
            try:
                async with client.stream("POST", self.url + path, content=_json(body)) as answer:
                    if answer.status_code != 200:
                        self._value("POST", path, answer.status_code, await answer.aread())
                    async for data in sse(answer.aiter_bytes()):
                        if data == b"[DONE]":
                            return
                        yield self._event(path, data)
            except httpx.TransportError as e:
                raise self._unreachable(e) from None
        raise RequestFailed(f"the stream of {self.url}{path} broke off")

    def send_now(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """`send` without a loop: it blocks."""
        content = None if body is None else _json(body)
        try:
            with httpx.Client(**self._options) as client:
                answer = client.request(method, self.url + path, content=content)
        except httpx.TransportError as e:
            raise self._unreachable(e) from None
        return self._value(method, path, answer.status_code, answer.content)

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        clients = self._loops.get(asyncio.get_running_loop())
        if clients is not None:
            await clients.aclose()

    @contextlib.asynccontextmanager
    async def _client(self, brief: bool = False) -> AsyncIterator[httpx.AsyncClient]:
        loop = asyncio.get_running_loop()
        clients = self._loops.get(loop)
        if clients is None:
            loops = self._loops
            clients = loops[loop] = _Clients(self._options, lambda: loops.pop(loop, None))
            await clients.live()
        async with (clients.brief if brief else clients.long).one() as client:
            yield client

    def _event(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict):
            other = 503 if error.get("code") in _LATER else 500
            raise failure(_STATUS.get(str(error.get("type")), other), event)
        if not isinstance(event, dict) or error is not None:
            raise RequestFailed(f"the stream of {self.url}{path} has sent {_start(data)}", 500)
        return event

    def _value(self, method: str, path: str, status: int, content: bytes) -> Any:
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if 200 <= status < 300 and (value is not None or not content):
            return value
        if isinstance(value, dict) and isinstance(value.get("error"), dict):
            raise failure(status, value)
        raise RequestFailed(
            f"{method} {self.url}{path} was answered with {status}: {_start(content)}", status
        )

    def _unreachable(self, error: httpx.TransportError) -> RequestFailed:
        if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
            return RequestFailed(f"the server at {self.url} has fallen silent ({error!r})", code="timeout")
        return RequestFailed(f"the server at {self.url} does not answer ({error!r})", code="unreachable")


def _close(loops: dict[asyncio.AbstractEventLoop, _Clients]) -> None:
    """Close all connections, each on its loop."""
    for loop, clients in list(loops.items()):
        with contextlib.suppress(RuntimeError):  # a loop that was closed in between
            loop.call_soon_threadsafe(clients.close_soon)


class _Clients:
    """The clients of one loop, for `long` requests and for `brief` ones."""

    def __init__(self, options: dict[str, Any], forget: Callable[[], object]) -> None:
        limits = httpx.Limits(max_connections=SHARD, max_keepalive_connections=SHARD)
        self.long = _Lane(MAX_CONNECTIONS, {**options, "limits": limits})
        self.brief = _Lane(BRIEF_CONNECTIONS, {**options, "limits": limits})
        self._forget = forget
        self._life: AsyncGenerator[None, None] | None = None
        self._closing: asyncio.Future[None] | None = None

    async def live(self) -> None:
        """From here on the loop's end closes the clients: asyncio.run closes what generators still run."""
        self._life = self._until_closed()
        await anext(self._life)

    async def _until_closed(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            for lane in (self.long, self.brief):
                await lane.aclose()

    async def aclose(self) -> None:
        if self._life is not None:
            await self._life.aclose()

    def close_soon(self) -> None:
        """`aclose`, from the loop."""
        self._closing = asyncio.ensure_future(self.aclose())


class _Lane:
    """So many connections, spread over clients that have a few each."""

    def __init__(self, connections: int, options: dict[str, Any]) -> None:
        self.shards: list[_Shard] = []
        self._options = options
        self._free = asyncio.Semaphore(connections)
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self._free:
            shard = next((s for s in self.shards if s.busy < SHARD and not s.spoilt), None)
            if shard is None:
                shard = _Shard(httpx.AsyncClient(**self._options))
                self.shards.append(shard)
            shard.busy += 1
            try:
                yield shard.client
            except BaseException as e:
                # A connection whose end is cancelled stays taken for ever in httpcore.
                shard.spoilt = shard.spoilt or not isinstance(e, Exception)
                raise
            finally:
                shard.busy -= 1
                if shard.spoilt and not shard.busy:
                    self.shards.remove(shard)
                    closing = asyncio.ensure_future(shard.client.aclose())
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the connections."""
        for shard in self.shards:
            await shard.client.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)


class _Shard:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.busy = 0
        self.spoilt = False
        """Not used again: its client may have lost a connection."""


async def sse(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event.

    Lines end with CR and LF or either. Not by httpx's own lines: those end at U+2028 and its like too, which
    may stand in a JSON text as they are.
    """
    data: list[bytes] = []
    async for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    begun: list[bytes] = []
    after_cr = False
    async for chunk in chunks:
        if after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        after_cr = chunk.endswith(b"\r") or (after_cr and not chunk)
        for line in _split(chunk):
            begun.append(line.rstrip(b"\r\n"))
            if line.endswith((b"\r", b"\n")):
                yield b"".join(begun)
                begun = []
    if begun:
        yield b"".join(begun)


def _split(chunk: bytes) -> Iterator[bytes]:
    # Of bytes, unlike of str, only CR and LF end a line.
    yield from chunk.splitlines(keepends=True)


def failure(status: int, answer: dict[str, Any]) -> RequestFailed:
    """The exception for an error answer in OpenAI's shape."""
    error = answer["error"]
    message, code, param = error.get("message"), error.get("code"), error.get("param")
    return RequestFailed(str(message or error), status, "" if code is None else str(code), param)


def _start(content: bytes) -> str:
    return content[:200].decode(errors="replace")


def _json(body: dict[str, Any]) -> bytes:
    """Raises RequestFailed for what is no JSON, which a server would refuse."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise RequestFailed("a text has a lone surrogate, which is not a character", 400) from None
    except (TypeError, ValueError) as e:
        raise RequestFailed(f"an argument is no JSON value: {e}", 400) from None


def _bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _trusted(scheme: str, verify: str | bool | None) -> ssl.SSLContext | bool:
    if scheme == "http" or verify is False:
        return False  # reading the system's certificates takes a while
    return ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
