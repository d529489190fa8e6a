"""`bench.stack`: what its table says follows from when words were sent and came."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.echo_worker import STEPS, WORDS, Stamps
from bench.stack import Event, Runtime, median, steady
from tests.api.scripted import source


def runtime(folder: Path) -> Runtime:
    numbers = {f"w{i}": i for i in range(WORDS)}
    return Runtime("", {}, Stamps.make(folder / "stamps"), folder, source(), numbers)


def test_a_word_tells_when_its_last_step_was_sent(tmp_path: Path) -> None:
    stamps = Stamps.make(tmp_path / "stamps")
    stamps.pace = 0.25
    assert Stamps(tmp_path / "stamps").pace == 0.25
    after = []
    for step in (5, 5 + WORDS, 6, STEPS + 7):
        stamps.note(step)
        time.sleep(0.001)
        after.append(time.monotonic())
    now = after[-1]
    first, second = stamps.sent(5, after[0]), stamps.sent(5, now)
    assert 0 < first < second < stamps.sent(6, now) < stamps.sent(7, now) <= now
    assert stamps.sent(8, now) == 0


def test_only_what_came_while_all_streams_ran_is_counted(tmp_path: Path) -> None:
    here = runtime(tmp_path)
    for step in range(10):
        here.stamps._values[1 + step] = 100 + step
    early = [Event(100 + i + 0.5, [f"w{i}"]) for i in range(8)]
    late = [Event(100 + i + 0.25, [f"w{i - 1}", f"w{i}"]) for i in (3, 5, 7, 9)]
    row = steady(here, [early, late])
    counted = [e for e in early if 103.25 < e.at <= 107.5] + late[1:3]
    assert len(counted) == 7
    assert row["tokens_per_event"] == pytest.approx(9 / 7)
    assert row["tokens_per_s"] == pytest.approx(9 / 4.25)
    assert row["delay_p50_ms"] == pytest.approx(500)
    assert row["delay_max_ms"] == pytest.approx(500)
    with pytest.raises(SystemExit, match="--tokens"):
        steady(here, [early[:2], early[4:]])


def test_of_several_runs_the_middle_is_told_but_the_worst_delay() -> None:
    rows = [
        {"route": "chat", "tokens_per_s": rate, "delay_p99_ms": delay}
        for rate, delay in ((1.0, 5.0), (9.0, 2.0), (3.0, 4.0))
    ]
    assert median(rows) == {"route": "chat", "tokens_per_s": 3.0, "delay_p99_ms": 5.0}
