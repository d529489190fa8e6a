"""The process that holds the engine; each constraint is compiled in a fork of it, which the kernel bounds.

Started by compiler.py (see bounded_child.py): reads a Setup, then Jobs and Stops; answers each Job with one
Ended. Nothing of a constraint is read here: a fork that computes for ever, takes all memory or crashes costs
nothing but itself, and the next one, a millisecond later, knows nothing of it. There are no other threads.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Literal

import msgspec

from sapwood.srt import bounded, bounded_child
from sapwood.srt.bounded_child import framed, memory, read, send
from sapwood.srt.errors import BadRequest, ErrorInfo, SapwoodError
from sapwood.srt.messages import Grammar
from sapwood.srt.params import Constraint

if TYPE_CHECKING:
    from sapwood.srt.grammar.engine import Engine

CPU_SECONDS = 2.0
WALL_SECONDS = 2.5
"""Also for a fork that gets little of the cores: whoever has asked waits no longer for an answer."""
MEMORY_BYTES = 2**30
STACK_BYTES = 4 * 2**20
"""Less than a thread of the worker has that compiles the grammar again: what is too deep ends here."""
MAX_GRAMMAR_CHARS = 4 * 2**20
LOW_SECONDS = 0.1
"""After so much computing a fork gets what others leave of the cores. It cannot go back; the next is new."""
Kind = Literal["json_schema", "regex", "ebnf", "choices", "structural_tag"]
WARM_UP: dict[Kind, str] = {
    "json_schema": '{"type": "object", "properties": {"a": {"type": "number"}, "b": {"pattern": "^a"}}}',
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "choices": '["a"]',
    "structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}',
}
"""Compiled at the start, so that what is loaded and filled on first use is there for every fork."""
LOOK_SECONDS = 0.01
"""At least, between two looks at what a fork has computed."""
LATE_SECONDS = 0.1
"""For which a fork whose time is over may still die of it. At low priority that may take it long."""
MOST_DYING = 4
"""So many are not waited for: each may still have its memory."""


class Setup(msgspec.Struct, array_like=True):
    """The engine's tokenizer, and a fork's limits."""

    tokenizer_file: str
    vocab_size: int
    eos_ids: list[int]
    low_seconds: float = LOW_SECONDS
    cpu_seconds: float = CPU_SECONDS
    wall_seconds: float = WALL_SECONDS
    memory_bytes: int = MEMORY_BYTES


class Job(msgspec.Struct, array_like=True, tag=True):
    """A constraint to compile; `low`: at low priority from the beginning."""

    number: int
    constraint: Constraint
    low: bool = False


class Stop(msgspec.Struct, array_like=True, tag=True):
    """End that job, if it runs: its Ended has SIGKILL."""

    number: int


class Outcome(msgspec.Struct, array_like=True):
    """What came of a constraint: one of the two. `details`, of what nobody has foreseen, are for the log."""

    grammar: Grammar | None = None
    error: ErrorInfo | None = None
    details: str = ""


class Loaded(msgspec.Struct, array_like=True, tag=True):
    """The engine is ready; or, for the reason in `error`, there is none for this tokenizer."""

    error: str = ""


class Lowered(msgspec.Struct, array_like=True, tag=True):
    """That job has used `low_seconds` and goes on at low priority."""

    number: int


class Ended(msgspec.Struct, array_like=True, tag=True):
    """That job is over, after `seconds` of computing: by itself, with an Outcome, or by a signal."""

    number: int
    seconds: float
    outcome: Outcome | None = None
    signal: int = 0


class _Fork:
    def __init__(self, number: int, pid: int, pipe: int, low: bool) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.low = low
        self.result = bytearray()
        self.began = time.monotonic()

    def seconds(self) -> float:
        """What it has computed so far; where that is not told, how long it has run."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid(3)
        return time.monotonic() - self.began


class _Forks:
    """Those that run, and the socket over which they are ordered."""

    def __init__(self, sock: socket.socket, setup: Setup, engine: Engine) -> None:
        self._sock = sock
        self._setup = setup
        self._engine = engine
        self._running: dict[int, _Fork] = {}
        self._dying: dict[int, _Fork] = {}
        """By their pipes, those whose ends have been told."""
        self._unsent = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Job | Stop)

    def run(self) -> None:
        """Serve until the other side hangs up."""
        sock, orders = self._sock, self._sock.fileno()
        while True:
            pipes = {fork.pipe: fork for fork in self._running.values()} | self._dying
            # Never waiting for the other side to read, which may wait for this one to.
            ready, writable, _ = select.select(
                [orders, *pipes], [orders] if self._unsent else [], [], self._patience()
            )
            if writable:
                del self._unsent[: sock.send(self._unsent, socket.MSG_DONTWAIT)]
            for pipe in ready:
                if pipe != orders:
                    self._hear(pipes[pipe])
            self._lower()
            self._give_up()
            if orders in ready:
                if (frame := read(sock)) is None:
                    return
                self._obey(self._decoder.decode(frame))

    def _obey(self, order: Job | Stop) -> None:
        if isinstance(order, Job):
            self._begin(order)
        elif (fork := self._running.get(order.number)) is not None:
            os.kill(fork.pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        left = [self._setup.low_seconds - fork.seconds() for fork in self._running.values() if not fork.low]
        left += [self._time(fork) for fork in self._running.values()]
        return max(LOOK_SECONDS, min(left)) if left else None

    def _time(self, fork: _Fork) -> float:
        """What is left of it."""
        return fork.began + self._setup.wall_seconds + LATE_SECONDS - time.monotonic()

    def _give_up(self) -> None:
        """Tell the ends of those whose time is over, and wait for none to be dead: others wait for that."""
        over = [fork for fork in self._running.values() if self._time(fork) <= 0]
        for fork in over[: MOST_DYING - len(self._dying)]:
            os.kill(fork.pid, signal.SIGKILL)
            self._dying[fork.pipe] = self._running.pop(fork.number)
            self._tell(Ended(fork.number, fork.seconds(), None, signal.SIGALRM))

    def _lower(self) -> None:
        for fork in self._running.values():
            if not fork.low and fork.seconds() >= self._setup.low_seconds:
                fork.low = True
                lower(fork.pid)
                self._tell(Lowered(fork.number))

    def _begin(self, job: Job) -> None:
        try:
            reader, writer = os.pipe()
        except OSError as e:
            self._cannot(job, e)
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            os.close(reader)
            os.close(writer)
            self._cannot(job, e)
            return
        if pid == 0:
            try:
                self._sock.close()
                # Or whoever makes forks crash fills the server's log.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                if bounded_child.ends_with(parent):
                    _work(job, self._setup, self._engine, writer)
            finally:
                os._exit(1)
        os.close(writer)
        self._running[job.number] = _Fork(job.number, pid, reader, job.low)

    def _cannot(self, job: Job, reason: OSError) -> None:
        error = bounded.no_process("constraints", reason.strerror or type(reason).__name__)
        self._tell(Ended(job.number, 0.0, Outcome(error=error.info())))

    def _hear(self, fork: _Fork) -> None:
        """Read what it says; at its end, however it came, tell it."""
        if data := os.read(fork.pipe, 2**16):
            fork.result += data
            return
        os.close(fork.pipe)
        _, status, used = os.wait4(fork.pid, 0)
        if self._dying.pop(fork.pipe, None) is not None:
            return
        del self._running[fork.number]
        outcome = None
        if status == 0:
            outcome = msgspec.msgpack.decode(fork.result, type=Outcome)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self._tell(Ended(fork.number, used.ru_utime + used.ru_stime, outcome, ended_by))

    def _tell(self, message: Lowered | Ended) -> None:
        self._unsent += framed(msgspec.msgpack.encode(message))


def lower(pid: int) -> None:
    """Give a process (0: this one) only what others leave of the cores."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    # Where there is more: any other process that wakes takes the core at once, and waits for no slice to end.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _work(job: Job, setup: Setup, engine: Engine, pipe: int) -> None:
    """In the fork: the Outcome into the pipe, and the end."""
    if job.low:
        lower(0)
    bounded_child.limit(resource.RLIMIT_AS, memory()[0] + setup.memory_bytes)
    bounded_child.limit(resource.RLIMIT_STACK, STACK_BYTES)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, setup.wall_seconds)
    with bounded_child.limited(setup.cpu_seconds):
        result = msgspec.msgpack.encode(_outcome(job.constraint, engine, setup))
        while result:
            result = result[os.write(pipe, result) :]
        os._exit(0)


def _outcome(constraint: Constraint, engine: Engine, setup: Setup) -> Outcome:
    from sapwood.srt.grammar.compile import compile_constraint

    field = constraint.field
    try:
        grammar = compile_constraint(constraint, engine)
        if len(grammar.text) <= MAX_GRAMMAR_CHARS:
            return Outcome(grammar)
        size, most = len(grammar.text), MAX_GRAMMAR_CHARS
        reason = f"{field} makes a grammar of {size} characters, above the limit of {most}"
    except SapwoodError as e:
        # It may quote half a surrogate pair, which a JSON text can hold as an escape.
        message = e.message.encode("utf-8", "backslashreplace").decode()
        return Outcome(error=msgspec.structs.replace(e.info(), message=message, param=e.param or field))
    except UnicodeEncodeError:
        reason = f"{field} holds a lone surrogate"
    except MemoryError:
        reason = f"{field} needs more than {setup.memory_bytes // 2**20} MiB to be compiled"
    except RecursionError:
        reason = f"{field} is nested too deeply"
    except Exception as e:
        error = SapwoodError(f"{field} could not be compiled ({type(e).__name__})", param=field)
        return Outcome(error=error.info(), details=traceback.format_exc())
    return Outcome(error=BadRequest(reason, param=field).info())


def _load(setup: Setup) -> Engine:
    """The engine, and all that a fork would have to load again and again."""
    from sapwood.srt.grammar.engine import Engine

    engine = Engine(setup.tokenizer_file, setup.vocab_size, setup.eos_ids)
    for kind, text in WARM_UP.items():
        _outcome(Constraint(kind, text, kind), engine, setup)
    gc.collect()
    gc.freeze()
    return engine


def _serve(sock: socket.socket) -> None:
    if (frame := read(sock)) is None:
        return
    setup = msgspec.msgpack.decode(frame, type=Setup)
    try:
        engine = _load(setup)
    except Exception as e:
        send(sock, msgspec.msgpack.encode(Loaded(f"{type(e).__name__}: {e}")))
        return
    send(sock, msgspec.msgpack.encode(Loaded()))
    _Forks(sock, setup, engine).run()


if __name__ == "__main__":
    # Under its own name, so that what imports this module gets the same classes.
    from sapwood.srt.grammar import child as itself

    bounded_child.main(int(sys.argv[1]), itself._serve)
