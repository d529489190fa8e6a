"""What steps compute is counted by program, and that costs no Python for each row or program."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from sapwood.srt.scheduler.rows import Rows
from sapwood.srt.scheduler.step_counts import Positions, StepCounts

EMPTY = Positions(0, 0, 0, 0)


def rows_of(numbers: list[int], prompt: int = 10, known: int = 0) -> Rows:
    rows = Rows(len(numbers), 100)
    rows.program[:] = numbers
    rows.prompt[:], rows.known[:] = prompt, known
    return rows


def column(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def test_prompts_outputs_drafts_and_what_was_known_are_told_apart() -> None:
    counts = StepCounts()
    a, b = counts.open(), counts.open()
    part = counts.part(rows_of([a, b, a, 0], known=8), column(0, 1, 2, 3), column(5, 9, 30, 0))
    assert part is not None
    counts.add(part, column(12, 10, 35, 7), column(0, 0, 4, 0))
    assert counts.take(a) == Positions(prompts=5, outputs=2 + 1, again=3, drafts=4)
    assert counts.take(b) == Positions(prompts=1, outputs=0, again=0, drafts=0)
    assert counts.take(a) == counts.take(b) == EMPTY, "it was taken"


def test_rows_without_programs_are_not_looked_at() -> None:
    assert StepCounts().part(rows_of([0, 0]), column(0, 1), column(0, 0)) is None


def test_a_number_is_never_anothers_and_what_was_in_flight_is_nobodys() -> None:
    counts = StepCounts()
    numbers = {counts.open() for _ in range(1000)}
    gone = counts.open()
    part = counts.part(rows_of([gone]), column(0), column(0))
    assert part is not None
    counts.add(part, column(5), None)
    counts.close(gone)
    new = counts.open()
    assert new not in numbers | {gone}
    counts.add(part, column(5), None)
    assert counts.take(new) == EMPTY
    assert len(numbers) == 1000


def test_places_are_used_again() -> None:
    counts = StepCounts()
    for _ in range(1000):
        counts.close(counts.open())
    assert len(counts._numbers) == 64


def calls_of_a_decode_step(count: int) -> int:
    """How many functions a step's counting calls, for so many rows of as many programs."""
    counts = StepCounts()
    rows = rows_of([counts.open() for _ in range(count)])
    of = np.arange(count, dtype=np.int32)
    starts = np.full(count, 50, dtype=np.int32)
    calls = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        part = counts.part(rows, of, starts)
        assert part is not None
        counts.add(part, starts + 1, None)
    finally:
        sys.setprofile(before)
    assert all(counts.take(int(number)) == Positions(0, 1, 0, 0) for number in rows.program)
    return calls


@pytest.mark.parametrize("count", [8, 1024])
def test_a_plain_decode_step_runs_no_python_for_a_row(count: int) -> None:
    assert calls_of_a_decode_step(count) == calls_of_a_decode_step(1)
