"""The device's runner on a CPU, behind the same bench as the CPU's: steps one by one, or two in flight."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sapwood.srt.config import ModelSource, make
from sapwood.srt.messages import Step, StepResult
from sapwood.srt.models.parallel import Alone
from sapwood.srt.worker.device.build import Site, make_device_runner
from sapwood.srt.worker.device.runner import DeviceRunner
from sapwood.srt.worker.grammars import make_grammars
from tests.gpu.host_accelerator import HostAccelerator
from tests.models import source_of
from tests.worker_bench import SLOTS, Bench

SECONDS = 20.0


class OneByOne:
    """Runs a step and waits for its result; `spare` steps are begun before that of the first is asked for."""

    def __init__(self, inner: DeviceRunner) -> None:
        self.inner = inner
        self._decoder: Any = inner._parts.decoder

    def run(self, step: Step) -> StepResult:
        results = self.inner.start(step)
        deadline = time.monotonic() + SECONDS
        while not results:
            assert time.monotonic() < deadline, "a step has no result"
            results = self.inner.finished()
        (result,) = results
        return result


def device_bench(
    folder: Path, accelerator: HostAccelerator | None = None, attention: Any = None, **options: Any
) -> Bench:
    """A bench over `folder`'s model in float32 on the stand-in; `attention`: what stands for FlashInfer."""
    device = accelerator or HostAccelerator()
    settings = {"max_total_tokens": SLOTS, "max_running_requests": 8, "dtype": "float32", **options}
    config = make(model_path=str(folder), **settings)
    source: ModelSource = source_of(folder)
    grammars = make_grammars(source)
    site = Site(device, Alone(), attention)
    runner, pool, _facts = make_device_runner(config, source, site, grammars, 2)
    bench = Bench(OneByOne(runner), pool, grammars)  # type: ignore[arg-type]
    bench.spy()
    return bench
