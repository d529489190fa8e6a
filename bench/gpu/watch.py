"""Has the parts done by a process that may crash, hang or be too slow; another one goes on with the rest."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.parts import BACKEND, MODEL_LESS, RAN, limit_of

ROOT = Path(__file__).parents[2]
GRACE = 10.0
"""Seconds beyond its limit after which a part is ended from outside: it may still say what it has."""
START = 60.0
"""Seconds for a process to import torch, and find the device."""
ENDING = 2.0
"""Seconds in which a process that has closed its end of the pipe is gone."""
LEAST = 20.0
"""Seconds left with which another process is worth starting."""

Row = dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What became of a part: done, failed, skipped or cut; then `reason` says why."""

    status: str = "skipped"
    reason: str | None = "it was not reached"
    seconds: float = 0.0
    limit: float = 0.0
    rows: list[Row] = field(default_factory=list)
    begun: float = 0.0


class Crew:
    """`options` are those of bench.gpu.child. `seen` is called with each row, and when a part is over.

    `plain`: why plain torch is measured, once FlashInfer turns out not to be there or not to work;
    `no_graphs`: why no graphs are.
    """

    def __init__(
        self, options: Sequence[str], seconds: float, seen: Callable[[str, Row | None], None], module: str
    ) -> None:
        self._options, self._seen, self._module = list(options), seen, module
        self._until = time.monotonic() + seconds
        self.plain = self.no_graphs = ""
        self.outcomes: dict[str, Outcome] = {}

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def run(self, names: Sequence[str]) -> None:
        """All of these parts, each of which has its outcome then."""
        self.outcomes = {name: Outcome(limit=limit_of(name)) for name in names}
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
        if last in BACKEND and not self.plain:
            self.plain = why
            return ["model", *rest] if last == "model" else rest
        if last == "model":
            self._give_up([name for name in rest if name not in MODEL_LESS], "the model did not run")
            return [name for name in rest if name in MODEL_LESS]
        return rest

    def _give_up(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.outcomes[name].reason = reason
            self._over(name)

    def _some(self, todo: list[str]) -> list[str]:
        """The parts that one process has come to, of which the last one may have failed."""
        options = [*self._options, "--only", ",".join(todo), f"--plain={self.plain}"]
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
        limit = limit_of(done[0]) + START
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
                    limit = limit_of(event["part"])
            elif event["event"] == "row":
                outcome.rows.append(event["row"])
                self._seen(done[-1], event["row"])
            else:
                outcome.status, outcome.reason = event["event"], event.get("reason")
                if done[-1] == "kernels" and outcome.status == "skipped":
                    self.plain = outcome.reason or ""
                self._over(done[-1])
                if outcome.status == "failed":
                    return

    def _begin(self, name: str) -> None:
        self.outcomes[name] = Outcome(reason=None, limit=limit_of(name), begun=time.monotonic())

    def _over(self, name: str) -> None:
        outcome = self.outcomes[name]
        if outcome.begun:
            outcome.seconds = round(time.monotonic() - outcome.begun, 2)
        self._seen(name, None)


class _Child:
    """One process of parts, and what it tells."""

    def __init__(self, module: str, options: Sequence[str], seconds: float) -> None:
        command = [sys.executable, "-m", module, *options, "--seconds", f"{seconds:.1f}"]
        # A group of its own: what it has started, compilers say, ends with it.
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
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
