"""A run does what the program says, in its order, in whatever thread or loop; it ends, and so do others."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang import loop
from sapwood.lang.backend import Call, Generate
from sapwood.lang.backends.echo import Echo
from sapwood.lang.line import Line


class Interrupted:
    """A line's lock; something happens right after it is let go for the first time by the line's loop."""

    def __init__(self, line: Line, then: Any) -> None:
        self._line, self._lock, self._then = line, line._lock, then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._line.run.host.inside() and self._then is not None:
            then, self._then = self._then, None
            thread = threading.Thread(target=then)
            thread.start()
            thread.join()


def test_what_is_added_while_a_branch_begins_is_done_once_and_in_order() -> None:
    @sgl.function
    def program(s: sgl.State) -> str:
        s += "x" + sgl.gen("before")  # the branch begins when this is done
        branch = s.fork(1)[0]

        def add() -> None:
            nonlocal branch
            branch += " b" + sgl.gen("a")
            branch += " end"

        branch._line._lock = Interrupted(branch._line, add)  # type: ignore[assignment]
        while "a" not in branch:
            time.sleep(0.001)
        assert branch["a"] == "!"
        return branch.text()

    assert program.run(backend=Echo(lambda call: "!", delay=0.02)).ret_value == "x! b! end"


def test_errors_are_told_in_some_threads_while_others_come_and_none_is_lost() -> None:
    errors = [sgl.RequestFailed(f"error {i}") for i in range(2000)]

    @sgl.function
    def program(s: sgl.State) -> None:
        run, over = s._line.run, threading.Event()

        def tell() -> None:
            while not over.is_set():
                run.told(sgl.RequestFailed("another"))

        tellers = [threading.Thread(target=tell) for _ in range(2)]
        for teller in tellers:
            teller.start()
        for error in errors:
            run.failed(error)
        over.set()
        for teller in tellers:
            teller.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with pytest.raises(sgl.RequestFailed, match="error 0") as raised:
            program.run(backend=Echo())
    finally:
        sys.setswitchinterval(before)
    assert raised.value is errors[0]
    assert len(raised.value.__notes__) == len(errors) - 1


def test_who_has_read_a_stream_to_its_end_has_what_the_program_returns() -> None:
    @sgl.function
    def threaded(s: sgl.State) -> int:
        s += "x" + sgl.gen("a")
        return 5

    @sgl.function
    async def on_the_loop(s: sgl.AsyncState) -> int:
        s += "x" + sgl.gen("a")
        return 5

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for program in (threaded, on_the_loop):
            for _ in range(200):
                state = program.run(stream=True, backend=Echo())
                assert "".join(state.text_iter()) == "xx"
                assert state.ret_value == 5
    finally:
        sys.setswitchinterval(before)


EXITS = """
import asyncio, sys
import sapwood as sgl
from sapwood.lang.choices import Method

def judge(scored):
    sys.exit(3)

def threaded(s, q):
    s += q + sgl.gen("a")
    s["a"]
    sys.exit(3)

async def on_the_loop(s, q):
    s += q + sgl.gen("a")
    await s["a"]
    sys.exit(3)

def judged(s, q):
    s += q + sgl.select("a", ["x", "y"], choices_method=Method("own", judge))

backend = sgl.Echo()
program = sgl.function(PROGRAM)
try:
    RUN
except SystemExit as e:
    print(e.code, len(backend.ended))
# The loop that all programs share is there for the next one.
print(sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a"))["a"]).run(backend=backend).ret_value)
"""


@pytest.mark.parametrize("program", ["threaded", "on_the_loop", "judged"])
@pytest.mark.parametrize(
    ("run", "ended"),
    [
        ('program.run("x", backend=backend)', 1),
        ('program.run_batch([("x",), ("y",)], backend=backend)', 2),
        ('asyncio.run(program.run_async("x", backend=backend))', 1),
    ],
)
def test_an_exit_in_a_program_is_one_of_its_caller_and_hangs_nobody(
    program: str, run: str, ended: int
) -> None:
    text = EXITS.replace("PROGRAM", program).replace("RUN", run)
    answer = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=False
    )
    assert (answer.stdout, answer.stderr, answer.returncode) == (f"3 {ended}\nx\n", "", 0)


def test_the_end_of_an_iterator_in_a_program_is_an_error_and_no_wait_without_end() -> None:
    @sgl.function
    def program(s: sgl.State, words: Iterator[str]) -> None:
        s += next(words) + sgl.gen("a")

    async def run() -> None:
        await asyncio.wait_for(program.run_async(iter(()), backend=Echo()), 20)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(run())


def test_programs_that_run_programs_need_no_thread_of_those_that_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "MOST_THREADS", 2)
    monkeypatch.setattr(loop, "_background", loop._Background())

    def delay(call: Call) -> float:
        return 0.05 if isinstance(call, Generate) else 0.0  # all of the outer ones hold their threads

    backend = Echo(lambda call: "!", delay=delay)

    @sgl.function
    def leaf(s: sgl.State, q: str) -> str:
        s += q + sgl.gen("a")
        return str(s["a"])

    @sgl.function
    def inner(s: sgl.State, q: str) -> str:
        s += q + sgl.gen("a")
        s["a"]
        return "".join(leaf.run(q, stream=True, backend=backend).text_iter())

    @sgl.function
    def outer(s: sgl.State, q: str) -> list[str]:
        s += q + sgl.gen("a")
        s["a"]
        return [state.ret_value for state in inner.run_batch([("x",), ("y",)], backend=backend)]

    async def side_by_side() -> list[Any]:
        runs = asyncio.gather(*(outer.run_async(f"{i}", backend=backend) for i in range(4)))
        return [state.ret_value for state in await asyncio.wait_for(runs, 20)]

    assert asyncio.run(side_by_side()) == [["x!", "y!"]] * 4


def test_cancelling_a_run_from_within_does_not_cancel_who_awaits_it() -> None:
    @sgl.function
    async def on_the_loop(s: sgl.AsyncState) -> None:
        s += "x" + sgl.gen("a")
        s.cancel()
        await asyncio.sleep(30)

    @sgl.function
    def threaded(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        s.cancel()
        s["a"]

    async def run(program: Any) -> int:
        backend = Echo(delay=30)
        with pytest.raises(sgl.LangError, match="the run was cancelled"):
            await program.run_async(backend=backend)
        await asyncio.sleep(0)  # this is where a cancelled caller would notice
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling() + backend.running

    for program in (on_the_loop, threaded):
        assert asyncio.run(asyncio.wait_for(run(program), 20)) == 0


def test_a_run_that_is_cancelled_before_it_begins_never_begins(recwarn: pytest.WarningsRecorder) -> None:
    begun = []

    @sgl.function
    async def program(s: sgl.AsyncState) -> None:
        begun.append(s)

    async def cancelled(steps: int) -> None:
        task = asyncio.ensure_future(program.run_async(backend=Echo()))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for steps in (0, 1):
        asyncio.run(cancelled(steps))
    gc.collect()
    assert begun == []
    assert [str(warning.message) for warning in recwarn] == []


def test_a_branch_that_is_done_and_that_nobody_holds_takes_no_memory() -> None:
    @sgl.function
    def program(s: sgl.State) -> int:
        seen: list[weakref.ref[Line]] = []
        for _ in range(10):
            with s.copy() as branch:
                branch += "q" + sgl.gen("a")
                seen.append(weakref.ref(branch._line))
            del branch
            s["a"]
        return left(seen)

    def left(seen: list[weakref.ref[Line]]) -> int:
        """How many there are; the last ones' workers may not have come to their ends yet."""
        end = time.monotonic() + 10
        while True:
            gc.collect()
            count = sum(line() is not None for line in seen)
            if count == 0 or time.monotonic() > end:
                return count
            time.sleep(0.001)

    assert program.run(backend=Echo()).ret_value == 0


def test_branches_share_the_text_from_before_their_fork() -> None:
    @sgl.function
    def program(s: sgl.State) -> int:
        s += "one, "
        s += "two, "
        s += "three"
        branches = s.fork(3)
        for branch in branches:
            branch.sync()
        return len({id(branch._line.shown.pieces[0]) for branch in branches})

    assert program.run(backend=Echo()).ret_value == 1


def test_a_branch_that_nobody_holds_is_done_all_the_same(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        s.fork(3).__iadd__(lambda i: f"{i}" + sgl.gen("a"))
        gc.collect()

    program.run()
    assert sum(isinstance(call, Generate) for call in echo.done) == 3


def test_a_branch_that_is_held_is_over_with_the_run(echo: Echo) -> None:
    kept: list[sgl.State] = []

    @sgl.function
    def program(s: sgl.State) -> None:
        kept.extend(s.fork(2))
        kept[0] += "x" + sgl.gen("a")

    program.run()
    assert (kept[0]["a"], kept[0].text()) == ("x", "xx")
    with pytest.raises(sgl.LangError, match="the program has ended"):
        kept[1] += "more"
