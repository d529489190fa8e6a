"""The scheduler among simulated tokenizers, clients and a worker (tests/simulation): whatever a seed brings,
answers are plain, each end comes once, nothing leaks, and nobody is overtaken further than is promised."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import scheduler
from sapwood.srt.cache import radix, slots
from sapwood.srt.scheduler import (
    admission,
    ends,
    grammars,
    intake,
    kept_paths,
    lines,
    results,
    rows,
    state,
    step_counts,
)
from tests.simulation.runs import Run, SimulationFailed, shrink

SECONDS = 60.0
FLOOR = 30


def test_seeds() -> None:
    """As many as fit in a minute, and FLOOR on a slow machine; always from the first one on."""
    began = time.monotonic()
    seed = requests = events = 0
    while seed < FLOOR or time.monotonic() - began < SECONDS:
        outcome = Run(seed).go()
        seed, requests, events = seed + 1, requests + outcome.requests, events + outcome.events
    print(f"{seed} seeds, {requests} requests, {events} events")


def test_wide_seeds() -> None:
    """Many rows and long queues, with only sums and answers checked."""
    for seed in range(2):
        Run(seed, wide=True).go(thorough=False)


def test_a_seed_decides_everything() -> None:
    logs: list[list[str]] = [[], []]
    for log in logs:
        for seed in (4, 5, 6):
            Run(seed).go(log=log.append)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100


def test_seeds_cover_what_they_are_for() -> None:
    """Retraction and every kind of message, end and error are met within the first seeds."""
    log: list[str] = []
    outcomes = [Run(seed).go(thorough=False, log=log.append) for seed in range(FLOOR)]
    said = "\n".join(log)
    assert sum(outcome.retracted for outcome in outcomes) > 20
    kept, drafted = (sum(getattr(each, name) for each in outcomes) for name in ("accepted", "drafted"))
    assert 100 < kept < drafted - 100
    for what in (
        "LoadGrammar(",
        "DropGrammars(",
        "bad_grammar",
        "grammars={",
        "Refused(",
        "StopAt(",
        "Cancel(",
        "RowError(",
        "PromptRead(",
        "Answer(",
        "Death",
        "Rebuild",
        "queue_timeout",
        "what=program",
        "program_not_found",
        "released_tokens",
    ):
        assert what in said, what
    for reason in ("stop", "length", "abort", "error"):
        assert f"reason={reason}" in said, reason


def first_failure() -> SimulationFailed:
    for seed in range(200):
        try:
            Run(seed).go()
        except SimulationFailed as e:
            return e
    raise AssertionError("what is broken was not found")


def lose_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    free = slots.SlotPool.free

    def broken(self: Any, given: Any) -> None:
        free(self, given[: len(given) - (len(given) > 7)])

    monkeypatch.setattr(slots.SlotPool, "free", broken)


def keep_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    unlock = radix.RadixTree.unlock

    def broken(self: Any, node: Any) -> None:
        if node.depth != 11:
            unlock(self, node)

    monkeypatch.setattr(radix.RadixTree, "unlock", broken)


def stop_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at = intake.stop_at

    def broken(state: Any, message: Any) -> None:
        message.n += 1
        stop_at(state, message)

    monkeypatch.setattr(intake, "stop_at", broken)


def end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ends.finish

    def broken(state: Any, sequence: Any, n: int, reason: Any, *more: Any) -> None:
        finish(state, sequence, n, reason, *more)
        if reason == "abort":
            told = state.outgoing[sequence.request.tokenizer]
            told.append(told[-1])

    monkeypatch.setattr(intake, "finish", broken)


def forget_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_prompts_only", lambda state, sent, here: [])


def wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match of more than 5 tokens gives its slots in another order."""
    match = radix.RadixTree.match

    def broken(self: Any, namespace: str, ids: bytes, limit: int) -> Any:
        found = match(self, namespace, ids, limit)
        return found._replace(slots=np.roll(found.slots, 1)) if found.length > 5 else found

    monkeypatch.setattr(radix.RadixTree, "match", broken)


def go_on_beside_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        return np.flatnonzero(self.active & self.sampled & (self.length + self.inflight < self.limit))

    monkeypatch.setattr(rows.Rows, "decoding", broken)


def forget_where_grammars_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_with_grammars", lambda state, sent, result, ended: ended)


def begin_without_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    join = grammars.Grammars.join

    def broken(self: Any, request: Any) -> None:
        join(self, request)
        request.loading = False

    monkeypatch.setattr(grammars.Grammars, "join", broken)


def keep_a_rejected_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a draft one token too few is given back."""
    verified = results._verified

    def broken(state: Any, sent: Any, i: int, ids: Any, *more: Any) -> Any:
        sent.ends[i] -= len(ids) == 1
        return verified(state, sent, i, ids, *more)

    monkeypatch.setattr(results, "_verified", broken)


def never_mind_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.Line, "first", lambda self: self._best())


def keep_for_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_paths.KeptPaths, "release", lambda self, program, now: 0)


def count_a_position_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add = step_counts.StepCounts.add

    def broken(self: Any, part: Any, step_ends: Any, drafts: Any) -> None:
        add(self, part._replace(starts=part.starts - (part.starts == 17)), step_ends, drafts)

    monkeypatch.setattr(step_counts.StepCounts, "add", broken)


def take_prompts_for_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    add = step_counts.StepCounts.add

    def broken(self: Any, part: Any, *more: Any) -> None:
        add(self, part._replace(prompts=np.zeros_like(part.prompts)), *more)

    monkeypatch.setattr(step_counts.StepCounts, "add", broken)


def forget_what_was_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    add = step_counts.StepCounts.add

    def broken(self: Any, part: Any, *more: Any) -> None:
        add(self, part._replace(known=np.zeros_like(part.known)), *more)

    monkeypatch.setattr(step_counts.StepCounts, "add", broken)


def blame_no_program_for_a_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    surplus = state.State.surplus
    monkeypatch.setattr(state.State, "surplus", lambda self, program, tokens: surplus(self, None, tokens))


def begin_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = admission._first_admission

    def broken(state: Any, request: Any, *more: Any) -> None:
        program, request.program = request.program, None
        begin(state, request, *more)
        request.program = program

    monkeypatch.setattr(admission, "_first_admission", broken)


@pytest.mark.parametrize(
    "sabotage",
    [
        lose_a_slot,
        keep_a_lock,
        stop_one_late,
        end_twice,
        forget_an_end,
        wrong_slots,
        never_mind_age,
        go_on_beside_a_draft,
        forget_where_grammars_end,
        begin_without_the_grammar,
        keep_a_rejected_slot,
        keep_for_the_dead,
        count_a_position_twice,
        take_prompts_for_outputs,
        forget_what_was_computed_before,
        blame_no_program_for_a_surplus,
        begin_uncounted,
    ],
)
def test_a_fault_is_found(sabotage: Callable[[pytest.MonkeyPatch], None]) -> None:
    """What is broken on purpose is seen within a few seeds, with the command that repeats it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sabotage(monkeypatch)
        failed = first_failure()
    assert f"python -m bench.scheduler simulate --seed {failed.run.seed}" in str(failed)
    failed.run.go()


def test_a_failure_is_made_smaller() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_one_late(monkeypatch)
        smaller = shrink(first_failure())
        assert smaller.run.keep is not None
        assert len(smaller.run.keep) <= 3
        with pytest.raises(SimulationFailed):
            smaller.run.go()


@pytest.mark.parametrize("broken", [False, True])
def test_the_bench(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on after a seed that fails, and its exit code says that there was one."""
    if broken:
        stop_one_late(monkeypatch)
    file, requests = tmp_path / "r.json", 400 if broken else 80
    words = f"bench simulate --share 1 --requests {requests} --json {file}"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as ended:
        scheduler.main()
    report = json.loads(file.read_text())
    assert ended.value.code == int(broken)
    assert bool(report["failures"]) == broken
    assert broken or report["requests"] >= requests
    printed = capsys.readouterr().out
    assert all(failed["command"] in printed for failed in report["failures"])
