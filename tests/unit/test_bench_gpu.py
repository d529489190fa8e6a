"""`bench.gpu`: its dry run does every part, and what fails, hangs or is not there is told, and the rest
goes on. As a program (`python -m tests.unit.test_bench_gpu`) this file is a process of parts that does as
scripted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as program, watch
from bench.gpu.__main__ import Bench, main, parsed
from bench.gpu.parts import (
    ATTENTION,
    BACKEND,
    FA3,
    NAMES,
    OPS,
    RAN,
    REASON,
    limit_of,
    limits_of,
    needed,
    short,
    time_for,
)
from bench.gpu.watch import Crew

SELF = "tests.unit.test_bench_gpu"
ROWS = {"row": "w", "ran": RAN, "lost": "it does not compile"}
REASONS = {"": "as scripted", "*": "x" * 140_001}
"""What a script's words tell; * is more than an argument may be."""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("gpu") / "dry.json"
    assert main(["--dry-run", "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_dry_run_does_every_part_but_the_profile(dry: dict[str, Any]) -> None:
    statuses = {name: part["status"] for name, part in dry["parts"].items()}
    assert statuses == dict.fromkeys(NAMES, "done") | {"gaps": "skipped"}
    assert "no streams" in dry["parts"]["gaps"]["reason"]
    for part in dry["parts"].values():
        assert set(part) == {"status", "reason", "seconds", "limit", "rows"}
        assert all({"what", "value", "unit"} <= set(row) for row in part["rows"])


def test_a_dry_run_says_that_it_is_one(dry: dict[str, Any]) -> None:
    assert dry["hardware"] == "none: dry run on a CPU"
    assert dry["dry_run"] is True
    assert dry["not_met"] == []
    rows = [row for part in dry["parts"].values() for row in part["rows"]]
    assert {row["met"] for row in rows if "met" in row} == {None}


def test_the_json_has_all_that_a_reader_needs(dry: dict[str, Any]) -> None:
    assert set(dry) == {
        "hardware", "dry_run", "date", "command", "budget", "seconds", "versions", "backend",
        "no_flashinfer", "without", "no_graphs", "not_met", "parts",
    }  # fmt: skip
    assert {"sapwood", "torch", "torch_cuda", "driver", "flashinfer", "nvcc"} <= set(dry["versions"])
    rows = {name: part["rows"] for name, part in dry["parts"].items()}
    (reading,) = (row["value"] * 1e9 for row in rows["rates"] if row.get("roofline") == "read")
    for row in rows["decode"]:
        assert row["rate"] == pytest.approx(row["bytes"] / row["step_s"])
        assert row["goal"] == 0.7
        assert 0 < row["lowest_s"] <= row["step_s"] <= row["highest_s"]
        assert row["samples"] >= 6
        assert (row["what"].split(",")[0], row["context"] > 40) == (f"batch {row['batch']}", True)
        assert row["share"] == pytest.approx(row["rate"] / reading)
    assert [row["goal"] for row in rows["prefill"]] == [0.6, 0.6]
    assert len(rows["first_token"]) == 3
    assert [row["what"].split(", ")[1] for row in rows["switches"][:3]] == [
        "overlap on", "overlap off", "graphs off",
    ]  # fmt: skip
    assert rows["cascade"][1]["ratio"] > 0
    assert len(rows["baseline"]) == 4
    assert {row["what"]: row["value"] for row in rows["tests"]}["passed"] > 0
    assert rows["deterministic"][0]["value"] in ("yes", "no")
    assert [row["what"] for row in rows["model"][:2]] == [
        "weights, to be warmed up", "loaded, with random weights, K and V",
    ]  # fmt: skip
    assert rows["model"][-1]["graphs"] == [1, 2, 4]


def test_without_flashinfer_it_is_plain_torch_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    parts = "kernels,model,decode,prefill,cascade,baseline,deterministic"
    assert main(["--dry-run", "--no-flashinfer", "--only", parts, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["backend"] == "plain torch: torch SDPA over gathered KV; no FlashInfer (--no-flashinfer)"
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert [name for name, status in statuses.items() if status == "skipped"] == [
        "kernels", "cascade", "deterministic",
    ]  # fmt: skip
    assert all(row["what"].endswith("eager") for row in found["parts"]["decode"]["rows"])
    assert all("plain torch" in row["what"] for row in found["parts"]["baseline"]["rows"])


def crew(script: dict[str, list[Any]], told: list[str] | None = None, seconds: float = 300.0) -> Crew:
    def seen(part: str, row: dict[str, Any] | None) -> None:
        if told is not None and row is None:
            told.append(part)

    return Crew(["--script", json.dumps(script)], seconds, seen, SELF)


def hurry(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> None:
    monkeypatch.setattr(watch, "limit_of", lambda name, given: seconds)
    monkeypatch.setattr(watch, "GRACE", 0.3)
    monkeypatch.setattr(watch, "ENDING", 0.2)


def outcomes(found: Crew) -> dict[str, tuple[str, str | None]]:
    return {name: (outcome.status, outcome.reason) for name, outcome in found.outcomes.items()}


def test_a_part_that_fails_or_crashes_keeps_its_rows_and_the_others_go_on() -> None:
    told: list[str] = []
    runs = crew({"rates": ["row", "fail"], "decode": ["row", "row", "crash"]}, told)
    runs.run(["found", "rates", "model", "decode", "prefill"])
    assert told == ["found", "rates", "model", "decode", "prefill"]
    assert outcomes(runs) == {
        "found": ("done", None),
        "rates": ("failed", "as scripted"),
        "model": ("done", None),
        "decode": ("failed", "the process ended with 7"),
        "prefill": ("done", None),
    }
    assert [len(outcome.rows) for outcome in runs.outcomes.values()] == [0, 1, 0, 2, 0]


def test_a_part_that_hangs_is_ended_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    runs = crew({"rates": ["row", "hang"]})
    runs.run(["found", "rates", "tests"])
    assert 0.6 <= runs.outcomes["rates"].seconds < 8
    status, reason = outcomes(runs)["rates"]
    assert status == "cut"
    assert reason is not None
    assert reason.startswith("it did not end within")
    assert outcomes(runs)["tests"] == ("done", None)


def test_what_a_killed_part_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hurry(monkeypatch, 2.0)  # in which it is started
    runs = crew({"rates": [f"spawn {tmp_path / 'pid'}", "hang"]})
    runs.run(["found", "rates"])
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("part", BACKEND)
def test_where_flashinfer_fails_plain_torch_is_measured(part: str) -> None:
    runs = crew({part: ["crash unless --plain"]})
    runs.run(["found", "kernels", "model", "decode"])
    assert f"the part {part} was failed" in runs.plain
    assert outcomes(runs)["model"] == outcomes(runs)["decode"] == ("done", None)
    assert not runs.no_graphs


def test_a_kernel_that_is_lost_is_done_without_and_flashinfer_is_kept() -> None:
    runs = crew({"kernels": [f"lost {OPS}", "fail"], "model": [f"crash unless --without={OPS}"]})
    runs.run(["found", "kernels", "model", "decode"])
    assert runs.without == {OPS: "it does not compile"}
    assert not runs.plain
    assert outcomes(runs)["kernels"][0] == "failed"
    assert outcomes(runs)["model"] == outcomes(runs)["decode"] == ("done", None)


def test_what_is_lost_in_8_bits_is_not_told_of_all() -> None:
    runs = crew({"fp8": [f"lost {FA3}", "fail"]})
    runs.run(["found", "kernels", "fp8"])
    assert len(runs.outcomes["fp8"].rows) == 1
    assert runs.without == {}


@pytest.mark.parametrize("words", [[f"lost {ATTENTION}", f"lost {OPS}", "fail"], [f"lost {OPS}", "hang"]])
def test_without_attentions_kernels_or_where_they_are_unknown_plain_torch_is_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, 1.0)
    runs = crew({"kernels": words, "model": ["crash unless --plain"]})
    runs.run(["found", "kernels", "model"])
    assert runs.plain
    assert outcomes(runs)["model"] == ("done", None)


def test_a_reason_that_is_long_is_no_argument() -> None:
    runs = crew({"kernels": ["fail *"], "model": ["crash unless --plain"]})
    runs.run(["found", "kernels", "model"])
    assert len(runs.plain) > 140_000
    assert outcomes(runs)["model"] == ("done", None)


def test_a_compilers_output_is_cut_to_what_tells() -> None:
    told = "RuntimeError: Ninja build failed.\n" + "nvcc -I/x \n" * 20_000
    told += "a.cu:1: fatal error: curand.h: No such file\n" + "more\n" * 100
    assert short(told) == "RuntimeError: Ninja build failed. | a.cu:1: fatal error: curand.h: No such file"
    assert len(short("error " * 10_000 + "\nerror " * 10_000)) <= REASON
    assert short("as\0 scripted\n") == "as scripted"


def test_a_part_has_the_limit_that_was_given() -> None:
    runs = Crew(["--script", "{}"], 300.0, lambda part, row: None, SELF, {"kernels": 600.0})
    runs.run(["found", "kernels"])
    assert [outcome.limit for outcome in runs.outcomes.values()] == [limit_of("found"), 600.0]
    assert time_for("kernels", 500.0, [], {"kernels": 300.0}) == 300.0
    assert limits_of(["kernels=300", "model=1.5"]) == {"kernels": 300.0, "model": 1.5}
    for wrong in ("kernel=3", "kernels", "kernels=x"):
        with pytest.raises(SystemExit):
            main(["--limit", wrong])


def test_tests_leave_time_for_the_parts_behind_them() -> None:
    assert time_for("tests", 150.0, ["fp8"], {}) == 90.0
    assert time_for("tests", 70.0, ["fp8"], {}) == 30.0
    assert time_for("tests", 20.0, ["fp8"], {}) == 20.0
    assert time_for("tests", 110.0, [], {}) == 110.0


def test_what_a_part_needs_is_done_before_it() -> None:
    assert needed(["decode"]) == ["found", "kernels", "rates", "decode"]
    assert needed(["tests"]) == ["found", "kernels", "tests"]
    assert needed(["found"]) == ["found"]
    assert needed(NAMES) == list(NAMES)


def test_a_bench_that_is_ended_ends_what_runs_and_says_what_ran(tmp_path: Path) -> None:
    file, pid = tmp_path / "ended.json", tmp_path / "pid"
    script = json.dumps({"rates": ["row", f"spawn {pid}", "hang"]})
    command = [sys.executable, "-m", SELF, "--bench", str(file), script]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        wait_for(lambda: pid.exists() and pid.read_text() != "")
        found = json.loads(file.read_text())
        assert found["parts"]["rates"]["status"] == "running"
        assert len(found["parts"]["rates"]["rows"]) == 1, "it is written with each row"
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    statuses = {name: part["status"] for name, part in json.loads(file.read_text())["parts"].items()}
    assert statuses == {"found": "done", "rates": "running", "decode": "skipped"}
    wait_for(lambda: not is_running(int(pid.read_text())))


def test_a_child_does_not_outlive_a_bench_that_was_killed(tmp_path: Path) -> None:
    file, pid = tmp_path / "killed.json", tmp_path / "pid"
    script = json.dumps({"rates": [f"itself {pid}", "hang"]})
    process = subprocess.Popen(
        [sys.executable, "-m", SELF, "--bench", str(file), script], cwd=Path(__file__).parents[2]
    )
    try:
        wait_for(lambda: pid.exists() and pid.read_text() != "")
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not is_running(int(pid.read_text())))


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def test_flashinfer_that_is_not_there_is_no_failure() -> None:
    runs = crew({"kernels": ["skip"], "model": ["crash"]})
    runs.run(["found", "kernels", "model", "decode", "tests"])
    assert runs.plain == "as scripted"
    assert outcomes(runs)["kernels"] == ("skipped", "as scripted")
    assert outcomes(runs)["decode"] == ("skipped", "the model did not run")
    assert outcomes(runs)["tests"] == ("done", None)


def test_where_only_graphs_fail_flashinfer_is_measured_without() -> None:
    runs = crew({"model": ["ran", "crash unless --no-graphs"]})
    runs.run(["found", "kernels", "model", "decode"])
    assert "the part model was failed" in runs.no_graphs
    assert not runs.plain
    assert outcomes(runs)["decode"] == ("done", None)


def test_without_a_device_nothing_is_tried() -> None:
    runs = crew({"found": ["fail"]})
    runs.run(["found", "kernels", "tests"])
    assert outcomes(runs)["tests"] == ("skipped", "nothing was found")


def test_what_the_time_does_not_reach_says_so() -> None:
    runs = crew({"rates": ["crash"]}, seconds=5.0)
    runs.run(["found", "rates", "decode"])
    status, reason = outcomes(runs)["decode"]
    assert status == "skipped"
    assert reason is not None
    assert "no time is left" in reason


def _scripted() -> None:
    """A process of parts, each of which does what the script has for it."""
    watch.die_with_parent()
    given = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    script: dict[str, list[str]] = json.loads(given["--script"])

    def tell(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    for name in given["--only"].split(","):
        tell(part=name, event="begin")
        end: dict[str, Any] = {"event": "done"}
        for word in script.get(name, []):
            first, _, more = word.partition(" ")
            if first in ROWS:
                lost = {"lost": more} if more else {}
                tell(event="row", row={"what": ROWS[first], "value": 1, "unit": ""} | lost)
            elif first in ("fail", "skip"):
                end = {"event": {"fail": "failed", "skip": "skipped"}[first], "reason": REASONS[more]}
            elif first == "hang":
                time.sleep(60)
            elif first == "spawn":
                _spawn(Path(more))
            elif first == "itself":
                Path(more).write_text(str(os.getpid()))
            elif more.removeprefix("unless ") not in sys.argv:
                os._exit(7)
        tell(**end)
        if end["event"] == "failed":
            return
    tell(event="end")


def _spawn(file: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    file.write_text(str(process.pid))


def _benched(file: str, script: str) -> None:
    """bench.gpu, whose parts do as scripted."""
    bench = Bench(parsed(["--json", file]))
    bench._crew = Crew(["--script", script], 300.0, bench._seen, SELF)
    signal.signal(signal.SIGTERM, program._end)
    bench.run(["found", "rates", "decode"])


if __name__ == "__main__":
    if sys.argv[1] == "--bench":
        _benched(*sys.argv[2:])
    else:
        _scripted()
