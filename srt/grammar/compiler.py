"""Constraints compiled elsewhere, in forks of the engine's process (child.py), in two lanes.

put ──► quick ──► a fork ──its end, or its limits──► finished
                    └─0.1 s of computing──► slow lane, at low priority; while that is taken: again later

So what is compiled in no time, as nearly all is, waits for nothing that takes long, however much of it comes.
In both lanes parties take turns (turns.py).
"""

from __future__ import annotations

import logging
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from sapwood.srt.bounded import BoundedProcess
from sapwood.srt.errors import BadRequest, ErrorInfo, Overloaded, SapwoodError, Unavailable
from sapwood.srt.grammar import child
from sapwood.srt.grammar.child import Ended, Job, Loaded, Lowered, Outcome, Setup, Stop
from sapwood.srt.grammar.turns import Turns
from sapwood.srt.params import Constraint

SLOW_LANES = 1
MAX_SLOW = 32
"""So many may wait for the slow lane."""
ANSWER_SECONDS = 5.0
"""The engine's process is given up if it says nothing so long after a fork's time is over."""
LOAD_SECONDS = 60.0
CHILD = child.__name__
PURPOSE = "constraints"
OF_THE_CONSTRAINT = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
"""A fork without memory ends by these, or one whose stack is full."""

logger = logging.getLogger("sapwood.grammar")


class _Wanted:
    def __init__(self, constraint: Constraint, party: str) -> None:
        self.constraint = constraint
        self.parties = {party: None}
        """Whose turns it may come in."""
        self.slow = False


class _Run:
    def __init__(self, slow: bool) -> None:
        self.slow = slow
        self.lowered = slow
        self.stopped = False
        self.began = time.monotonic()


class Compiler:
    """Compiles constraints, each under the number that its caller has given it.

    `watch` is told the file descriptor at which `finished` has news (and before it closes, that there is
    none). With more than `lanes` at a time they wait. Everything but `break_off` belongs to one thread.
    """

    def __init__(
        self, setup: Setup, lanes: int, watch: Callable[[int | None], object] = lambda descriptor: None
    ) -> None:
        self._setup = setup
        self._lanes = lanes
        self._watch = watch
        self._process: BoundedProcess | None = None
        self._loading_since: float | None = None
        self._unusable = ""
        self._wanted: dict[int, _Wanted] = {}
        """What waits or runs. A run that is not among it has been dropped."""
        self._quick: Turns[int] = Turns()
        self._slow: Turns[int] = Turns()
        self._running: dict[int, _Run] = {}
        self._done: deque[tuple[int, Outcome, float]] = deque()

    def start(self) -> None:
        """Start the engine's process, if there is none, without waiting for it. Raises Unavailable."""
        if self._process is None:
            self._process = BoundedProcess(CHILD, PURPOSE, ANSWER_SECONDS)
            self._loading_since = time.monotonic()
            self._watch(self._process.fileno())
            self._tell(self._setup)

    def put(self, number: int, constraint: Constraint, party: str = "") -> None:
        """Compile it when it is that party's turn."""
        self._wanted[number] = _Wanted(constraint, party)
        self._quick.put(number, party)
        self._fill()

    def join(self, number: int, party: str) -> None:
        """Another party wants that one too: it may come in the turn of either."""
        wanted = self._wanted.get(number)
        if wanted is not None and party not in wanted.parties:
            wanted.parties[party] = None
            if number not in self._running:
                (self._slow if wanted.slow else self._quick).put(number, party)

    def drop(self, number: int) -> None:
        """Forget that one: it is not compiled, and never `finished`."""
        if self._wanted.pop(number, None) is None:
            self._done = deque(done for done in self._done if done[0] != number)
            return
        self._quick.drop(number)
        self._slow.drop(number)
        if (run := self._running.get(number)) is not None:
            self._stop(number, run)
            self._fill()

    def finished(self) -> Iterator[tuple[int, Outcome, float]]:
        """(number, outcome, seconds of computing) of what is over by now."""
        while self._process is not None and select.select([self._process], [], [], 0)[0]:
            self._hear(self._process)
        self._check_time()
        self._fill()
        while self._done:
            yield self._done.popleft()

    def close(self) -> None:
        """End the process and all that runs in it."""
        if self._process is not None:
            self._watch(None)
            self._process.kill()
            self._process = None

    def break_off(self) -> None:
        """The same in a hurry, from any thread."""
        if (process := self._process) is not None:
            process.break_off()
            process.exit_code()  # or its remains would be left to the system

    def _fill(self) -> None:
        if not (self._wanted or self._running):
            return
        if self._unusable:
            self._fail_all(BadRequest(self._unusable).info())
            return
        try:
            self.start()
        except Unavailable as e:
            self._fail_all(e.info())
            return
        if self._loading_since is None:
            self._fill_lanes()

    def _fill_lanes(self) -> None:
        runs = [run for run in self._running.values() if not run.stopped]
        slow = sum(run.slow for run in runs)
        while self._slow and slow < SLOW_LANES:
            self._begin(self._slow.take(), slow=True)
            slow += 1
        for run in runs:
            if run.lowered and not run.slow and slow < SLOW_LANES:
                run.slow = True
                slow += 1
        # What has been stopped holds its place until it is gone, or at least until its time is over.
        quick = sum(not run.slow for run in self._running.values())
        while self._quick and quick < self._lanes:
            self._begin(self._quick.take(), slow=False)
            quick += 1
        late = [(n, run) for n, run in self._running.items() if run.lowered and not (run.slow or run.stopped)]
        for number, run in late[: len(self._quick)]:
            self._stop(number, run)

    def _begin(self, number: int, slow: bool) -> None:
        self._running[number] = _Run(slow)
        self._tell(Job(number, self._wanted[number].constraint, slow))

    def _stop(self, number: int, run: _Run) -> None:
        if not run.stopped:
            run.stopped = True
            self._tell(Stop(number))

    def _tell(self, order: Setup | Job | Stop) -> None:
        assert self._process is not None
        try:
            self._process.send(msgspec.msgpack.encode(order))
        except OSError:
            self._process.break_off()  # its end is heard as that of any other

    def _hear(self, process: BoundedProcess) -> None:
        try:
            frame = process.read()
        except OSError:
            frame = None
        if frame is None:
            self._lose()
            return
        answer = msgspec.msgpack.decode(frame, type=Loaded | Lowered | Ended)
        if isinstance(answer, Loaded):
            self._loading_since = None
            if answer.error:
                self._unusable = f"constraints cannot be enforced with this model's tokenizer: {answer.error}"
                logger.warning("%s", self._unusable)
                self.close()
        elif isinstance(answer, Lowered):
            if (run := self._running.get(answer.number)) is not None:
                run.lowered = True
        else:
            self._end(answer)

    def _end(self, ended: Ended) -> None:
        run = self._running.pop(ended.number)
        wanted = self._wanted.get(ended.number)
        if wanted is None:
            return
        if run.stopped and ended.outcome is None:
            self._later(ended.number, wanted)
            return
        outcome = ended.outcome or Outcome(error=_why(ended, wanted.constraint.field, self._setup).info())
        if outcome.details:
            logger.error("a constraint could not be compiled\n%s", outcome.details.rstrip())
        self._finish(ended.number, outcome, ended.seconds)

    def _later(self, number: int, wanted: _Wanted) -> None:
        """It waits for the slow lane. If too many do, who has most there gives way."""
        wanted.slow = True
        for party in wanted.parties:
            self._slow.put(number, party)
        if len(self._slow) > MAX_SLOW:
            error = Overloaded(f"{MAX_SLOW} constraints that take long to compile wait; try again later")
            self._finish(self._slow.shorten(next(iter(wanted.parties))), Outcome(error=error.info()))

    def _finish(self, number: int, outcome: Outcome, seconds: float = 0.0) -> None:
        if self._wanted.pop(number, None) is not None:
            self._done.append((number, outcome, seconds))

    def _check_time(self) -> None:
        limit = self._setup.wall_seconds + ANSWER_SECONDS
        now = time.monotonic()
        loading = self._loading_since is not None and now - self._loading_since > LOAD_SECONDS
        if self._process is not None and (
            loading or any(now - r.began > limit for r in self._running.values())
        ):
            logger.warning("the process that compiles constraints does not answer; it is killed")
            self._lose()

    def _lose(self) -> None:
        """The engine's process is gone, and what it was at with it; the rest waits for another one."""
        assert self._process is not None
        was_loading = self._loading_since is not None
        self.close()
        self._loading_since = None
        error = SapwoodError("the process that compiles constraints has ended", code="process_died").info()
        running, self._running = self._running, {}
        for number in running:
            self._finish(number, Outcome(error=error))
        if was_loading:
            self._fail_all(Unavailable("the process that compiles constraints could not start").info())

    def _fail_all(self, error: ErrorInfo) -> None:
        """All that waits."""
        for queue in (self._quick, self._slow):
            while queue:
                self._finish(queue.take(), Outcome(error=error))


def _why(ended: Ended, field: str, setup: Setup) -> SapwoodError:
    """Why a fork has ended without an outcome."""
    if ended.signal == signal.SIGPROF:
        return BadRequest(
            f"{field} took more than {setup.cpu_seconds:g} s of computing to compile", param=field
        )
    if ended.signal == signal.SIGALRM:  # it was not given the time that it may take: no fault of its own
        return Unavailable(
            f"{field} was not compiled within {setup.wall_seconds:g} s, of which it could compute for"
            f" {ended.seconds:.1f} s: the machine is busy; try again later",
            param=field,
        )
    if ended.signal in OF_THE_CONSTRAINT:
        name, limit = signal.Signals(ended.signal).name, setup.memory_bytes // 2**20
        return BadRequest(
            f"{field} needs more than {limit} MiB to be compiled, or is nested too deeply ({name})",
            param=field,
        )
    return SapwoodError(f"{field} was not compiled: the process for that has ended", param=field)
