"""`sapwood batch`: a file of requests in, a file of answers out, as OpenAI's batch API has them."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sapwood.srt import requirements
from sapwood.srt.cli.arguments import Parser, add_url_flags, key_for_url, parse_configured, refuse_served
from sapwood.srt.cli.batch_files import Request, Results, read_requests
from sapwood.srt.cli.batch_tally import Tally
from sapwood.srt.cli.generate import quiet
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags.values import load
from sapwood.srt.progress import bar

HELP = """\
Work through the requests of IN, a file in OpenAI's batch format, and write the answers to OUT, each as soon
as it is there. A line of IN is {"custom_id": ..., "method": "POST", "url": ..., "body": {...}} with the url
/v1/chat/completions, /v1/completions or /v1/embeddings; one of OUT is {"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}. The model runs here, or at --url.

Run again to go on after an end of whatever kind: what OUT holds is not asked anew. A line of IN that is no
request, and a custom_id given twice, are refused before anything is asked. A request that fails has its error
in OUT and does not stop the others. Exit code: 0 if every request of IN has an answer, 1 if one failed, 2 if
IN or a flag is wrong, 130 or 143 if stopped by a signal. A server whose queue is full is asked again until
it has room; one that is unavailable for half a minute counts as an error of the request.
"""
OWN = ("--api-key",)
WORKERS_AT_URL = 16


class Stopped(KeyboardInterrupt):
    """A signal told the run to stop. Of this class, since asyncio keeps other exceptions to itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(parser: Parser, arguments: list[str]) -> int:
    parser.add_argument("requests", metavar="IN", type=Path, help="the file of requests")
    parser.add_argument("results", metavar="OUT", type=Path, help="the file of answers, which may be there")
    add_url_flags(parser, "a server to ask instead")
    parser.add_argument(
        "--concurrency",
        type=int,
        help="requests at once (default: --max-running-requests; at a --url 16)",
    )
    parser.add_argument("--retry-failed", action="store_true", help="ask again what has an error in OUT")
    args, values = parse_configured(parser, arguments, OWN)
    refuse_served(values)
    if args.concurrency is not None and not 1 <= args.concurrency <= 4096:
        raise ConfigError(
            f"--concurrency must be from 1 to 4096, got {args.concurrency}", param="concurrency"
        )
    requests = read_requests(args.requests)
    with Results(args.results, args.requests, args.retry_failed) as results:
        left = [request for request in requests if request.custom_id not in results.there]
        tally = Tally(there=len(requests) - len(left), failed=results.failed_of(requests))
        return _work(_runner(args, values) if left else None, left, results, tally)


Runner = Callable[[list[Request], Results, Tally, Callable[[], None]], None]


def _runner(args: argparse.Namespace, values: dict[str, Any]) -> Runner:
    """What asks the requests and writes the answers. Raises ConfigError for a wrong flag."""
    from sapwood.srt.cli.batch_run import run_on_engine, run_on_url

    key = key_for_url(args, values)
    if args.url is None:
        # Nobody but this process asks: keys from the environment would only be in its way.
        chosen = load({**quiet(values), "api_key": None, "admin_api_key": None})
        requirements.check()
        return lambda left, results, tally, done: run_on_engine(
            chosen, left, results, tally, done, args.concurrency
        )
    workers = args.concurrency or WORKERS_AT_URL
    return lambda left, results, tally, done: run_on_url(args.url, key, left, results, tally, done, workers)


def _work(runner: Runner | None, left: list[Request], results: Results, tally: Tally) -> int:
    began = time.monotonic()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _stop) for number in numbers]
    try:
        if runner is not None:
            # A plain install, which may ask a --url, has no progress bars.
            shown = len(left) if importlib.util.find_spec("rich") else 0
            with bar(shown, "requests") as advance:
                runner(left, results, tally, advance)
    except Stopped as e:
        code = 128 + e.number
    else:
        code = 1 if tally.failed else 0
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        print(tally.summary(len(left), time.monotonic() - began), file=sys.stderr)
    return code


def _stop(number: int, _frame: FrameType | None) -> None:
    # Once: the clean end that follows must not be cut short by an impatient second one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped(number)
