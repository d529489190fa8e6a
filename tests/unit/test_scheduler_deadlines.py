"""A request waits for its turn no longer than it, or the server, allows."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt.params import Scheduling
from tests.simulation import World

BUSY = {"max_tokens": 100, "ignore_eos": True}


class Timed(World):
    """A World with a clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0
        self.state.clock = lambda: self.now

    def wait(self, prompt: list[int], seconds: float | None = None, **params: Any) -> int:
        return self.submit(prompt, scheduling=Scheduling(queue_timeout=seconds), **params)

    def error(self, key: int, choice: int = 0) -> Any:
        done = self.clients[key].done[choice]
        assert (done.reason, done.n) == ("error", 0)
        return done.error


@pytest.mark.parametrize(
    ("own", "server", "limit", "status"),
    [(2.0, None, 2, 408), (None, 3.0, 3, 504), (2.0, 3.0, 2, 408), (5.0, 3.0, 3, 504), (3.0, 3.0, 3, 408)],
)
def test_the_lower_limit_counts(own: float | None, server: float | None, limit: float, status: int) -> None:
    world = Timed(max_running_requests=1, queue_timeout=server)
    busy = world.submit([2, 3], **BUSY)
    world.turn()
    late = world.wait([4, 5], own)
    world.now = limit - 0.01
    world.turn()
    assert not world.clients[late].finished
    world.now = float(limit)
    world.turn()
    error = world.error(late)
    assert (error.status, error.type, error.code) == (status, "timeout_error", "queue_timeout")
    assert f"more than {limit:g} s" in error.message
    assert ("--queue-timeout" in error.message) == (status == 504)
    world.run()
    world.expect(busy)
    world.idle()


def test_all_choices_end_and_nobody_else() -> None:
    world = Timed(max_running_requests=1)
    world.submit([2, 3], **BUSY)
    world.turn()
    several, patient = world.wait([4, 5], 1.0, n=3), world.wait([4, 6], 9.0)
    unlimited = world.wait([4, 7])
    world.now = 2.0
    world.turn()
    assert sorted(world.clients[several].done) == [0, 1, 2]
    assert {world.error(several, choice).code for choice in range(3)} == {"queue_timeout"}
    world.run()
    for key in (patient, unlimited):
        world.expect(key)
    world.idle()


def test_what_has_begun_is_not_timed_even_if_it_is_retracted() -> None:
    world = Timed(num_slots=64, context=60, queue_timeout=1.0)
    keys = [world.submit([2 + i, 3, 4], max_tokens=40, ignore_eos=True) for i in range(2)]
    world.turn()
    world.now = 50.0
    world.run()
    assert world.state.counters.retracted
    for key in keys:
        world.expect(key)
    world.idle()


def test_one_that_waits_for_a_siblings_prefix_is_timed_too() -> None:
    world = Timed(chunked_prefill_size=4)
    prompt = list(range(2, 42))
    first, second = world.wait(prompt, 1.0), world.wait(prompt, 1.0)
    world.turn()
    assert world.clients[first].admitted is not None
    assert world.clients[second].admitted is None
    world.now = 1.0
    world.turn()
    assert world.error(second).code == "queue_timeout"
    world.run()
    world.expect(first)
    world.idle()


def test_the_time_counts_when_no_step_is_made() -> None:
    world = Timed()
    world.scheduler.lose_worker("worker died")
    world.state = world.scheduler.state
    late = world.wait([2, 3], 1.0)
    assert world.state.deadlines.next() == 1.0
    world.now = 1.0
    world.turn()
    assert world.error(late).code == "queue_timeout"
    assert world.state.deadlines.next() is None


def test_a_cancelled_request_is_not_ended_twice() -> None:
    world = Timed(max_running_requests=1)
    world.submit([2, 3], **BUSY)
    world.turn()
    gone = world.wait([4, 5], 1.0)
    world.cancel(gone)
    world.now = 2.0
    world.run()
    assert world.clients[gone].done[0].reason == "abort"
    world.idle()


def test_nothing_is_kept_of_those_that_have_ended() -> None:
    world = Timed(queue_timeout=86400.0)
    for i in range(1000):
        world.cancel(world.submit([2, 3 + i % 40]))
        assert len(world.state.deadlines) <= 65
    assert world.state.deadlines.next() is None
    assert len(world.state.deadlines) == 0
