"""`bench.gpu`'s parts: what is compiled before the model runs, what is done without what does not compile,
which tests of a GPU run, and what figures are made of."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import compiling, measures, place as place_module, suite, watch
from bench.gpu.here import Here
from bench.gpu.parts import ATTENTION, CASCADE, FA3, OPS, REASON
from bench.gpu.place import NotHere, Place, missing
from bench.gpu.report import Report
from bench.gpu.shape import DRY, FULL, LLAMA_8B, prefill_flops, weight_bytes
from bench.gpu.trace import Event, busiest, events_of, gaps, window
from sapwood.srt.models.registry import spec_of
from sapwood.srt.models.spec import EMBEDDING, tensor_shapes
from tests.gpu import backends
from tests.unit.test_bench_gpu import is_running, wait_for


def test_outcomes_of_tests_are_counted_as_they_come() -> None:
    text = (
        "tests/gpu/test_a.py::test_x[gpu bfloat16] PASSED   [ 10%]\n"
        "tests/gpu/test_a.py::test_y FAILED                 [ 20%]\n"
        "tests/gpu/test_a.py::test_z SKIPPED (FlashInfer is not installed) [ 30%]\n"
        "tests/gpu/test_a.py::test_v[gpu fp8, 3 a head] SKIPPED (its kernel is not compiled)   [ 40%]\n"
        "tests/gpu/test_a.py::test_w "
    )
    assert suite.counted(text) == {"PASSED": 1, "FAILED": 1, "SKIPPED": 2}
    assert suite.uncompiled(text) == ["tests/gpu/test_a.py::test_v[gpu fp8, 3 a head]"]


def here_of(rows: list[dict[str, Any]], **options: Any) -> Here:
    return Here(Place(True, "", **options), DRY, rows.append, until=time.monotonic() + 300)


class Counting:
    """FlashInfer's double, and which of its functions and wrappers were called, or merely taken."""

    def __init__(self, inner: Any, broken: Callable[[str], None] = lambda name: None) -> None:
        self.inner, self.broken = inner, broken
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def called(*args: Any, **options: Any) -> Any:
            self.called.add(name)
            self.broken(name)
            return found(*args, **options)

        return called


def counting(monkeypatch: pytest.MonkeyPatch, broken: Callable[[str], None] = lambda name: None) -> Counting:
    double = Counting(place_module._double(), broken)
    monkeypatch.setattr(place_module, "_double", lambda: double)
    return double


@pytest.mark.usefixtures("_gradients")
def test_whatever_the_model_calls_has_been_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    double = counting(monkeypatch)
    here = here_of([])
    compiling.kernels(here)
    compiled, double.called = double.called, set()
    for part in (measures.model, measures.decode, measures.prefill, measures.cascade):
        part(here)
    assert "BatchPrefillWithPagedKVCacheWrapper" in double.called
    assert double.called <= compiled


@pytest.fixture
def _gradients() -> Iterator[None]:
    """As they were before: a model turns them off for its process."""
    before = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(before)


BROKEN = {
    "rmsnorm": OPS,
    "top_p_renorm_probs": OPS,
    "merge_state_in_place": CASCADE,
    "BatchPrefillWithPagedKVCacheWrapper": ATTENTION,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_kernel_that_fails_takes_no_other_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(called: str) -> None:
        if called == name:
            raise RuntimeError("Ninja build failed.\n" + "nvcc\n" * 9000 + "fatal error: curand.h")

    counting(monkeypatch, broken)
    rows: list[dict[str, Any]] = []
    here = here_of(rows)
    if BROKEN[name] == ATTENTION:
        with pytest.raises(RuntimeError, match="attention has no kernels"):
            compiling.kernels(here)
    else:
        compiling.kernels(here)
        assert here.place.without == {BROKEN[name]}
    assert len(rows) == 1 + len(compiling.LOST), "each has its row"
    lost = [row for row in rows if "lost" in row]
    assert BROKEN[name] in {row["lost"] for row in lost}
    assert all("fatal error: curand.h" in row["what"] and len(row["what"]) < REASON for row in lost)


@pytest.mark.usefixtures("_gradients")
def test_fp8_does_without_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, called = {"MultiLevelCascadeAttentionWrapper"}, list[str]()

    def broken(name: str) -> None:
        called.append(name)
        if name in bad:
            raise RuntimeError("it does not compile")

    counting(monkeypatch, broken)
    rows: list[dict[str, Any]] = []
    here = here_of(rows)
    measures.fp8(here)
    assert here.place.without == {CASCADE}, "what is lost only here"
    called.clear()
    measures.fp8(here)
    assert "MultiLevelCascadeAttentionWrapper" not in called, "it failed before"
    assert rows[-1]["what"].endswith(", W8A8, fp8 KV")
    bad.add("BatchDecodeWithPagedKVCacheWrapper")
    with pytest.raises(RuntimeError, match="attention has no kernels"):
        measures.fp8(here)


def test_kernels_that_take_too_long_are_told_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    counting(monkeypatch, lambda name: name != "silu_and_mul" or not slow.wait(30) or None)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    here = here_of(rows)
    here.until = time.monotonic() + 5
    try:
        with pytest.raises(RuntimeError, match="not compiled in time: gate"):
            compiling.kernels(here)
    finally:
        slow.set()
    assert [row["lost"] for row in rows if "lost" in row] == [OPS]


@pytest.mark.usefixtures("_gradients")
@pytest.mark.parametrize("without", [OPS, CASCADE, FA3])
def test_the_model_runs_without_what_is_lost(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double, taken = counting(monkeypatch), list[str]()
    prefill = double.inner.BatchPrefillWithPagedKVCacheWrapper

    def made(*args: Any, backend: str) -> Any:
        taken.append(backend)
        return prefill(*args, backend=backend)

    double.inner.BatchPrefillWithPagedKVCacheWrapper = made
    here = here_of([], without=[without])
    measures.model(here)
    measures.decode(here)
    assert (set(taken) == {"fa2"}) is (without == FA3)
    assert ("rmsnorm" in double.called) is (without != OPS)
    assert ("top_k_renorm_probs" in double.called) is (without != OPS)
    assert ("merge_state_in_place" in double.called) is (without != CASCADE)
    if without == CASCADE:
        with pytest.raises(NotHere):
            measures.cascade(here)


def test_what_is_needed_is_told_from_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["einops", "cuda-tile>=1.4.0", 'torch>=2.12.0; extra == "b12x"', "tqdm"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: named)
    monkeypatch.setattr(place_module, "_installed", lambda name: name not in ("einops", "cuda-tile"))
    for folder in ("csrc", "include", "cutlass"):
        (tmp_path / "flashinfer/data" / folder).mkdir(parents=True)
    lacking, optional = missing(tmp_path)
    assert lacking[0] == "the package einops"
    assert [Path(name).name for name in lacking[1:]] == [
        "__init__.py", "batch_prefill.cu", "flashinfer", "cub", "cute", "include", "include",
    ]  # fmt: skip
    assert optional == ["cuda-tile"]


def suite_here(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], plain: str = "") -> Here:
    """A place that is taken for a GPU's, whose tests are those of one file."""
    here = here_of(rows)
    here.place.dry, here.place.plain = False, plain
    monkeypatch.setattr(Here, "close", lambda self: None)
    monkeypatch.setattr(suite, "versions_found", lambda: SimpleNamespace(compiled=True))
    return here


def test_without_pytest_no_tests_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    here = here_of([])
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pytest" else real(name))
    with pytest.raises(NotHere, match="pytest is not installed"):
        suite.tests(here)


def test_tests_of_which_none_ran_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PYTEST", ("--no-such-option",))
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        suite.tests(here_of([]))


def test_those_whose_kernels_are_there_are_first(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], dict[str, str]]] = []
    skipped = "tests/gpu/test_a.py::test_v[gpu fp8] SKIPPED (its kernel is not compiled) [ 40%]\n"

    def run(arguments: Any, environment: Any, limit: float) -> suite.Run:
        runs.append((list(arguments), dict(environment)))
        text = (
            skipped if "compiled" in environment.values() else ""
        ) + "tests/gpu/test_a.py::test_w PASSED [ 50%]\n"
        return suite.Run(text, True, 0, suite.counted(text))

    monkeypatch.setattr(suite, "_run", run)
    rows: list[dict[str, Any]] = []
    suite.tests(suite_here(monkeypatch, rows))
    (first, only), (second, nothing) = runs
    assert first[0] == "tests/gpu/test_gpu_device.py"
    assert "tests/gpu/test_gpu_runner.py" not in first
    assert (only, nothing) == ({"SAPWOOD_TEST_FLASHINFER": "compiled"}, {})
    assert second == ["tests/gpu/test_a.py::test_v[gpu fp8]"]
    runs.clear()
    suite.tests(suite_here(monkeypatch, rows, "it does not compile"))
    assert [only for _arguments, only in runs] == [{"SAPWOOD_TEST_FLASHINFER": "nothing"}]


def test_flashinfer_is_tested_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        is_compiled = False

        def build_and_load(self) -> str:
            return "loaded"

    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", SimpleNamespace(JitSpec=Spec))
    assert backends.the_package() is sys.modules["flashinfer"]
    assert Spec().build_and_load() == "loaded"
    monkeypatch.setenv(backends.ONLY, "compiled")
    for _ in range(2):
        assert backends.the_package() is sys.modules["flashinfer"]
        with pytest.raises(pytest.skip.Exception, match=backends.UNCOMPILED):
            Spec().build_and_load()
    Spec.is_compiled = True
    assert Spec().build_and_load() == "loaded"
    monkeypatch.setenv(backends.ONLY, "nothing")
    with pytest.raises(pytest.skip.Exception, match="not to be tested"):
        backends.the_package()


def test_where_the_cpp_kernels_are_not_built_what_needs_them_is_skipped(tmp_path: Path) -> None:
    Path(tmp_path, "unbuilt.py").write_text("import sys\nsys.modules['sapwood.kernels._C'] = None\n")
    command = [
        sys.executable, "-m", "pytest", "-n", "0", "-p", "unbuilt", "tests/gpu/test_gpu_ops.py",
        "-k", "8_bit_weights_are_near and phi3 and cpu and not double",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        command, cwd=suite.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "the C++ kernels are not built" in told.stdout
    assert "1 skipped" in told.stdout


def test_what_tests_have_started_ends_with_them(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    with suite._grouped(["sh", "-c", script], os.environ, None):
        wait_for(lambda: pid.exists() and pid.read_text() != "")
    wait_for(lambda: not is_running(int(pid.read_text())))


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
