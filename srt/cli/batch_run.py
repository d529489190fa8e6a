"""Asks the requests of a batch, a bounded number at a time, here or at a server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator

import httpx

from sapwood.srt.cli.batch_files import Request, Results
from sapwood.srt.cli.batch_tally import Tally
from sapwood.srt.config import Config
from sapwood.srt.errors import BadRequest, Unavailable, from_info

TRIES = 6
"""For a server that is unavailable; one whose queue is full is asked until it has room."""
LONGEST_WAIT = 30.0
TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
FULL = 429
UNAVAILABLE = (502, 503, 504)

Done = Callable[[], None]


def run_on_engine(
    config: Config,
    requests: list[Request],
    results: Results,
    tally: Tally,
    done: Done,
    workers: int | None,
) -> None:
    """Ask the server's own routes, over a runtime of this process, by default as many at a time as it runs.

    Raises ProcessDied if one of it dies.
    """
    from sapwood.srt.loader import sources
    from sapwood.srt.metrics import Metrics
    from sapwood.srt.offline import OfflineRuntime
    from sapwood.srt.server import app

    runtime = OfflineRuntime(config, sources.resolve(config))
    try:
        transport = httpx.ASGITransport(app.create(runtime.service, Metrics()), raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

        def check() -> None:
            if (failure := runtime.service.client.failure) is not None:
                raise from_info(failure)

        ask = functools.partial(_ask, client, check=check)
        many = workers or runtime.service.config.rows
        runtime.run(_all(ask, requests, results, tally, done, many))
    finally:
        runtime.close()


def run_on_url(
    url: str,
    key: str | None,
    requests: list[Request],
    results: Results,
    tally: Tally,
    done: Done,
    workers: int,
) -> None:
    """Ask a server. Raises Unavailable if nobody is there, or it cannot be reached any more."""

    async def work() -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        base = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=workers, max_keepalive_connections=workers)
        async with httpx.AsyncClient(
            base_url=base, headers=headers, timeout=TIMEOUT, limits=limits
        ) as client:
            try:
                await client.get("/v1/models")
            except httpx.HTTPError as e:
                raise Unavailable(f"cannot talk with {base}: {e or type(e).__name__}") from None
            await _all(functools.partial(_ask, client), requests, results, tally, done, workers)

    try:
        asyncio.run(work())
    except httpx.InvalidURL as e:
        raise BadRequest(f"--url {url!r}: {e}", param="url") from None


async def _all(
    ask: Callable[[Request], Awaitable[httpx.Response]],
    requests: list[Request],
    results: Results,
    tally: Tally,
    done: Done,
    workers: int,
) -> None:
    """Ask all requests in order, `workers` at a time, and write each answer. The first error ends it."""
    queue = iter(requests)
    tasks = [
        asyncio.create_task(_worker(ask, queue, results, tally, done))
        for _ in range(min(workers, len(requests)))
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _worker(
    ask: Callable[[Request], Awaitable[httpx.Response]],
    queue: Iterator[Request],
    results: Results,
    tally: Tally,
    done: Done,
) -> None:
    for request in queue:
        response = await ask(request)
        results.write(request, response.status_code, response.headers.get("x-request-id"), response.content)
        tally.add(response.status_code, response.content)
        done()


async def _ask(
    client: httpx.AsyncClient, request: Request, check: Callable[[], None] = lambda: None
) -> httpx.Response:
    """One answer. A full queue is asked again without an end, what is unavailable a few times; the wait
    doubles, and is at least what the server names.

    Raises what `check`, called after each answer, raises, and Unavailable when nobody answers.
    """
    body, wait, tries = request.body(), 0.5, 0
    while True:
        wait = min(wait * 2, LONGEST_WAIT)
        try:
            response = await client.post(
                request.url, content=body, headers={"content-type": "application/json"}
            )
        except httpx.HTTPError as e:
            tries += 1
            if tries == TRIES:
                why = str(e) or type(e).__name__
                raise Unavailable(f"{client.base_url} does not answer after {TRIES} tries: {why}") from None
        else:
            check()
            if response.status_code != FULL:
                tries += 1
                if response.status_code not in UNAVAILABLE or _is_final(response) or tries == TRIES:
                    return response
            named = response.headers.get("retry-after", "")
            wait = min(max(wait, float(named) if named.isdecimal() else 0.0), LONGEST_WAIT)
        await asyncio.sleep(wait)


def _is_final(response: httpx.Response) -> bool:
    """Whether a server that is not busy has given the request up: its own deadline has passed."""
    return response.status_code in (408, 504) and b"deadline_exceeded" in response.content
