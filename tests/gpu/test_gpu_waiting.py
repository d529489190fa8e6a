"""Nothing that is launched, or captured, waits for the device; and what would is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sapwood.srt.messages import Step
from sapwood.srt.worker.device.lane import Lane
from sapwood.srt.worker.device.runner import DeviceRunner
from tests.gpu.device_bench import capture_all, device_bench
from tests.gpu.host_accelerator import HostAccelerator
from tests.gpu.no_waiting import nothing_waits
from tests.gpu.package_double import package
from tests.gpu.stream_checks import StreamAccelerator
from tests.gpu.test_gpu_streams import work
from tests.models import tiny_llama
from tests.worker_bench import SLOTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, num_key_value_heads=2, head_dim=64
    )


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 1),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x + 1),
    "mask": lambda x: x[x > 1],
    "into a mask": lambda x: x.__setitem__(x > 1, 0.5),
}


@pytest.mark.parametrize("how", WAITS)
def test_what_waits_is_refused(how: str) -> None:
    accelerator = StreamAccelerator()
    with accelerator.watch:
        there = torch.ones(4, device=accelerator.device)
        with pytest.raises(AssertionError, match="waits for"), nothing_waits(accelerator.watch.is_on_device):
            WAITS[how](there)
        with nothing_waits(accelerator.watch.is_on_device):
            WAITS[how](torch.ones(4))
            there[0] = there.eq(1).sum()
            there[torch.tensor([0, 1])] = 3.0


@pytest.mark.parametrize("how", WAITS)
def test_what_waits_is_not_captured(how: str) -> None:
    there = torch.ones(4)
    with pytest.raises(AssertionError, match="waits for"):
        HostAccelerator().capture(lambda: WAITS[how](there), None)


def test_what_crosses_between_host_and_device_is_not_captured() -> None:
    accelerator = StreamAccelerator()
    with accelerator.watch:
        there = torch.ones(4, device=accelerator.device)
        pinned, host = accelerator.pinned((4,), torch.float32), torch.ones(4)
        crossing: dict[str, Callable[[], object]] = {
            "host and device": lambda: host.to(accelerator.device),
            "device and host": lambda: pinned[1:].copy_(there[1:]),
            "pinned memory is made": lambda: accelerator.pinned((1,), torch.int32),
        }
        crossing["host and device again"] = lambda: there.copy_(pinned)
        for words, run in crossing.items():
            expected = words if "pinned" in words else "copies between host and device"
            with pytest.raises(AssertionError, match=expected):
                accelerator.capture(run, accelerator.stream())
        accelerator.capture(lambda: there.mul_(2), accelerator.stream())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[StreamAccelerator], list[int]]:
    """Has launches refuse to wait, and tells of their numbers."""

    def watch(accelerator: StreamAccelerator) -> list[int]:
        numbers: list[int] = []
        launch = DeviceRunner._launch

        def strictly(self: DeviceRunner, step: Step, lane: Lane, begun: float) -> None:
            with nothing_waits(accelerator.watch.is_on_device):
                launch(self, step, lane, begun)
            numbers.append(step.number)

        monkeypatch.setattr(DeviceRunner, "_launch", strictly)
        return numbers

    return watch


@pytest.mark.parametrize("kind", ["eager", "graphs", "gathered", "full"])
def test_no_launch_waits(folder: Path, kind: str, launched: Callable[[StreamAccelerator], list[int]]) -> None:
    accelerator = StreamAccelerator(late=50)
    numbers = launched(accelerator)
    options: dict[str, Any] = {"disable_cuda_graph": kind == "eager"}
    if kind == "full":
        options |= {"ops": package(), "dtype": "bfloat16", "max_total_tokens": SLOTS}
    with accelerator.watch:
        bench = device_bench(folder, accelerator, None if kind == "gathered" else package(), **options)
        capture_all(bench)
        ahead = work(bench)
    assert len(numbers) == len(ahead.results) > 20
    assert not [error for result in ahead.results for error in result.errors]


@pytest.mark.parametrize("where", ["plan", "lines"])
def test_a_launch_that_waits_is_found(
    folder: Path,
    where: str,
    launched: Callable[[StreamAccelerator], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = StreamAccelerator()
    launched(accelerator)
    with accelerator.watch:
        bench = device_bench(folder, accelerator)
        inner = getattr(Lane, where)

        def reads(self: Lane, given: Any) -> Any:
            found = inner(self, given)
            (found if where == "lines" else found.batch.slots).tolist()
            return found

        monkeypatch.setattr(Lane, where, reads)
        with pytest.raises(AssertionError, match="tolist waits for the device"):
            work(bench)
