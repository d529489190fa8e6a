"""Has the parts done by a process that may crash, hang or be too slow; another one goes on with the rest."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.parts import ATTENTION, BACKEND, MODEL_LESS, RAN, limit_of

ROOT = Path(__file__).parents[2]
GRACE = 10.0
"""Seconds beyond its limit after which a part is ended from outside: it may still say what it has."""
START = 60.0
"""Seconds for a process to import torch, and find the device."""
ENDING = 2.0
"""Seconds in which a process that has closed its end of the pipe is gone."""
KILLING = 5.0
"""Seconds for what is killed to be gone: what hangs in a driver never is."""
LEAST = 20.0
"""Seconds left with which another process is worth starting."""

Row = dict[str, Any]
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Outcome:
    """What became of a part: done, failed, skipped or cut; then `reason` says why. Or it is running."""

    status: str = "skipped"
    reason: str | None = "it was not reached"
    seconds: float = 0.0
    limit: float = 0.0
    rows: list[Row] = field(default_factory=list)
    begun: float = 0.0


class Crew:
    """`options` are those of bench.gpu.child. `seen` is called with each row, and when a part is over.

    `limits`: those that are not the parts' own. `plain`: why plain torch is measured, once FlashInfer turns
    out not to be there or not to work; `without`: what of it is done without, and why; `no_graphs`: why no
    graphs are.
    """

    def __init__(
        self,
        options: Sequence[str],
        seconds: float,
        seen: Callable[[str, Row | None], None],
        module: str,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self._options, self._seen, self._module = list(options), seen, module
        self._limits = limits or {}
        self._until = time.monotonic() + seconds
        self.plain = self.no_graphs = ""
        self.without: dict[str, str] = {}
        self.outcomes: dict[str, Outcome] = {}

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def run(self, names: Sequence[str]) -> None:
        """All of these parts, each of which has its outcome then."""
        self.outcomes = {name: Outcome(limit=limit_of(name, self._limits)) for name in names}
        todo, done = list(names), list[str]()
        while todo:
            if done and self.left < LEAST:
                self._give_up(todo, f"no time is left for it ({self.left:.0f} s)")
                return
            done = self._some(todo)
            todo = self._rest(todo, done)

    def _rest(self, todo: list[str], done: list[str]) -> list[str]:
        """The parts that are still to do: the model again, without graphs or FlashInfer, if these failed."""
        rest = [name for name in todo if name not in done]
        last = done[-1]
        outcome = self.outcomes[last]
        if outcome.status not in ("failed", "cut"):
            return rest
        why = f"the part {last} was {outcome.status}: {outcome.reason}"
        if last == "found":
            self._give_up(rest, "nothing was found")
            return []
        if last == "model" and not self.no_graphs and any(row["what"] == RAN for row in outcome.rows):
            self.no_graphs = why
            return ["model", *rest]
        if last == "kernels" and outcome.status == "failed" and self._some_are_lost:
            return rest
        if last in BACKEND and not self.plain:
            self.plain = why
            return ["model", *rest] if last == "model" else rest
        if last == "model":
            self._give_up([name for name in rest if name not in MODEL_LESS], "the model did not run")
            return [name for name in rest if name in MODEL_LESS]
        return rest

    @property
    def _some_are_lost(self) -> bool:
        """Whether kernels are done without, and those of attention are there."""
        return bool(self.without) and ATTENTION not in self.without

    def _give_up(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.outcomes[name].reason = reason
            self._over(name)

    def _some(self, todo: list[str]) -> list[str]:
        """The parts that one process has come to, of which the last one may have failed."""
        options = [*self._options, "--only", ",".join(todo), *(f"--without={name}" for name in self.without)]
        # Reasons stay here: they may be longer than an argument may be.
        options += ["--plain"] if self.plain else []
        options += ["--no-graphs"] if self.no_graphs else []
        child = _Child(self._module, options, self.left)
        done = [todo[0]]
        self._begin(todo[0])
        try:
            self._follow(child, done)
        finally:
            child.kill()
        return done

    def _follow(self, child: _Child, done: list[str]) -> None:
        """Take in events until the process has ended, or is not to be waited for any longer."""
        limit = limit_of(done[0], self._limits) + START
        while True:
            outcome = self.outcomes[done[-1]]
            patience = min(outcome.begun + limit, self._until) + GRACE - time.monotonic()
            event = child.next(patience)
            if event is None:
                outcome.status, outcome.reason = child.fate(time.monotonic() - outcome.begun)
                self._over(done[-1])
                return
            if event["event"] == "end":
                return
            if event["event"] == "begin":
                if event["part"] != done[-1]:
                    done.append(event["part"])
                    self._begin(event["part"])
                    limit = limit_of(event["part"], self._limits)
            elif event["event"] == "row":
                self._take(done[-1], event["row"])
            else:
                outcome.status, outcome.reason = event["event"], event.get("reason")
                if done[-1] == "kernels" and outcome.status == "skipped":
                    self.plain = self.plain or outcome.reason or "FlashInfer is not there"
                self._over(done[-1])
                if outcome.status == "failed":
                    return

    def _take(self, name: str, row: Row) -> None:
        self.outcomes[name].rows.append(row)
        # What fp8 lacks, the others had.
        if "lost" in row and name == "kernels":
            self.without.setdefault(row["lost"], row["what"])
        self._seen(name, row)

    def _begin(self, name: str) -> None:
        limit = limit_of(name, self._limits)
        self.outcomes[name] = Outcome("running", None, limit=limit, begun=time.monotonic())

    def _over(self, name: str) -> None:
        outcome = self.outcomes[name]
        if outcome.begun:
            outcome.seconds = round(time.monotonic() - outcome.begun, 2)
        self._seen(name, None)


class _Child:
    """One process of parts, and what it tells."""

    def __init__(self, module: str, options: Sequence[str], seconds: float) -> None:
        command = [sys.executable, "-m", module, *options, "--seconds", f"{seconds:.1f}"]
        # A session of its own: what it has started, compilers say, ends with it.
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._text = b""

    def next(self, patience: float) -> Row | None:
        """The next event; None if there is none within `patience` seconds, or the process has ended."""
        until = time.monotonic() + patience
        while b"\n" not in self._text:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            piece = os.read(self._out, 1 << 16)
            if not piece:
                return None
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        event: Row = json.loads(line)
        return event

    def fate(self, seconds: float) -> tuple[str, str]:
        """Why there was no event."""
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "cut", f"it did not end within {seconds:.0f} s"
        return "failed", f"the process ended with {code}"

    def kill(self) -> None:
        """End it, and what it has started, as far as that is to be seen (on Linux), and can be ended."""
        until = time.monotonic() + KILLING
        self._process.kill()
        while (found := _of_session(self._process.pid)) and time.monotonic() < until:
            for pid in found:
                # The number of a session that is over may be another one's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0.1))
        self._selector.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def die_with_parent() -> None:
    """This process does not outlive the one that has started it, however that ends."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _of_session(session: int) -> list[int]:
    """The processes of a session that are not over, in whatever groups they are."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # A name is cut after 15 bytes, within a character maybe.
            text = file.read_text(encoding="utf-8", errors="replace")
            state, _parent, _group, its, *_more = text.rpartition(") ")[2].split()
            if int(its) == session and state not in "ZX":
                found.append(int(file.parent.name))
    return found
