"""The scheduler begins anew: with another worker, and when an invariant does not hold. Each request ends
once, and what comes later is answered as ever."""

from __future__ import annotations

import json
import queue
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.channel import Inbox
from sapwood.srt.config import make
from sapwood.srt.messages import Answer, Ask, Submit, WorkerReady
from sapwood.srt.namespaces import LISTED
from sapwood.srt.orders import Boot, Restart
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler import recovery
from sapwood.srt.scheduler.loop import Posts, SchedulerProcess
from sapwood.srt.scheduler.recovery import CHECK_SECONDS, MAX_REBUILDS, REBUILD_SECONDS, Guard
from sapwood.srt.scheduler.state import State
from tests.simulation import World
from tests.simulation.worker import SimulatedWorker
from tests.simulation.world import model

LONG = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Mortal(World):
    """A World whose scheduler may begin anew, under its Guard."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0
        self.state.clock = lambda: self.now
        self.guard = Guard(self.scheduler)

    def follow(self) -> None:
        self.state = self.scheduler.state
        self.collect()

    def guarded_turn(self) -> None:
        self.guard.advance()
        self.follow()
        if self.sent:
            self.guard.handle(self.run_step(self.sent.popleft()))
            self.follow()

    def guarded_run(self) -> None:
        for _ in range(1000):
            self.guarded_turn()
            if not self.sent and not self.state.requests:
                return
        raise AssertionError("not done")

    def kill_worker(self) -> None:
        self.scheduler.lose_worker("worker died: killed by signal 9")
        self.follow()
        self.sent.clear()

    def replace_worker(self, num_slots: int) -> None:
        rows = self.state.rows.capacity
        self.worker = SimulatedWorker(num_slots, rows, self.source.context_length)
        self.worker.number = self.scheduler._number
        self.run_step = self.worker.run
        self.scheduler.take_worker(num_slots)
        self.follow()

    def told(self, key: int) -> set[str]:
        """The codes of the errors that a request's choices have got."""
        client = self.clients[key]
        assert client.finished
        errors = [done.error for done in client.done.values()]
        return {error.code for error in errors if error is not None}

    def expect(self, key: int, cut: Mapping[int, int | None] | None = None) -> None:
        super().expect(key, cut)
        assert self.told(key) == set()

    def serves(self) -> None:
        """A request is answered as ever, and nothing is left of it."""
        key = self.submit([7, 8, 9], **LONG)
        self.guarded_run()
        self.expect(key)
        self.idle()


# ---- another worker


def test_prefixes_that_will_be_listed_again_keep_their_room() -> None:
    world = Mortal(num_slots=100, context=100, max_running_requests=2)
    prefix = {"namespace": LISTED, "max_tokens": 0}
    world.submit([9] * 30, **prefix)
    world.guarded_run()
    assert world.state.max_request_tokens == 70
    waiting = world.submit([3] * 60, max_tokens=None, ignore_eos=True)
    world.kill_worker()
    world.replace_worker(100)
    assert world.state.max_request_tokens == 70
    # Accepted before the prefix is listed again, and still to fit when it is.
    early = world.submit([4] * 65, max_tokens=None, ignore_eos=True)
    world.submit([5] * 71, max_tokens=1)
    again = world.submit([9] * 30, **prefix)
    world.guarded_run()
    assert world.state.tree.listed_tokens == 30
    assert world.clients[again].finished
    assert len(world.clients[early].output[0]) == 5
    assert len(world.clients[waiting].output[0]) == 10
    refused = world.clients[again - 1].refused
    assert refused is not None
    assert "100 slots, 30 of them for shared prefixes" in refused.error.message


def test_prefixes_are_listed_again_though_the_queue_is_full() -> None:
    world = Mortal(max_running_requests=1, max_queued_requests=1)
    keys = [world.submit([3 + i] * 5, **LONG) for i in range(2)]
    listed = world.submit([9] * 30, LISTED, max_tokens=0)
    refused = world.submit([8] * 5, **LONG)
    world.guarded_run()
    assert world.clients[listed].refused is None
    assert world.state.tree.listed_tokens == 30
    assert world.clients[refused].refused is not None
    assert world.clients[keys[0]].finished


def test_what_ran_ends_and_what_waited_is_served_later() -> None:
    world = Mortal(max_running_requests=2)
    keys = [world.submit([2 + i, 3, 4], **LONG) for i in range(5)]
    for _ in range(4):
        world.guarded_turn()
    ran = [key for key in keys if world.clients[key].admitted is not None]
    assert len(ran) == 2
    world.kill_worker()
    for key in ran:
        error = world.clients[key].done[0].error
        assert error is not None
        assert (error.status, error.code) == (503, "process_died")
        assert error.message.startswith("worker died: killed by signal 9")
        assert "may be retried" in error.message
        assert world.clients[key].done[0].n == len(world.clients[key].output[0])
    assert not any(world.clients[key].finished for key in set(keys) - set(ran))
    keys.append(world.submit([9, 9], **LONG))
    world.guarded_turn()
    assert not world.sent, "a step without a worker"
    world.state.check()
    assert world.state.tree.cached_tokens == 0
    world.replace_worker(256)
    world.guarded_run()
    for key in set(keys) - set(ran):
        world.expect(key)
    world.idle()


@pytest.mark.parametrize("turns", range(14))
def test_a_death_at_any_moment_ends_each_request_once(turns: int) -> None:
    world = Mortal(num_slots=64, context=60, max_running_requests=4, chunked_prefill_size=5)
    prompt = list(range(2, 20))
    keys = [
        world.submit(prompt, n=3, **LONG),
        world.submit([*prompt[:9], 40], max_tokens=20, repetition_penalty=1.2),
        world.submit(prompt[:14], max_tokens=3, logprob_start=1, logprobs=0),
        world.submit([3, 4, 5], **LONG),
        world.submit(prompt[::-1], max_tokens=0),
        world.submit([6, 5, 4], n=2, **LONG),
    ]
    for _ in range(turns):
        world.guarded_turn()
    late = [world.run_step(step) for step in world.sent]
    before = {key for key in keys if world.clients[key].admitted is not None}
    world.kill_worker()
    for result in late:
        world.guard.handle(result)
    world.replace_worker(64)
    for result in late:
        world.guard.handle(result)
    world.guarded_run()
    for key in keys:
        if key not in before:
            world.expect(key)
        else:
            assert world.told(key) <= {"process_died"}
    world.serves()


def test_a_smaller_pool_refuses_what_no_longer_fits() -> None:
    world = Mortal(num_slots=256, max_running_requests=1)
    world.submit([2, 3], **LONG)
    world.guarded_turn()
    large, long = world.submit([4] * 60, **LONG), world.submit([5] * 20, max_tokens=100, ignore_eos=True)
    world.kill_worker()
    world.replace_worker(50)
    refused = world.clients[large].refused
    assert refused is not None
    assert refused.error.code == "context_length_exceeded"
    assert "60 tokens" in refused.error.message
    assert "50" in refused.error.message
    world.guarded_run()
    world.expect(long)
    assert len(world.clients[long].output[0]) == 30
    world.idle()


def test_two_deaths_in_a_row() -> None:
    world = Mortal(max_running_requests=2)
    keys = [world.submit([2 + i, 3, 4], **LONG) for i in range(6)]
    for _ in range(2):
        world.guarded_turn()
        world.kill_worker()
        world.kill_worker()
        world.replace_worker(256)
    world.guarded_run()
    assert [world.told(key) for key in keys] == [{"process_died"}] * 4 + [set()] * 2
    world.serves()


def test_an_abort_of_what_has_been_failed_does_no_harm() -> None:
    world = Mortal()
    key = world.submit([2, 3], **LONG)
    world.guarded_turn()
    world.kill_worker()
    world.cancel(key)
    world.stop_at(key, 0, 1)
    world.replace_worker(256)
    world.serves()


class Beats:
    """A lifeline that only writes down what is told."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.told: list[int] = []

    def ready(self, facts: dict[str, str], max_request_tokens: int) -> None:
        self.told.append(max_request_tokens)


def test_steps_are_of_the_size_that_the_workers_device_wants(tmp_path: Path) -> None:
    inbox = Inbox(str(tmp_path), "scheduler")
    boot = Boot(make(), model(10_000), str(tmp_path), "scheduler")
    ready = WorkerReady(5000, device="cuda")
    process = SchedulerProcess(boot, Beats(), inbox, Posts([]), ready)  # type: ignore[arg-type]
    try:
        assert process._scheduler.state.config.rows == 256
        assert process._scheduler.state.budget == 2048
    finally:
        for outbox in process._worker._outboxes:
            outbox.close()
        inbox.close()


def test_the_workers_word_may_come_before_the_launchers(tmp_path: Path) -> None:
    config, source, lifeline = make(), model(1000), Beats()
    inbox = Inbox(str(tmp_path), "scheduler")
    boot = Boot(config, source, str(tmp_path), "scheduler")
    process = SchedulerProcess(boot, lifeline, inbox, Posts([]), WorkerReady(100))  # type: ignore[arg-type]
    try:
        process._take_worker(WorkerReady(200, 1))
        assert (process._worker.index, lifeline.told) == (1, [100, 200])
        state = process._scheduler.state
        process._obey(Restart(1, "worker died"))
        assert process._scheduler.state is state
        process._obey(Restart(2, "worker 1 died"))
        assert not process._scheduler._has_worker
        process._take_worker(WorkerReady(300, 1))
        assert (process._scheduler._has_worker, lifeline.told) == (False, [100, 200])
        process._take_worker(WorkerReady(300, 2))
        assert (process._scheduler._has_worker, lifeline.told) == (True, [100, 200, 300])
    finally:
        for outbox in process._worker._outboxes:
            outbox.close()
        inbox.close()


# ---- invariants


def wrong_number(state: State) -> None:
    state.in_flight[0].number += 1


def lost_lock(state: State) -> None:
    node = state.rows.node[int(np.flatnonzero(state.rows.active)[0])]
    node.lock_count = 0


def lost_sequence(state: State) -> None:
    state.rows.sequence[int(np.flatnonzero(state.rows.active)[0])] = None


def wrong_row(state: State) -> None:
    state.in_flight[0].rows[0] = 10_000


def lost_choices(state: State) -> None:
    state.sequences.clear()


def lost_requests(state: State) -> None:
    state.requests.clear()


SPOILERS = [wrong_number, lost_lock, lost_sequence, lost_requests, lost_choices, wrong_row]


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_broken_invariant_costs_the_requests_and_not_the_server(
    spoil: Callable[[State], None], overlap: bool, temporary: Path
) -> None:
    world = Mortal(max_running_requests=3, disable_overlap_schedule=not overlap)
    keys = [world.submit([2 + i, 3, 4, 5], "salt:secret", max_tokens=9, ignore_eos=True) for i in range(5)]
    several = world.submit([30, 31, 32], n=2, max_tokens=9, ignore_eos=True)
    for _ in range(3):
        world.guarded_turn()
    world.guard.advance()
    world.follow()
    assert world.sent
    spoil(world.state)
    broken = world.state
    for _ in range(30):
        world.guarded_turn()
    assert world.state is not broken, "nobody has noticed"
    for key in [*keys, several]:
        assert world.told(key) <= {"internal_error"}
    assert any(world.told(key) for key in keys)
    world.serves()
    assert list(temporary.glob("sapwood-dump-*.json"))


def test_the_worker_hears_which_rows_are_free() -> None:
    """The simulated worker fails if a row that it has is given away again."""
    world = Mortal(max_running_requests=3)
    for i in range(3):
        world.submit([2 + i, 3, 4], **LONG)
    for _ in range(3):
        world.guarded_turn()
    world.guard.advance()
    steps = len(world.steps)
    wrong_number(world.state)
    world.guarded_turn()
    world.serves()
    assert messages.unpack(world.steps[steps].released).tolist() == [0, 1, 2]
    assert set(world.worker.starts) <= {0, 1, 2}


def test_a_dump_tells_much_but_no_ids_and_no_names(temporary: Path) -> None:
    world = Mortal(max_running_requests=2)
    for i in range(4):
        world.submit([2 + i, 3, 4], "salt:my secret", **LONG)
    for _ in range(3):
        world.guarded_turn()
    world.guard.advance()
    world.follow()
    wrong_number(world.state)
    world.guarded_turn()
    (path,) = temporary.glob("sapwood-dump-*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    data = json.loads(path.read_text())
    assert "my secret" not in path.read_text()
    assert "AssertionError" in "".join(data["error"])
    assert "results.py" in "".join(data["error"])
    assert len(data["rows"]) == 2
    assert {"row", "key", "length", "planned", "done"} <= set(data["rows"][0])
    assert [waiting["tokens"] for waiting in data["waiting"]] == [3, 3]
    assert data["state"]["running"] == 2
    assert data["steps"][-1]["number"] >= 3
    assert "ids" not in data["steps"][0]
    nodes = data["tree"]["namespaces"][0]["children"]
    assert nodes
    assert all(node["ids"] == [] for node in nodes)


def test_what_is_too_broken_to_be_shown_does_not_spoil_the_dump(temporary: Path) -> None:
    world = Mortal()
    key = world.submit([2, 3, 4], **LONG)
    for _ in range(3):
        world.guarded_turn()
    world.state.tree._roots = None  # type: ignore[assignment]
    for _ in range(50):
        world.guarded_turn()
    assert world.told(key) == {"internal_error"}
    (path,) = temporary.glob("sapwood-dump-*.json")
    assert json.loads(path.read_text())["tree"].startswith("cannot be shown: ")
    world.serves()


def test_a_request_that_breaks_it_is_answered_too() -> None:
    world = Mortal()
    other = world.submit([2, 3], **LONG)
    world.guarded_turn()
    bad = Submit(500, 0, "r", b"\0\0\0", SamplingParams(max_tokens=3), "", 0.0)
    world.clients.open(bad)
    world.guard.handle(bad)
    world.follow()
    refused = world.clients[500].refused
    assert refused is not None
    assert refused.error.code == "internal_error"
    assert world.told(other) == {"internal_error"}
    world.serves()


def test_a_question_that_breaks_it_is_answered_too() -> None:
    world = Mortal()
    world.state.tree._roots = None  # type: ignore[assignment]
    world.guard.handle(Ask(3, "flush"))
    (answer,) = world.scheduler.state.outgoing[0]
    assert isinstance(answer, Answer)
    assert answer.call == 3
    assert answer.error is not None
    world.scheduler.state.outgoing.clear()
    world.follow()
    world.serves()


def test_too_often_is_the_end() -> None:
    world = Mortal()

    def breaks() -> None:
        world.submit([2, 3], **LONG)
        world.guarded_turn()
        world.guard.advance()
        world.follow()
        wrong_number(world.state)
        world.guarded_run()

    for i in range(MAX_REBUILDS):
        world.now = float(i)
        breaks()
    world.now = REBUILD_SECONDS
    breaks()
    world.now += 0.5
    with pytest.raises(AssertionError):
        breaks()


# ---- the self-check of an idle scheduler


def test_a_leak_is_found_when_there_is_time(temporary: Path) -> None:
    world = Mortal()
    key = world.submit([2, 3, 4], **LONG)
    for _ in range(5):
        world.guarded_turn()
    world.state.pool.allocate(1)
    world.guarded_run()
    world.expect(key)
    assert world.state.pool.num_free < world.state.pool.total
    world.guarded_turn()
    assert world.state.pool.num_free == world.state.pool.total
    (path,) = temporary.glob("sapwood-dump-*.json")
    assert "nowhere" in "".join(json.loads(path.read_text())["error"])
    world.serves()


def test_it_is_checked_now_and_then_and_only_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Mortal()
    checks: list[float] = []
    plain = State.check
    monkeypatch.setattr(State, "check", lambda state: (checks.append(world.now), plain(state))[1])

    def work() -> None:
        world.submit([2, 3], max_tokens=3)
        world.guarded_run()
        world.guarded_turn()

    assert world.guard.patience() is None
    work()
    assert (checks, world.guard.patience()) == ([0.0], None)
    world.now = 1.0
    work()
    assert checks == [0.0]
    assert world.guard.patience() == CHECK_SECONDS - 1.0
    world.now = CHECK_SECONDS
    world.guarded_turn()
    assert (checks, world.guard.patience()) == ([0.0, CHECK_SECONDS], None)
    monkeypatch.setattr(recovery, "CHECK_MICROSECONDS", 0.0)
    world.now = 100.0
    work()
    assert checks == [0.0, CHECK_SECONDS]
    assert world.guard.patience() is None
