"""`bench.gpu`: its dry run does every part, and what fails, hangs or is not there is told, and the rest
goes on. As a program (`python -m tests.unit.test_bench_gpu`) this file is a process of parts that does as
scripted.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import watch
from bench.gpu.__main__ import main
from bench.gpu.parts import BACKEND, NAMES, RAN
from bench.gpu.report import Report
from bench.gpu.shape import FULL, LLAMA_8B, prefill_flops, weight_bytes
from bench.gpu.trace import Event, busiest, events_of, gaps, window
from bench.gpu.watch import Crew
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, tensor_shapes

SELF = "tests.unit.test_bench_gpu"


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
        "no_flashinfer", "no_graphs", "not_met", "parts",
    }  # fmt: skip
    assert {"sapwood", "torch", "torch_cuda", "driver", "flashinfer", "nvcc"} <= set(dry["versions"])
    rows = {name: part["rows"] for name, part in dry["parts"].items()}
    for row in rows["decode"]:
        assert row["rate"] == pytest.approx(row["bytes"] / row["step_s"])
        assert row["goal"] == 0.7
        assert 0 < row["share"] < 1.5
    assert [row["goal"] for row in rows["prefill"]] == [0.6, 0.6]
    assert len(rows["first_token"]) == 3
    assert [row["what"].split(", ")[1] for row in rows["switches"][:3]] == [
        "overlap on", "overlap off", "graphs off",
    ]  # fmt: skip
    assert rows["cascade"][1]["ratio"] > 0
    assert len(rows["baseline"]) == 4
    assert {row["what"]: row["value"] for row in rows["tests"]}["passed"] > 0
    assert rows["deterministic"][0]["value"] in ("yes", "no")
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


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "limit_of", lambda name: 0.3)
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
    begin = time.monotonic()
    runs.run(["found", "rates", "tests"])
    assert time.monotonic() - begin < 8
    status, reason = outcomes(runs)["rates"]
    assert status == "cut"
    assert reason is not None
    assert reason.startswith("it did not end within")
    assert outcomes(runs)["tests"] == ("done", None)


def test_what_a_killed_part_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hurry(monkeypatch)
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
    runs = crew({part: ["crash unless plain"]})
    runs.run(["found", "kernels", "model", "decode"])
    assert f"the part {part} was failed" in runs.plain
    assert outcomes(runs)["model"] == outcomes(runs)["decode"] == ("done", None)
    assert not runs.no_graphs


def test_flashinfer_that_is_not_there_is_no_failure() -> None:
    runs = crew({"kernels": ["skip"], "model": ["crash"]})
    runs.run(["found", "kernels", "model", "decode", "tests"])
    assert runs.plain == "as scripted"
    assert outcomes(runs)["kernels"] == ("skipped", "as scripted")
    assert outcomes(runs)["decode"] == ("skipped", "the model did not run")
    assert outcomes(runs)["tests"] == ("done", None)


def test_where_only_graphs_fail_flashinfer_is_measured_without() -> None:
    runs = crew({"model": ["ran", "crash unless eager"]})
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


def test_a_share_is_of_what_was_measured_and_decides_the_goal() -> None:
    report = Report(dry=False)
    report.take("rates", {"what": "read", "value": 4000.0, "unit": "GB/s", "roofline": "read"})
    good = {"what": "batch 1", "value": 9.0, "unit": "tokens/s", "rate": 3.0e12, "of": "read", "goal": 0.7}
    bad = good | {"rate": 2.7e12}
    assert "75% of reading" in report.take("decode", good)
    assert "NOT MET" in report.take("decode", bad)
    assert (good["share"], good["met"], bad["met"]) == (0.75, True, False)
    unknown = good | {"of": "matmul"}
    report.take("decode", unknown)
    assert (unknown["share"], unknown["met"]) == (None, None)
    none = {"what": "gaps", "value": 1, "unit": "gaps", "most": 0}
    report.take("gaps", none)
    assert none["met"] is False


def test_decode_reads_all_weights_but_the_embedding() -> None:
    spec = spec_of(LLAMA_8B)
    matrices = {name: shape for name, shape in tensor_shapes(spec).items() if len(shape) == 2}
    params = sum(math.prod(shape) for shape in matrices.values())
    assert 8.0e9 < params < 8.1e9
    head = spec.vocab * spec.hidden
    assert weight_bytes(spec, 2) == 2 * (params - math.prod(matrices[EMBEDDING]))
    assert weight_bytes(spec, 1) == params - math.prod(matrices[EMBEDDING]) + head
    one = prefill_flops(spec, 1)
    assert one == 2.0 * (params - head) + 4 * spec.layers * spec.q_heads * spec.head_dim
    assert prefill_flops(spec, 8192) > 8192 * (one - 2.0 * head)


def test_the_pool_holds_what_is_measured() -> None:
    longest = max(*FULL.prefills, FULL.prefix + FULL.suffix, FULL.shared + 100)
    assert longest < FULL.context_length
    assert max(FULL.batches) * (FULL.context + FULL.steps + watch.GRACE) < FULL.slots


def test_gaps_are_those_of_the_compute_stream_within_the_window() -> None:
    us = 1e-6
    compute = [Event(7, 100 * i * us, (100 * i + 95) * us) for i in range(10)]
    late = [Event(7, (100 * i + 50) * us, (100 * i + 95) * us) for i in range(10, 15)]
    copies = [Event(9, 995 * us, 1050 * us)]
    events = [*compute, *late, *copies]
    assert busiest(events) == 7
    alone = [event for event in events if event.stream == 7]
    assert gaps(alone, 0.0, 995 * us).count == 0, "5 us are none"
    found = gaps(alone, 0.0, 1495 * us)
    assert found.count == 5
    assert found.seconds == pytest.approx(5 * 55 * us)
    assert gaps(events, 0.0, 1495 * us).count == 4, "a copy ran in one of them"
    assert gaps(alone, 0.0, 1595 * us).count == 6, "the window ends in one"
    assert window(alone, 100 * us, 5, 2) == pytest.approx((795 * us, 1295 * us))


def test_a_trace_is_read_by_what_ran_on_the_device() -> None:
    trace = {
        "traceEvents": [
            {"cat": "kernel", "ts": 10.0, "dur": 5.0, "args": {"stream": 7}},
            {"cat": "gpu_memcpy", "ts": 20.0, "dur": 1.0, "args": {"stream": 9}},
            {"cat": "cuda_runtime", "ts": 1.0, "dur": 90.0, "args": {}},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert [(e.stream, round(e.begin * 1e6), round(e.end * 1e6)) for e in events_of(trace)] == [
        (7, 10, 15), (9, 20, 21),
    ]  # fmt: skip


def test_outcomes_of_tests_are_counted_as_they_come() -> None:
    from bench.gpu.suite import counted

    text = (
        "tests/gpu/test_a.py::test_x[gpu bfloat16] PASSED   [ 10%]\n"
        "tests/gpu/test_a.py::test_y FAILED                 [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (FlashInfer is not installed) [ 30%]\n"
        "tests/gpu/test_a.py::test_w "
    )
    assert counted(text) == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}


def _scripted() -> None:
    """A process of parts, each of which does what the script has for it."""
    given = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    script: dict[str, list[str]] = json.loads(given["--script"])

    def tell(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    for name in given["--only"].split(","):
        tell(part=name, event="begin")
        end: dict[str, Any] = {"event": "done"}
        for word in script.get(name, []):
            if word == "row" or word == "ran":
                tell(event="row", row={"what": RAN if word == "ran" else "w", "value": 1, "unit": ""})
            elif word == "fail" or word == "skip":
                end = {"event": {"fail": "failed", "skip": "skipped"}[word], "reason": "as scripted"}
            elif word == "hang":
                time.sleep(60)
            elif word.startswith("spawn"):
                _spawn(Path(word.split()[1]))
            elif word == "crash" or not ("--plain=" not in sys.argv or "--no-graphs" in sys.argv):
                os._exit(7)
        tell(**end)
        if end["event"] == "failed":
            return
    tell(event="end")


def _spawn(file: Path) -> None:
    import subprocess

    process = subprocess.Popen(["sleep", "60"])
    file.write_text(str(process.pid))


if __name__ == "__main__":
    _scripted()
