"""The worker process: has the model loaded on its device, then answers steps in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from sapwood.srt import log
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import Config, ModelSource
from sapwood.srt.errors import ConfigError, Overloaded
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.messages import DropGrammars, GrammarLoaded, LoadGrammar, Step, StepResult, WorkerReady
from sapwood.srt.models.parallel import Alone, Group
from sapwood.srt.orders import Boot, inbox_of
from sapwood.srt.worker import cpu
from sapwood.srt.worker.choice import Choice, choose
from sapwood.srt.worker.grammars import Grammars, make_grammars

IDLE_SECONDS = 0.02
"""After so long without a message there is time for what can be put off."""

_log = logging.getLogger("sapwood")


class Runs(Protocol):
    """A runner, of any device. `fileno`: can be read when `finished` has something to tell; None: it never
    has, as `start` tells all."""

    def fileno(self) -> int | None: ...

    def start(self, step: Step) -> list[StepResult]:
        """Begin a step: the results that there are by now, of it or of those before it."""

    def finished(self) -> list[StepResult]:
        """The results that there are since."""

    def has_spare_work(self) -> bool:
        """Whether there is something that can be put off, and no step in flight."""

    def idle(self) -> bool:
        """Do some of it; False if there was nothing."""


class AtOnce:
    """`Runs` where a step's result is there when it has been run; a follower of rank 0 has none."""

    def __init__(self, run: Callable[[Step], StepResult | None]) -> None:
        self._run = run

    def fileno(self) -> int | None:
        return None

    def start(self, step: Step) -> list[StepResult]:
        result = self._run(step)
        return [] if result is None else [result]

    def finished(self) -> list[StepResult]:
        return []

    def has_spare_work(self) -> bool:
        return False

    def idle(self) -> bool:
        return False


def main(boot: Boot, lifeline: Lifeline) -> None:
    """Run until the launcher ends the process."""
    log.set_up(boot.name, boot.config.log_level, boot.config.log_format)
    inbox = Inbox(boot.directory, inbox_of(boot.rank), boot.index)
    choice = choose(boot.config)
    device = torch.device("cuda", boot.rank) if choice.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        # Before anything of CUDA's is used: it would be used on the first GPU, by every rank.
        torch.cuda.set_device(device)
    with _group(boot, device, lifeline) as group:
        if group.rank == 0:
            _lead(boot, lifeline, inbox, choice, group)
        else:
            _follow(boot, lifeline, inbox, choice, group)


def _group(boot: Boot, device: torch.device, lifeline: Lifeline) -> AbstractContextManager[Group]:
    if boot.config.tensor_parallel_size == 1:
        return nullcontext(Alone())
    from sapwood.srt.worker import ranks  # torch.distributed, which one process alone does without

    return ranks.joined(boot, device, lifeline)


def make(
    config: Config, source: ModelSource, choice: Choice, group: Group, grammars: Grammars
) -> tuple[Runs, int, dict[str, str]]:
    """The runner of this rank, how many KV slots it has, and what was chosen, and why."""
    if choice.device == "cuda":
        return _make_cuda(config, source, choice, group, grammars)
    if group.rank:
        follower, pool = cpu.make_follower(config, source, group)
        return AtOnce(follower.run), pool.num_slots, {}
    runner, pool, facts = cpu.make_runner(config, source, grammars, group)
    return AtOnce(runner.run), pool.num_slots, facts


def _make_cuda(
    config: Config, source: ModelSource, choice: Choice, group: Group, grammars: Grammars
) -> tuple[Runs, int, dict[str, str]]:
    """Nothing of this is imported where there is no GPU."""
    from sapwood.kernels.flashinfer import jit_progress, load_flashinfer
    from sapwood.srt.worker.device.accelerator import Cuda
    from sapwood.srt.worker.device.build import Site, make_device_runner

    flashinfer = None
    if choice.attention == "flashinfer":
        try:
            flashinfer = load_flashinfer()
        except RuntimeError as e:
            raise ConfigError(
                f"{e}. Without it: --attention-backend reference (slow), or --device cpu",
                param="attention_backend",
            ) from None
    site = Site(Cuda(group.rank), group, flashinfer, flashinfer)
    threads, _why = cpu.choose_threads(config, group.size)
    with jit_progress(flashinfer, _log.info):
        runner, pool, facts = make_device_runner(config, source, site, grammars, threads)
    return runner, pool.num_slots, facts


def _lead(boot: Boot, lifeline: Lifeline, inbox: Inbox, choice: Choice, group: Group) -> None:
    scheduler = Outbox(boot.directory, "scheduler")
    grammars = make_grammars(boot.source)
    grammars.start()
    runner, num_slots, facts = make(boot.config, boot.source, choice, group, grammars)
    inbox.watch(grammars.fileno(), runner.fileno())
    scheduler.send(WorkerReady(num_slots, boot.index, choice.device))
    lifeline.ready(facts, device=choice.device)
    _log.debug("ready")
    while True:
        turn(inbox, scheduler, runner, grammars)


def _follow(boot: Boot, lifeline: Lifeline, inbox: Inbox, choice: Choice, group: Group) -> None:
    """A rank that samples nothing has no grammars and nobody to answer."""
    runner, _num_slots, _facts = make(boot.config, boot.source, choice, group, make_grammars(boot.source))
    inbox.watch(runner.fileno())
    lifeline.ready()
    while True:
        for message in inbox.receive(None):
            assert isinstance(message, Step)
            runner.start(message)
        runner.finished()


def turn(inbox: Inbox, scheduler: Outbox, runner: Runs, grammars: Grammars) -> None:
    """Wait for messages, for grammars that are loaded, for steps that have ended; answer what there is."""
    received = inbox.receive(IDLE_SECONDS if runner.has_spare_work() else None)
    for message in received:
        if isinstance(message, LoadGrammar):
            grammars.load(message)
        elif isinstance(message, DropGrammars):
            grammars.drop(message.keys)
        else:
            assert isinstance(message, Step)
            _send(scheduler, *runner.start(message))
    _send(scheduler, *runner.finished(), *grammars.finished())
    # A wake-up is not idleness: what it told of may have the scheduler send a step at once.
    if inbox.timed_out:
        runner.idle()


def _send(scheduler: Outbox, *answers: StepResult | GrammarLoaded) -> None:
    if answers and not scheduler.send(*answers):
        raise Overloaded("the scheduler does not take results")
