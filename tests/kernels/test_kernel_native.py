"""Loading the extension: what can be chosen, and what is said when it cannot."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sapwood.kernels import native
from sapwood.kernels.ops.gemm import linear, pack


def test_auto_takes_the_best_and_portable_is_always_there() -> None:
    assert native.available()[-1] == "portable"
    assert native.load("auto") == native.available()[0]
    assert native.load("portable", threads=1) == "portable"
    native.load()


@pytest.mark.parametrize(
    ("isa", "threads", "said"), [("mmx", 1, "'mmx'.*portable"), ("auto", 0, "at least 1 thread, got 0")]
)
def test_an_impossible_choice_is_refused(isa: str, threads: int, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        native.load(isa, threads)


def test_a_missing_extension_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sapwood.kernels._C", None)
    with pytest.raises(RuntimeError, match=r"were not built.*g\+\+.*pip install"):
        native.load()


def test_importing_the_ops_loads_no_extension() -> None:
    code = (
        "import sys; from sapwood.kernels.ops import attention, gemm, sampling; "
        "sys.exit('sapwood.kernels._C' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_other_python_threads_run_while_a_kernel_works() -> None:
    native.load(threads=1)
    x, w, out = torch.zeros(1024, 1024), pack(torch.zeros(4096, 1024), "float32"), torch.empty(1024, 4096)
    ticks: list[float] = []
    work = threading.Thread(target=lambda: linear(x, w, out))
    work.start()
    while work.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.001)
    native.load()
    assert len(ticks) > 5


def test_threads_sleep_when_there_is_nothing_to_do() -> None:
    native.load("auto", 4)
    try:
        weight = pack(torch.randn(512, 512), "float32")
        x, out = torch.randn(64, 512), torch.empty(64, 512)
        linear(x, weight, out)
        time.sleep(0.05)
        begin = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - begin < 0.005
    finally:
        native.load()


def test_kernels_may_be_called_from_two_threads_at_once() -> None:
    native.load("auto", 3)
    try:
        weight = pack(torch.randn(512, 256), "float32")
        x = torch.randn(40, 256)
        want = torch.empty(40, 512)
        linear(x, weight, want)

        def again(_: int) -> bool:
            out = torch.empty(40, 512)
            linear(x, weight, out)
            return torch.equal(out, want)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(again, range(400)))
    finally:
        native.load()


def test_more_threads_than_cores_sleep_and_wake_without_losing_a_loop() -> None:
    native.load("auto", 8)
    try:
        weight = pack(torch.randn(512, 64), "float32")
        x, want, out = torch.randn(8, 64), torch.empty(8, 512), torch.empty(8, 512)
        linear(x, weight, want)
        for turn in range(3000):
            out.zero_()
            linear(x, weight, out)
            assert torch.equal(out, want)
            if turn % 100 == 0:
                time.sleep(0.002)  # now all of them sleep
    finally:
        native.load()


def test_the_default_is_as_many_threads_as_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "choose_threads", lambda: (0, "no core at all"))
    with pytest.raises(RuntimeError, match="at least 1 thread, got 0"):
        native.load()
    native.load(threads=1)
    monkeypatch.undo()
    native.load()
