"""A worker that computes nothing, and a server around it, for `bench.stack`.

It answers each step at once, or one every `Stamps.pace` seconds as a model would, with the same word for
every row. Which word it is tells the step's number, so that a client can look up when its text was sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sapwood.srt import config, messages, serve
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.lifeline import ROLES, Lifeline
from sapwood.srt.loader.sources import resolve
from sapwood.srt.messages import Step, StepResult, WorkerReady
from sapwood.srt.orders import Boot

STAMPS = "ECHO_STAMPS"
PROFILES = "ECHO_PROFILES"
"""A folder: the processes other than the worker write their profiles there on SIGUSR1."""
WORDS = 4096
STEPS = 2**18
SLOTS = 2**18


class Stamps:
    """What the worker and the bench share, in a file: the pace, and when each step's result was sent."""

    def __init__(self, path: str | Path) -> None:
        self._values = np.memmap(path, dtype=np.float64, mode="r+", shape=(STEPS + 1,))

    @classmethod
    def make(cls, path: Path) -> Stamps:
        path.write_bytes(bytes(8 * (STEPS + 1)))
        return cls(path)

    @property
    def pace(self) -> float:
        """Seconds from one result to the next, at least."""
        return float(self._values[0])

    @pace.setter
    def pace(self, seconds: float) -> None:
        self._values[0] = seconds

    def note(self, step: int) -> None:
        self._values[1 + step % STEPS] = time.monotonic()

    def sent(self, word: int, before: float) -> float:
        """When the last step before the time `before` that gave this word was sent."""
        times = self._values[1 + word :: WORDS]
        times = times[times <= before]
        return float(times.max()) if len(times) else 0.0


def words(tokenizer_file: str) -> dict[str, int]:
    """WORDS tokens that are a space and lower-case letters, each other than all others: text to id."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    found: dict[str, int] = {}
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and text.islower():
            found.setdefault(text[1:], token)
        if len(found) == WORDS:
            return found
    raise ValueError(f"{tokenizer_file} has only {len(found)} words, {WORDS} are needed")


def main(boot: Boot, lifeline: Lifeline) -> None:
    """The role "worker"."""
    assert boot.source.tokenizer_file is not None
    stamps = Stamps(os.environ[STAMPS])
    table = np.array(list(words(boot.source.tokenizer_file).values()), dtype=np.int32)
    inbox = Inbox(boot.directory, "worker", boot.index)
    scheduler = Outbox(boot.directory, "scheduler")
    scheduler.send(WorkerReady(boot.config.max_total_tokens or SLOTS))
    lifeline.ready({"worker": "echo"})
    due = 0.0
    while True:
        for step in inbox.receive(None):
            assert isinstance(step, Step)
            pace = stamps.pace
            due = max(time.monotonic(), due + pace)
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            samples = int(messages.unpack(step.samples).sum())
            ids = np.full(samples, table[step.number % WORDS], dtype=np.int32)
            stamps.note(step.number)
            scheduler.send(StepResult(step.number, messages.pack(ids), {}, [], pace))


def profiled(boot: Boot, lifeline: Lifeline) -> None:
    """Any other role, under cProfile."""
    import cProfile
    import importlib

    profile = cProfile.Profile()

    def write(_number: int, _frame: object) -> None:
        profile.disable()
        path = Path(os.environ[PROFILES]) / f"{boot.role}.{os.getpid()}"
        profile.dump_stats(f"{path}.part")
        Path(f"{path}.part").rename(f"{path}.prof")
        profile.clear()
        profile.enable()

    signal.signal(signal.SIGUSR1, write)
    role = importlib.import_module(ROLES[boot.role])
    profile.enable()
    role.main(boot, lifeline)


def run(argv: list[str]) -> int:
    """`sapwood serve` with this worker: `argv` is its configuration as JSON."""
    roles = {**ROLES, "worker": "bench.echo_worker"}
    if PROFILES in os.environ:
        roles |= {role: "bench.echo_profiled" for role in roles if role != "worker"}
    return serve.serve(config.make(**json.loads(argv[0])), resolve, roles)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
