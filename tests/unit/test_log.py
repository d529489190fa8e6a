"""Log lines: one an event, readable by people or by programs, and not to be forged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from sapwood.srt import log
from sapwood.srt.messages import Stats
from sapwood.srt.server import throughput

NAMES = ("sapwood", *log.LIBRARIES)


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    before = [(n, logging.getLogger(n).handlers[:], logging.getLogger(n).propagate) for n in NAMES]
    level = logging.getLogger("sapwood").level
    yield
    for name, handlers, propagate in before:
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).propagate = propagate
    logging.getLogger("sapwood").setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.set_up("server", "info", "json")
    log.event(logger, "request ended", {"rid": 'a b\n"', "status": 200, "none": None, "total_s": 0.5})
    try:
        raise ValueError("oops")
    except ValueError:
        logger.exception("it has failed")
    logger.debug("unseen")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    first, second, third = map(json.loads, lines(capsys))
    assert first["message"] == "request ended"
    assert (first["level"], first["role"], first["status"]) == ("info", "server", 200)
    assert first["rid"] == 'a b\n"'
    assert "none" not in first
    assert abs(first["ts"] - second["ts"]) < 5
    assert first["time"].endswith("Z")
    assert "ValueError: oops" in second["exception"]
    assert third["level"] == "warning"


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.set_up("server", "info")
    log.event(logger, "request ended", {"rid": "a b", "status": 200, "finish": "stop", "empty": ""})
    (line,) = lines(capsys)
    assert line.endswith('INFO    request ended rid="a b" status=200 finish=stop empty=""')


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\n12:00:00 server INFO forged", "\x1b[31mred", "\u2028", "\u202e"]
)
def test_no_text_makes_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], form: Literal["text", "json"], text: str
) -> None:
    logger = log.set_up("server", "info", form)
    log.event(logger, f"said {text}", {"rid": text})
    (line,) = lines(capsys)
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["rid"] == text


def stats(**changes: Any) -> Stats:
    values = dict.fromkeys(Stats.__struct_fields__, 0) | {"slots_total": 1000, "seconds_saved": 0.0} | changes
    return Stats(**values)


def test_the_throughput_line() -> None:
    before = stats(output_tokens=100, prompt_tokens_cached=50, prompt_tokens_computed=50)
    now = stats(
        running=3, waiting=2, output_tokens=300, prompt_tokens_cached=80, prompt_tokens_computed=60,
        slots_used=100, slots_cached=150,
    )  # fmt: skip
    assert throughput.summary(before, now, 10.0) == {
        "running": 3,
        "waiting": 2,
        "prompt_tokens_per_s": 4.0,
        "output_tokens_per_s": 20.0,
        "kv_used": 0.1,
        "cache_hit_rate": 0.75,
    }
    assert (
        throughput.summary(
            now, stats(output_tokens=300, prompt_tokens_cached=80, prompt_tokens_computed=60), 10
        )
        is None
    )
    assert throughput.summary(None, stats(waiting=1), 10.0) == {
        "running": 0,
        "waiting": 1,
        "prompt_tokens_per_s": 0.0,
        "output_tokens_per_s": 0.0,
        "kv_used": 0.0,
    }


def test_it_is_reported_while_busy_only(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("server", "info", "json")
    told = iter(
        [None, stats(), stats(output_tokens=5), stats(output_tokens=5), stats(output_tokens=5, running=1)]
    )
    last: list[Stats | None] = [None]
    over = asyncio.Event()

    def latest() -> Stats | None:
        last[0] = next(told, None) or last[0]
        if last[0] is not None and last[0].running:
            over.set()
        return last[0]

    async def run() -> None:
        task = asyncio.create_task(throughput.report(latest, 0.01))
        await asyncio.wait_for(over.wait(), 20)
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(run())
    said = [json.loads(line) for line in lines(capsys)]
    assert [line["running"] for line in said][:2] == [0, 1]
    assert {line["message"] for line in said} == {"throughput"}
