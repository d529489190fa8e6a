"""An error reaches the program or its caller, with the line it comes from; what runs then is cancelled."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang.backend import Call, Fill, Generate
from sapwood.lang.backends.echo import Echo
from sapwood.lang.loop import background
from sapwood.lang.run import end


def failing(text: str) -> Callable[[Call], BaseException | None]:
    """Fails the calls whose state ends with a text."""

    def fail(call: Call) -> BaseException | None:
        last = call.segments[-1]
        return sgl.RequestFailed(f"no {text}", 503) if last.text.endswith(text) else None  # type: ignore[union-attr]

    return fail


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_an_error_is_raised_where_its_variable_is_read_with_the_line_that_added_it() -> None:
    backend = Echo(fail=failing("bad"))

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        s += "bad" + sgl.gen("b")  # the line
        s += "y" + sgl.gen("c")
        assert s["a"] == "x"
        for name in ("b", "c"):
            with pytest.raises(sgl.RequestFailed, match="no bad") as raised:
                s[name]
            assert f"{__file__}:" in notes(raised.value)
            assert 's += "bad" + sgl.gen("b")  # the line' in notes(raised.value)
            assert len(raised.value.__notes__) == 1
        with pytest.raises(sgl.RequestFailed):
            s.text()
        s["done"] = True

    # The program has met it: the run does not raise it.
    assert program.run(backend=backend)["done"]
    assert len(backend.calls) == 2


def test_an_error_that_nobody_reads_is_raised_by_the_run() -> None:
    backend = Echo(fail=failing("bad"))

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "bad" + sgl.gen("b")

    with pytest.raises(sgl.RequestFailed, match="no bad"):
        program.run(backend=backend)
    with pytest.raises(sgl.RequestFailed, match="no bad"):
        asyncio.run(program.run_async(backend=backend))
    with pytest.raises(sgl.RequestFailed, match="no bad"):
        list(program.run(stream=True, backend=backend).text_iter())
    wait_until(lambda: len(backend.ended) == 3)


def test_error_tells_it_and_makes_it_the_programs_own_affair() -> None:
    @sgl.function
    def program(s: sgl.State) -> BaseException | None:
        s += "bad" + sgl.gen("b")
        return s.error()

    error = program.run(backend=Echo(fail=failing("bad"))).ret_value
    assert isinstance(error, sgl.RequestFailed)
    assert error.status == 503


def test_one_failed_branch_does_not_stop_its_siblings_and_is_not_lost() -> None:
    backend = Echo(fail=failing("bad"))
    texts: list[str] = []

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        forks = s.fork(3)
        forks += ["0", "bad", "2"]
        forks += sgl.gen("a")
        texts.append(forks[0]["a"] + forks[2]["a"])

    with pytest.raises(sgl.RequestFailed, match="no bad") as raised:
        program.run(backend=backend)
    assert texts == ["02"]
    assert "(branch 1 of the fork at " in notes(raised.value)
    assert "forks = s.fork(3)" in notes(raised.value)


def test_errors_of_several_branches_are_one_error_and_notes() -> None:
    backend = Echo(fail=failing("bad"))

    @sgl.function
    def program(s: sgl.State) -> None:
        forks = s.fork(2)
        forks += "bad" + sgl.gen("a")

    with pytest.raises(sgl.RequestFailed) as raised:
        program.run(backend=backend)
    assert "another branch failed too: RequestFailed: no bad" in notes(raised.value)


def test_a_gathered_variable_of_a_failed_branch_raises_its_error() -> None:
    @sgl.function
    def program(s: sgl.State) -> str:
        forks = s.fork(2)
        forks += ["fine", "bad"]
        forks += sgl.gen("a")
        forks.join()
        with pytest.raises(sgl.RequestFailed, match="no bad"):
            s["a"]
        return str(forks[0]["a"])

    assert program.run(backend=Echo(fail=failing("bad"))).ret_value == "fine"


@pytest.mark.parametrize("error", [sgl.RequestFailed("full", 429), ValueError("of a backend's own")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fork_whose_prefix_cannot_be_computed_ahead_goes_on(error: Exception, stream: bool) -> None:
    backend = Echo(fail=lambda call: error if isinstance(call, Fill) else None)

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("a")
        forks.join()
        s += "y" + sgl.gen("b")

    state = program.run(stream=stream, backend=backend)
    assert (state["a"], state["b"]) == (["0", "1"], "y")
    assert [type(call) for call in backend.calls[:1]] == [Fill]
    assert len(backend.done) == 3


def test_who_has_met_a_gathered_variable_has_met_all_its_errors() -> None:
    @sgl.function
    def program(s: sgl.State) -> str:
        forks = s.fork(3)
        forks += ["fine", "1 bad", "2 bad"]
        forks += sgl.gen("a")
        forks.join()
        for _ in range(2):
            with pytest.raises(sgl.RequestFailed) as raised:
                s["a"]
        assert notes(raised.value).count("another branch failed too") == 1
        return "done"

    assert program.run(backend=Echo(fail=failing("bad"))).ret_value == "done"


def test_an_error_of_the_program_itself_cancels_its_requests() -> None:
    backend = Echo(delay=30)

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        wait_until(lambda: backend.running == 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program.run(backend=backend)
    assert backend.cancelled == backend.calls
    assert len(backend.ended) == 1


def test_what_a_backend_cannot_do_is_an_error_before_anything_is_sent() -> None:
    backend = Echo(unsupported=["regex"])

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a", regex=r"\d+")

    background()  # whose thread is there from now on
    before = set(threading.enumerate())
    runs: list[Callable[[], object]] = [
        lambda: program.run(backend=backend),
        lambda: program.run_batch([{}, {}], backend=backend),
        lambda: asyncio.run(program.run_async(backend=backend)),
        lambda: list(program.run(stream=True, backend=backend).text_iter()),
    ]
    for number, run in enumerate(runs):
        with pytest.raises(NotImplementedError, match="regex is not supported") as raised:
            run()
        assert isinstance(raised.value, sgl.Unsupported)
        assert raised.value.field == "regex"
        # The others run the program's code in a thread.
        assert number >= 2 or set(threading.enumerate()) <= before
    assert backend.calls == []


def test_cancelling_a_run_cancels_its_requests() -> None:
    async def cancel_it(run: Callable[[Echo], Coroutine[Any, Any, object]]) -> None:
        backend = Echo(delay=30)
        task = asyncio.ensure_future(run(backend))
        while backend.running < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(backend.cancelled) == len(backend.calls) == 2
        assert backend.running == 0
        assert len(backend.ended) == 1

    @sgl.function
    async def waits(s: sgl.AsyncState) -> None:
        forks = s.fork(2)
        forks += sgl.gen("a")
        forks.join()
        await s["a"]

    @sgl.function
    def blocks(s: sgl.State) -> None:
        forks = s.fork(2)
        forks += sgl.gen("a")
        forks.join()
        with pytest.raises(sgl.LangError, match="ended before this was done"):
            s["a"]

    asyncio.run(cancel_it(lambda backend: waits.run_async(backend=backend)))
    asyncio.run(cancel_it(lambda backend: blocks.run_async(backend=backend)))


def test_leaving_a_stream_early_cancels_the_run() -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "now " + sgl.gen("a")

    backend = Echo(delay=30)
    pieces = program.run(stream=True, backend=backend).text_iter()
    assert next(pieces) == "now "
    wait_until(lambda: backend.running == 1)
    pieces.close()  # type: ignore[attr-defined]
    wait_until(lambda: backend.running == 0 and len(backend.ended) == 1)
    assert backend.cancelled == backend.calls


def test_leaving_an_async_stream_early_cancels_the_run() -> None:
    @sgl.function
    async def program(s: sgl.AsyncState) -> None:
        s += "now " + sgl.gen("a")
        await s["a"]

    async def leave() -> None:
        backend = Echo(delay=30)
        async for piece in program.stream(backend=backend).text_async_iter():
            assert piece == "now "
            while backend.running < 1:
                await asyncio.sleep(0.005)
            break
        while backend.running or not backend.ended:
            await asyncio.sleep(0.005)
        assert backend.cancelled == backend.calls

    asyncio.run(asyncio.wait_for(leave(), 20))


INTERRUPTED = """
import sapwood as sgl, threading, time, os, signal
backend = sgl.Echo(delay=lambda call: 60 * hasattr(call, "sampling"))

@sgl.function
def program(s):
    s += "x" + sgl.gen("a")
    s["a"]

def interrupt():
    while backend.running < PROGRAMS:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    RUN
except KeyboardInterrupt:
    print("interrupted", backend.running, len(backend.cancelled), len(backend.ended))
"""


@pytest.mark.parametrize(
    ("run", "programs"),
    [("program.run(backend=backend)", 1), ("program.run_batch([{}] * 5, backend=backend)", 5)],
)
def test_an_interrupt_cancels_the_requests_and_leaves_nothing_behind(run: str, programs: int) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.replace("RUN", run).replace("PROGRAMS", f"{programs}")],
        capture_output=True, text=True, timeout=30, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    ended = programs if programs == 1 else programs + 1
    expected = f"interrupted 0 {programs} {ended}\n"
    assert (answer.stdout, answer.stderr, answer.returncode) == (expected, "", 0)


def test_waiting_on_ones_own_loop_is_an_error_and_no_deadlock(echo: Echo) -> None:
    @sgl.function
    def inner(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    @sgl.function
    async def outer(s: sgl.AsyncState) -> None:
        inner.run()

    with pytest.raises(sgl.LangError, match="run_async"):
        outer.run()


def test_from_other_async_code_a_program_can_be_run(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    async def main() -> str:
        return str(program.run()["a"])

    assert asyncio.run(main()) == "x"


def test_a_forked_process_has_a_loop_of_its_own(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    program.run()
    child = os.fork()
    if child == 0:
        os._exit(0 if program.run()["a"] == "x" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_generate_calls_keep_the_order_of_the_program(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        for i in range(50):
            s += f"{i} " + sgl.gen(f"v{i}", max_tokens=1)

    program.run()
    numbers = [call.segments[-1].text for call in echo.calls if isinstance(call, Generate)]  # type: ignore[union-attr]
    assert numbers == [f"{i} " for i in range(50)]


def test_a_run_can_be_cancelled_from_within_from_outside_and_after_its_end() -> None:
    backend = Echo(delay=30)

    @sgl.function
    def program(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")

    state = program.run(stream=True, backend=backend)
    wait_until(lambda: backend.running == 1)
    state.cancel()
    with pytest.raises(sgl.LangError, match="cancelled"):
        state["a"]
    wait_until(lambda: len(backend.ended) == 1)
    assert backend.cancelled == backend.calls

    @sgl.function
    def own(s: sgl.State) -> None:
        s += "x" + sgl.gen("a")
        s.cancel()
        s["a"]

    with pytest.raises(sgl.LangError, match="cancelled"):
        own.run(backend=backend)

    async def done() -> sgl.State:
        return await program.run_async(backend=Echo())

    asyncio.run(done()).cancel()


def test_a_value_that_was_not_awaited_is_never_used() -> None:
    uses: list[Callable[[Any], Any]] = [
        str, bool, len, list, lambda v: f"{v}", lambda v: v == "x", lambda v: v + "x", lambda v: "x" + v,
    ]  # fmt: skip

    @sgl.function
    async def program(s: sgl.AsyncState) -> int:
        s += sgl.gen("x")
        for use in uses:
            with pytest.raises(sgl.LangError, match="await it before"):
                use(s["x"])
        return len(await s["x"])

    state = program.run(backend=sgl.Echo(["four"]))
    assert state.ret_value == 4


def test_wrong_kinds_are_named_where_they_are_given() -> None:
    with pytest.raises(TypeError, match="not one text"):
        sgl.Echo("ok")
    with pytest.raises(TypeError, match="greedy_token_selection"):
        sgl.select("a", ["x", "y"], choices_method="greedy")  # type: ignore[arg-type]


def test_nobody_is_told_of_an_end_that_failed_when_the_run_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(sgl.Echo):
        async def end(self, program: str) -> dict[str, Any] | None:
            await asyncio.sleep(0.01)
            raise sgl.RequestFailed("gone")

    async def main() -> None:
        task = asyncio.ensure_future(end(Gone(), "p"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.03)
        gc.collect()

    asyncio.run(main())
    assert "never retrieved" not in caplog.text
