"""Many runs at a time: in order, independent, after their common prefix, and without a thread each."""

from __future__ import annotations

import asyncio
import io
import itertools
import random
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

import sapwood as sgl
from sapwood.lang import batch, loop
from sapwood.lang.backend import Call, Fill, Generate, Text
from sapwood.lang.backends.echo import Echo

SHOTS = "Q: 1 + 1?\nA: 2\nQ: 2 + 2?\nA: 4\n"


@sgl.function
def answer(s: sgl.State, q: str, mark: str = "?") -> str:
    s += SHOTS + "Q: " + q + mark + "\n"
    s += "A:" + sgl.gen("a", stop="\n")
    return q


@sgl.function
async def answer_async(s: sgl.AsyncState, q: str, mark: str = "?") -> str:
    s += SHOTS + "Q: " + q + mark + "\n"
    s += "A:" + sgl.gen("a", stop="\n")
    await s["a"]
    return q


def questions(number: int) -> list[dict[str, Any]]:
    return [{"q": f"{i} times"} for i in range(number)]


def told(call: Generate) -> str:
    """Its question."""
    return "".join(part.text for part in call.segments if isinstance(part, Text))[len(SHOTS) :]


@pytest.mark.parametrize("program", [answer, answer_async])
@pytest.mark.parametrize("threads", [1, 3, "auto"])
@pytest.mark.parametrize("number", [0, 1, 20])
def test_results_come_in_the_order_of_the_arguments(program: Any, threads: Any, number: int) -> None:
    delays = random.Random(1)
    backend = Echo(told, delay=lambda call: delays.random() / 100)
    states = program.run_batch(questions(number), num_threads=threads, progress_bar=True, backend=backend)
    assert [state.ret_value for state in states] == [f"{i} times" for i in range(number)]
    assert [state["a"] for state in states] == [f"Q: {i} times?" for i in range(number)]
    one_by_one = program.run_batch(
        questions(number),
        concurrency=None if threads == "auto" else threads,
        generator_style=True,
        backend=backend,
    )
    assert [state["a"] for state in one_by_one] == [f"Q: {i} times?" for i in range(number)]
    if threads == 1:
        assert backend.most <= 1


def test_arguments_may_come_by_position(echo: Echo) -> None:
    states = answer.run_batch([("x",), ["y", "!"]])
    assert [state.ret_value for state in states] == ["x", "y"]
    asked = {told(call) for call in echo.calls if isinstance(call, Generate)}
    assert asked == {"Q: x?\nA:", "Q: y!\nA:"}


def test_the_common_prefix_is_computed_first(echo: Echo) -> None:
    answer.run_batch(questions(5))
    fill, *others = echo.done
    assert isinstance(fill, Fill)
    assert len(fill.segments) == 1
    assert (SHOTS + "Q:").startswith(fill.segments[0].text)  # type: ignore[union-attr]
    assert fill.segments[0].text.startswith(SHOTS[:-4])  # type: ignore[union-attr]
    assert all(isinstance(call, Generate) for call in others)
    assert len({call.program for call in echo.calls}) == 6 == len(echo.ended)


@pytest.mark.parametrize("error", [sgl.RequestFailed("full", 429), ValueError("of a backend's own")])
def test_items_run_if_their_prefix_cannot_be_computed_ahead(error: Exception) -> None:
    backend = Echo(told, fail=lambda call: error if isinstance(call, Fill) else None)
    states = answer.run_batch(questions(5), backend=backend)
    assert [state["a"] for state in states] == [f"Q: {i} times?" for i in range(5)]
    assert isinstance(backend.calls[0], Fill)
    assert len(backend.done) == 5


def test_a_batch_does_not_wait_long_for_its_end_to_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Echo):
        async def end(self, program: str) -> None:  # type: ignore[override]
            self.ended.append(program)
            await asyncio.sleep(60)

    monkeypatch.setattr("sapwood.lang.run.END_SECONDS", 0.05)
    backend = Deaf()
    began = time.monotonic()
    assert len(answer.run_batch(questions(3), backend=backend)) == 3
    assert time.monotonic() - began < 10
    assert len(backend.ended) == 4


def test_one_item_needs_no_prefix(echo: Echo) -> None:
    answer.run_batch(questions(1))
    assert [type(call) for call in echo.calls] == [Generate]


def test_no_two_items_share_a_seed(echo: Echo) -> None:
    answer.run_batch([{"q": "same"}] * 20, temperature=1.0)
    drawn = [call.sampling for call in echo.calls if isinstance(call, Generate)]
    assert len(drawn) == 20
    assert all(sampling.seed is None and sampling.temperature == 1.0 for sampling in drawn)


def test_the_others_finish_and_the_first_error_is_raised() -> None:
    def fail(call: Call) -> BaseException | None:
        text = "".join(part.text for part in call.segments)  # type: ignore[union-attr]
        return next((sgl.RequestFailed(f"item {i}") for i in (2, 4) if f"Q: {i} times" in text), None)

    backend = Echo(fail=fail)
    with pytest.raises(sgl.RequestFailed, match="item 2"):
        answer.run_batch(questions(6), num_threads=2, backend=backend)
    assert sum(isinstance(call, Generate) for call in backend.calls) == 6
    states = answer.run_batch(questions(6), generator_style=True, backend=backend)
    assert [next(states)["a"] for _ in range(2)]
    with pytest.raises(sgl.RequestFailed, match="item 2"):
        next(states)


def test_leaving_the_iterator_early_cancels_the_rest() -> None:
    both = asyncio.Event()

    async def say(call: Generate) -> str:
        if backend.running == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 20)
        return "x"

    backend = Echo(say, delay=lambda call: 30 if "Q: 1 times" in str(call.segments) else 0)
    states = answer.run_batch(questions(2), generator_style=True, backend=backend)
    assert next(states).ret_value == "0 times"
    states.close()  # type: ignore[attr-defined]
    assert (len(backend.cancelled), backend.running) == (1, 0)
    assert len(backend.ended) == 3


def test_what_is_cancelled_has_ended_when_the_batch_is_left() -> None:
    """Those that take long to end, too."""
    begun, ended = asyncio.Event(), []

    @sgl.function
    async def lasting(s: sgl.AsyncState, number: int) -> None:
        if number == 0:
            await begun.wait()
            return
        if number == 3:
            begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(number / 10)
            ended.append(number)

    states = lasting.run_batch([{"number": i} for i in range(4)], generator_style=True, backend=Echo())
    next(states)
    states.close()  # type: ignore[attr-defined]
    assert ended == [1, 2, 3]


def test_a_second_interrupt_cancels_what_the_first_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the end is waited for."""
    backend = Echo(delay=lambda call: 60 if isinstance(call, Generate) else 0)
    wait, waits = loop.Host.wait, itertools.count()

    def interrupted(host: loop.Host, work: Coroutine[Any, Any, Any]) -> Any:
        if next(waits) != 1:
            return wait(host, work)
        work.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Host, "wait", interrupted)
    monkeypatch.setattr(batch, "blocking", lambda *_: None)  # as if all had been done
    with pytest.raises(KeyboardInterrupt):
        answer_async.run_batch(questions(2), backend=backend)
    assert backend.running == 0


def test_an_interrupt_while_a_batch_begins_cancels_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for the batch's task may hear of it late, when the items run already."""
    backend = Echo(delay=lambda call: 60 if isinstance(call, Generate) else 0)
    wait, waits = loop.Host.wait, itertools.count()

    def interrupted(host: loop.Host, work: Coroutine[Any, Any, Any]) -> Any:
        result = wait(host, work)
        if next(waits) == 0:
            end = time.monotonic() + 20
            while backend.running < 2:
                assert time.monotonic() < end
                time.sleep(0.001)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(loop.Host, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer_async.run_batch(questions(2), backend=backend)
    assert (len(backend.cancelled), backend.running) == (2, 0)
    assert len(backend.ended) == 3


def test_an_interrupt_before_a_batch_begins_leaves_nothing_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Echo(delay=lambda call: 60 if isinstance(call, Generate) else 0)
    wait, waits = loop.Host.wait, itertools.count()

    def interrupted(host: loop.Host, work: Coroutine[Any, Any, Any]) -> Any:
        if next(waits):
            return wait(host, work)
        busy = threading.Event()
        host.call(busy.wait)
        future = asyncio.run_coroutine_threadsafe(work, host.loop)
        future.cancel()
        threading.Timer(0.1, busy.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Host, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer_async.run_batch(questions(2), backend=backend)
    assert (backend.cancelled, backend.running) == ([], 0)
    assert not any(isinstance(call, Generate) for call in backend.ended)


def test_wrong_arguments_are_errors_before_anything_runs(echo: Echo) -> None:
    items: list[Any] = [[{"q": "x"}, {}], [{"p": "x"}], [("x", "y", "z")], ["xy"], [{"q": "x"}, ()]]
    for wrong in items:
        with pytest.raises(TypeError):
            answer.run_batch(wrong)
    with pytest.raises(TypeError, match="batch_kwargs must be a list or a tuple, got dict"):
        answer.run_batch({"q": "x"})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match='at least 1 or "auto", got 0'):
        answer.run_batch(questions(2), num_threads=0)
    with pytest.raises(TypeError, match="unknown option: temprature"):
        answer.run_batch(questions(2), temprature=1)  # type: ignore[call-overload]
    assert echo.calls == []


def test_the_bar_shows_itself_on_a_terminal_only(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        answer.run_batch(questions(4), progress_bar=True)
        assert ("4/4\n" in stream.getvalue()) == shown
        answer.run_batch(questions(4))
    assert stream.getvalue().count("\n") == 1


def test_programs_that_read_nothing_need_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them wait for their outputs at one time, with four threads for their own code."""
    monkeypatch.setattr(loop, "MOST_THREADS", 4)
    monkeypatch.setattr(loop, "_background", loop._Background())
    all_here = asyncio.Event()

    async def together(call: Generate) -> str:
        if backend.running == 60:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 20)
        return "x"

    backend = Echo(together)

    @sgl.function
    def program(s: sgl.State, i: int) -> None:
        s += f"{i}" + sgl.gen("a")

    program.run_batch([{"i": i} for i in range(60)], num_threads=60, backend=backend)
    assert backend.most == 60


def test_a_thousand_async_programs_run_on_one_loop_without_threads() -> None:
    all_here, begun = asyncio.Event(), set[threading.Thread]()

    async def together(call: Generate) -> str | None:
        if backend.running == 2000:
            begun.update(threading.enumerate())
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)
        return None

    backend = Echo(together)

    @sgl.function
    async def program(s: sgl.AsyncState, i: int) -> str:
        s += f"{i} "
        forks = s.fork(2)
        forks += lambda j: f"{j}" + sgl.gen("leaf")
        forks.join()
        return ",".join(await s["leaf"])

    async def main() -> list[Any]:
        return [state.ret_value for state in await asyncio.gather(*map(run, range(1000)))]

    async def run(i: int) -> sgl.State:
        return await program.run_async(i, backend=backend)

    # Threads of earlier tests may end meanwhile.
    before = set(threading.enumerate())
    assert asyncio.run(main()) == ["0,1"] * 1000
    assert begun <= before
    assert backend.most == 2000
    assert len(backend.ended) == 1000


def test_bound_arguments_hold_unless_a_run_gives_others(echo: Echo) -> None:
    bound = answer.bind(q="bound").bind(mark="!")
    assert bound.run().ret_value == "bound"
    assert bound.run(q="other").ret_value == "other"
    assert bound.run("third").ret_value == "third"
    assert told(echo.calls[0]) == "Q: bound!\nA:"  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="answer has no argument x"):
        answer.bind(x=1)
    with pytest.raises(TypeError, match="missing a required argument: 'q'"):
        answer.run()


def test_options_of_a_program_hold_unless_a_run_gives_others(echo: Echo) -> None:
    cold = answer.options(temperature=0.0, max_new_tokens=3)
    cold.run("x")
    cold("x")
    cold.run("x", temperature=0.5)
    drawn = [call.sampling for call in echo.calls if isinstance(call, Generate)]
    assert [(one.temperature, one.max_new_tokens) for one in drawn] == [(0.0, 3), (0.0, 3), (0.5, 3)]


def test_a_name_that_is_an_option_and_an_argument_is_the_arguments(echo: Echo) -> None:
    @sgl.function
    def program(s: sgl.State, temperature: str) -> None:
        s += "It is " + temperature + sgl.gen("a")

    program.run(temperature="cold")
    (call,) = echo.calls
    assert isinstance(call, Generate)
    assert call.sampling.temperature is None
    assert call.segments == (Text("It is cold"),)


def test_cache_computes_the_constant_prefix(echo: Echo) -> None:
    answer.cache()
    (call,) = echo.calls
    assert isinstance(call, Fill)
    assert call.segments[0].text.startswith(SHOTS[:-4])  # type: ignore[union-attr]
    assert echo.ended == []


def test_a_program_keeps_its_functions_name_and_signature() -> None:
    import inspect

    assert answer.__name__ == "answer"  # type: ignore[attr-defined]
    assert list(inspect.signature(answer).parameters) == ["s", "q", "mark"]
    with pytest.raises(TypeError, match="a program's first argument is its state"):
        sgl.function(lambda: None)  # type: ignore[arg-type, misc]


def test_an_error_says_which_item_it_is_of() -> None:
    @sgl.function
    def program(s: sgl.State, i: int) -> None:
        s += sgl.gen("a", top_p=2.0 if i == 2 else 1.0)

    def refuses(call: Call) -> BaseException | None:
        wrong = isinstance(call, Generate) and call.sampling.top_p == 2.0
        return sgl.RequestFailed("top_p", 400) if wrong else None

    for generator_style in (False, True):
        with pytest.raises(sgl.RequestFailed) as failed:
            list(
                program.run_batch(
                    [{"i": i} for i in range(4)],
                    backend=sgl.Echo(fail=refuses),
                    generator_style=generator_style,
                )
            )
        assert "item 2 of the batch" in failed.value.__notes__
    with pytest.raises(TypeError) as wrong:
        program.run_batch([{"i": 1}, {"j": 1}], backend=sgl.Echo())
    assert "item 1 of batch_kwargs" in wrong.value.__notes__
