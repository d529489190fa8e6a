"""Plays the worker: the device's runner on the stand-in, behind the worker's own loop, sockets and ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.models.parallel import Alone, Group
from sapwood.srt.orders import Boot
from sapwood.srt.worker import loop, ranks
from sapwood.srt.worker.choice import Choice
from sapwood.srt.worker.device.build import Site, make_device_runner
from sapwood.srt.worker.grammars import Grammars
from tests.gpu.host_accelerator import Captured, HostAccelerator
from tests.gpu.package_double import package

SECONDS = 0.004
"""A step is done so much later: so another one has begun by then."""


def make(
    config: Config, source: ModelSource, choice: Choice, group: Group, grammars: Grammars
) -> tuple[loop.Runs, int, dict[str, str]]:
    accelerator = HostAccelerator(seconds=SECONDS)
    site = Site(accelerator, Captured(group), package())
    runner, pool, facts = make_device_runner(config, source, site, grammars, 1)
    assert group.size == 1 or accelerator.captures, "ranks make all their graphs beforehand"
    return runner, pool.num_slots, facts


def group_of(boot: Boot, device: torch.device, lifeline: Lifeline) -> AbstractContextManager[Group]:
    if boot.config.tensor_parallel_size == 1:
        return nullcontext(Alone())
    return ranks.joined(boot, torch.device("cpu"), lifeline)


def main(boot: Boot, lifeline: Lifeline) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device = lambda device: None
    parts: dict[str, Any] = {
        "choose": lambda config: Choice("cuda", "flashinfer"),
        "_make_cuda": make,
        "_group": group_of,
    }
    for name, part in parts.items():
        assert hasattr(loop, name)
        setattr(loop, name, part)
    loop.main(boot, lifeline)
