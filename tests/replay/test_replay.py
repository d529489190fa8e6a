"""What the scheduler did on a few recorded workloads, it does again: a difference must be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood.srt import messages
from tests.simulation.trace import FOLDER, RECORD, difference, load, workloads

TRACES = sorted(FOLDER.glob("*.trace"))


def test_every_workload_is_recorded() -> None:
    assert {path.stem for path in TRACES} == set(workloads())


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_same_messages_give_the_same_steps(path: Path) -> None:
    found = difference(load(path))
    assert found is None, f"{path.stem}: {found}\nIf this is meant: {RECORD}"


def test_a_difference_is_shown() -> None:
    trace = load(FOLDER / "overload.trace")
    trace.options["chunked_prefill_size"] = 7
    found = difference(trace)
    assert found is not None
    assert "step 0, counts: recorded [" in found
    assert "Submit(" in found


def test_the_workloads_are_what_they_are_for() -> None:
    """Hits in the chat and the tree, retraction under overload."""
    steps = {}
    for name in ("chat", "few-shot-tree", "overload"):
        trace = load(FOLDER / f"{name}.trace")
        steps[name] = [step for turn in trace.turns for step in messages.decode(turn.steps)]
    for name in ("chat", "few-shot-tree"):
        cached = sum(len(start.prefix) // 4 for step in steps[name] for start in step.admitted)
        assert cached > 400, name
    admitted = [start for step in steps["overload"] for start in step.admitted]
    assert len(admitted) > len({(start.seed, start.choice) for start in admitted}), "nothing was retracted"


def test_drafts_and_grammars_are_recorded() -> None:
    for name in ("drafts", "grammars"):
        sent = [each for turn in load(FOLDER / f"{name}.trace").turns for each in messages.decode(turn.steps)]
        drafts = sum(bool(step.drafts) for step in sent if isinstance(step, messages.Step))
        loads = sum(isinstance(each, messages.LoadGrammar) for each in sent)
        assert drafts > 15, name
        assert (loads > 3) == (name == "grammars")
