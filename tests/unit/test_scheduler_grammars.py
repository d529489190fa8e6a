"""Requests with a grammar wait for the worker to load it, without a row; grammars are kept while they are
used and for a while after; a grammar decides when an output ends, and what it forces is drafted."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.srt import messages
from sapwood.srt.config import make
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import DropGrammars, Grammar, GrammarLoaded, LoadGrammar, Step, Submit
from sapwood.srt.params import SamplingParams, Scheduling
from sapwood.srt.scheduler import grammars
from sapwood.srt.scheduler.grammars import MAX_UNUSED, Grammars
from sapwood.srt.scheduler.preemption import retract
from tests.simulation import World
from tests.simulation.rules import Rules
from tests.simulation.worker import SimulatedWorker

LONG = {"ignore_eos": True, "max_tokens": 30}
FREE = Rules({}, 0, 1000).grammar()
BAD = Rules({}, 0, 1000, True).grammar()


def text(begin: int, count: int, end: int = 1000, least: int = 0) -> Grammar:
    """A grammar that forces `count` tokens from place `begin` on."""
    return Rules({begin + i: 3 + i % 40 for i in range(count)}, least, end).grammar()


class Orders(World):
    """A World that remembers what it has told the worker of grammars."""

    def __init__(self, **options: Any) -> None:
        self.orders: list[Any] = []
        super().__init__(**options)

    def _send(self, step: Any) -> bool:
        if not isinstance(step, Step):
            self.orders.append(step)
        return super()._send(step)

    def kill_worker(self) -> None:
        self.scheduler.lose_worker("worker died")
        self.state = self.scheduler.state
        self.sent.clear()
        self.loads.clear()
        self.collect()

    def replace_worker(self, num_slots: int) -> None:
        self.worker = SimulatedWorker(num_slots, self.state.rows.capacity, self.source.context_length)
        self.worker.number = self.scheduler._number
        self.run_step = self.worker.run
        self.scheduler.take_worker(num_slots)
        self.state = self.scheduler.state
        self.collect()


# ---- loading


def test_a_request_waits_for_its_grammar_without_a_row() -> None:
    world = Orders()
    world.loads_wait = True
    waiting = [world.submit([5, 6, 7], grammar=FREE, **LONG) for _ in range(2)]
    other = world.submit([5, 6, 8], **LONG)
    for _ in range(5):
        world.turn()
        assert [world.state.sequences[key].row for key in waiting] == [-1, -1]
    assert world.clients[other].output[0]
    assert world.state.stats().waiting == 2
    assert world.orders == [LoadGrammar(FREE.key, FREE.text)]
    world.load()
    world.loads_wait = False
    world.run()
    for key in (*waiting, other):
        world.expect(key)
    starts = [start for step in world.steps for start in step.admitted]
    assert [start.grammar for start in starts] == [b"", FREE.key, FREE.key]
    assert starts[1].history == messages.pack([5, 6, 7])
    world.idle()


def test_a_grammar_is_loaded_once() -> None:
    world = Orders()
    for _ in range(3):
        key = world.submit([5, 6, 7], grammar=FREE, **LONG)
        world.run()
        world.expect(key)
    assert len(world.orders) == 1


def test_what_cannot_be_loaded_is_answered_with_the_reason() -> None:
    world = Orders()
    keys = [world.submit([5, 6, i], n=1 + i, grammar=BAD, **LONG) for i in range(3)]
    fine = world.submit([5, 6, 7], grammar=FREE, **LONG)
    world.run()
    for i, key in enumerate(keys):
        done = world.clients[key].done
        assert len(done) == 1 + i
        assert {(d.reason, d.n) for d in done.values()} == {("error", 0)}
        assert all(d.error is not None and d.error.status == 400 for d in done.values())
    world.expect(fine)
    # It is not remembered as bad: the worker says so each time.
    world.submit([5], grammar=BAD, **LONG)
    world.run()
    assert len(world.orders) == 3
    world.idle()


@pytest.mark.parametrize("answered", [True, False])
def test_a_grammar_that_nobody_waits_for_any_more_is_withdrawn(answered: bool) -> None:
    """Its answer may be on its way: that is not taken for the one to the load that comes next."""
    world = Orders()
    world.loads_wait = True
    keys = [world.submit([5, 6, i], n=2, grammar=FREE, **LONG) for i in (7, 8)]
    world.turn()
    world.cancel(keys[0])
    world.turn()
    assert len(world.orders) == 1
    answer = world.worker.load(world.loads.popleft()) if answered else None
    world.cancel(keys[1])
    world.check()
    assert {d.reason for key in keys for d in world.clients[key].done.values()} == {"abort"}
    again = world.submit([5, 6, 7], grammar=FREE, **LONG)
    world.turn()
    if answer is not None:
        world.scheduler.handle(answer)
        world.check()
    assert world.state.requests[again].loading
    world.loads_wait = False
    world.run()
    world.expect(again)
    load, drop, anew = world.orders
    assert drop == DropGrammars([load.key])
    assert anew == LoadGrammar(anew.key, FREE.text)
    assert set(world.worker.grammars) == {anew.key} != {load.key}
    world.idle()


def test_a_deadline_holds_while_a_grammar_loads() -> None:
    world = Orders()
    world.loads_wait = True
    now = 0.0
    world.state.clock = lambda: now
    key = world.submit([5], grammar=FREE, scheduling=Scheduling(queue_timeout=1.0), **LONG)
    world.turn()
    now = 1.1
    world.turn()
    error = world.clients[key].done[0].error
    assert error is not None
    assert error.code == "queue_timeout"
    world.load()
    world.run()
    world.idle()


def test_those_that_wait_for_grammars_count_as_queued() -> None:
    world = Orders(max_queued_requests=2)
    world.loads_wait = True
    keys = [world.submit([5, i], grammar=FREE, **LONG) for i in range(3)]
    world.turn()
    refused = world.clients[keys[2]].refused
    assert refused is not None
    assert refused.error.code == "queue_full"
    world.load()
    world.run()
    world.idle()


def test_a_prompt_alone_needs_no_grammar() -> None:
    world = Orders()
    key = world.submit([5, 6, 7], grammar=FREE, max_tokens=0)
    world.run()
    assert world.clients[key].done[0].reason == "length"
    assert world.orders == []
    world.idle()


# ---- what the worker keeps


def submit(world: World, grammar: Grammar) -> None:
    world.run()
    key = world.submit([5], grammar=grammar, max_tokens=1)
    world.run()
    world.expect(key)


def test_the_least_lately_used_is_dropped_and_loaded_anew() -> None:
    world = Orders()
    many = [Rules({1000: i + 2}, 0, 1000).grammar() for i in range(MAX_UNUSED + 2)]
    for grammar in many[:MAX_UNUSED]:
        submit(world, grammar)
    submit(world, many[0])
    assert not [order for order in world.orders if isinstance(order, DropGrammars)]
    for grammar in many[MAX_UNUSED:]:
        submit(world, grammar)
    world.scheduler.advance()
    dropped = [order.keys for order in world.orders if isinstance(order, DropGrammars)]
    assert dropped == [[many[1].key], [many[2].key]]
    submit(world, many[1])
    loads = [order.key for order in world.orders if isinstance(order, LoadGrammar)]
    assert loads.count(many[1].key) == 2
    assert len(loads) == len(many) + 1


def test_unused_grammars_are_bounded_in_bytes_and_used_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Orders(num_slots=2000)
    used = text(0, 50)
    key = world.submit([5], grammar=used, ignore_eos=True, max_tokens=150)
    world.turn()
    monkeypatch.setattr(grammars, "MAX_UNUSED_BYTES", 0)
    for i in range(3):
        other = world.submit([5], grammar=text(i, 1), max_tokens=1)
        while other in world.state.requests:
            world.turn()
    world.turn()
    dropped = [name for order in world.orders if isinstance(order, DropGrammars) for name in order.keys]
    assert dropped == [text(i, 1).key for i in range(3)]
    world.run()
    world.expect(key)
    world.scheduler.advance()
    assert world.orders[-1] == DropGrammars([used.key])


def test_users_are_counted() -> None:
    known = Grammars()
    world = World()
    world.loads_wait = True
    keys = [world.submit([5], grammar=FREE, **LONG) for _ in range(2)]
    requests = [world.state.requests[key] for key in keys]
    for request in requests:
        known.join(request)
        assert request.loading
    assert requests[0].grammar is requests[1].grammar, "one text for all"
    known.leave(requests[0])
    known.check([requests[1]])
    assert known.loaded(b"other", False) == []
    assert known.loaded(FREE.key, False) == [requests[1]]
    known.leave(requests[1])
    known.check([])
    with pytest.raises(AssertionError, match="twice"):
        known.leave(requests[1])


# ---- another worker, another state


@pytest.mark.parametrize("num_slots", [256, 200])
def test_another_worker_loads_anew_for_those_that_wait(num_slots: int) -> None:
    world = Orders(max_running_requests=1)
    running = world.submit([5, 6], grammar=FREE, **LONG)
    world.turn()
    world.turn()
    waiting = world.submit([5, 7], grammar=FREE, **LONG)
    loading = world.submit([5, 8], grammar=text(0, 3), **LONG)
    world.loads_wait = True
    world.turn()
    world.kill_worker()
    assert world.clients[running].done[0].reason == "error"
    world.loads_wait = False
    # What the dead one said comes late: it is not the new one that has it.
    world.scheduler.handle(GrammarLoaded(FREE.key))
    world.replace_worker(num_slots)
    world.scheduler.handle(GrammarLoaded(FREE.key))
    world.check()
    assert world.state.requests[waiting].loading
    world.run()
    for key in (waiting, loading):
        world.expect(key)
    names = [order.key for order in world.orders if isinstance(order, LoadGrammar)]
    assert len(names) == 4
    assert len(set(names)) == 4
    world.idle()


def test_the_worker_keeps_its_grammars_when_the_state_is_rebuilt() -> None:
    world = Orders()
    loaded = world.submit([5, 6], grammar=FREE, **LONG)
    world.turn()
    world.turn()
    world.loads_wait = True
    loading = world.submit([5, 6], grammar=text(0, 3), **LONG)
    while not world.loads:
        world.turn()
    world.scheduler.rebuild(ErrorInfo(500, "server_error", "internal_error", "begun anew"))
    world.state = world.scheduler.state
    world.collect()
    assert {world.clients[key].done[0].reason for key in (loaded, loading)} == {"error"}
    keys = [world.submit([5, 6], grammar=grammar, **LONG) for grammar in (FREE, text(0, 3))]
    world.check()
    assert [world.state.requests[key].loading for key in keys] == [False, True]
    world.load()
    world.run()
    for key in keys:
        world.expect(key)
    assert len(world.orders) == 2
    world.idle()


# ---- ends


def test_eos_ends_whatever_was_asked_for() -> None:
    world = Orders(num_slots=2000, speculative_algorithm="none")
    eos = Rules({7: 1}, 0, 1000).grammar()
    key = world.submit([5, 6, 7], grammar=eos, **{**LONG, "seed": 3})
    world.run()
    world.expect(key)
    done = world.clients[key].done[0]
    assert (done.reason, done.matched) == ("stop", 1)
    assert done.n <= 8


@pytest.mark.parametrize("algorithm", ["none", "auto"])
@pytest.mark.parametrize("end", [1, 2, 6, 30, 31])
def test_an_output_ends_where_its_grammar_does(end: int, algorithm: str) -> None:
    """At the limit too it is complete; only one that is cut has the reason "length"."""
    world = Orders(speculative_algorithm=algorithm)
    key = world.submit([5, 6, 7], grammar=text(2, 10, end, least=end), **LONG)
    world.run()
    world.expect(key)
    done = world.clients[key].done[0]
    assert (done.reason, done.matched, done.n) == ("length" if end > 30 else "stop", None, min(end, 30))
    world.idle()


@pytest.mark.parametrize("end", [1, 2, 9])
@pytest.mark.parametrize("rows", [2, 8])
def test_each_choice_ends_where_it_would_alone(end: int, rows: int) -> None:
    """Even after its first token: choices with a grammar draw that in rows of their own."""
    world = Orders(max_running_requests=rows)
    key = world.submit([4] * 20, n=5, grammar=text(3, 4, end, least=end), **LONG)
    world.run()
    world.expect(key)
    assert {done.n for done in world.clients[key].done.values()} == {end}
    assert world.worker.computed < 20 + 5 * end + world.state.counters.surplus_tokens + 30
    world.idle()


@pytest.mark.parametrize("when", range(1, 5))
def test_a_prompt_retracted_before_its_choices_begin(when: int) -> None:
    """Or while the step that draws the first token is in flight, or after."""
    world = Orders(disable_overlap_schedule=True)
    key = world.submit([4] * 20, n=3, grammar=text(3, 4, 9), **LONG)
    for _ in range(when):
        world.turn()
    world.scheduler.advance()  # and no more: that is what is in flight when a step is planned
    retract(world.state, world.state.sequences[key].row)
    world.check()
    world.run()
    world.expect(key)
    world.idle()


def test_retraction_keeps_answers() -> None:
    """The worker rebuilds matchers from history, which clients compare with what they were told."""
    world = Orders(num_slots=100, context=90)
    keys = [
        world.submit([i + 2] * 8, grammar=text(i, 9), max_tokens=40, ignore_eos=True, seed=i)
        for i in range(8)
    ]
    world.run()
    for key in keys:
        world.expect(key)
    assert world.state.counters.retracted > 0
    world.idle()


# ---- forced text


@pytest.mark.parametrize("algorithm", ["auto", "radix", "ngram"])
def test_forced_text_is_drafted(algorithm: str) -> None:
    world = Orders(speculative_algorithm=algorithm)
    key = world.submit([5, 6, 7], grammar=text(1, 25, least=1000), **LONG)
    world.run()
    world.expect(key)
    done = world.clients[key].done[0]
    assert done.accepted == done.drafted >= 23
    assert len(world.steps) < 10
    world.idle()


def test_forced_text_is_not_drafted_where_nothing_is() -> None:
    world = Orders(speculative_algorithm="none")
    key = world.submit([5, 6, 7], grammar=text(1, 25, least=1000), **LONG)
    world.run()
    world.expect(key)
    assert world.clients[key].done[0].drafted == 0


def test_a_draft_that_reaches_the_end_is_cut_there() -> None:
    world = Orders()
    key = world.submit([5, 6, 7], grammar=text(1, 25, 12, least=12), **LONG)
    world.run()
    world.expect(key)
    done = world.clients[key].done[0]
    assert done.n == 12
    assert done.accepted == done.drafted > 0, "the last one is none that the worker drew beside the draft"
    world.idle()


def test_forced_text_that_gives_nothing_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the worker does not look at the drafts of a row whose matcher it has made anew."""
    draw = SimulatedWorker._draw
    monkeypatch.setattr(
        SimulatedWorker, "_draw", lambda self, row, values, drafts: draw(self, row, values[:1], [])
    )
    world = Orders(num_slots=2000, speculative_algorithm="radix")
    grammar = text(0, 160, least=1000)
    key = world.submit([5, 6, 7], grammar=grammar, ignore_eos=True, max_tokens=150)
    world.run()
    world.expect(key)
    assert 0 < sum(bool(step.drafts) for step in world.steps) <= 4


def test_the_budget_of_a_step_bounds_forced_text() -> None:
    world = Orders(chunked_prefill_size=8)
    key = world.submit([5, 6, 7], grammar=text(1, 25, least=1000), **LONG)
    world.run()
    world.expect(key)
    assert max(len(step.ids) // 4 for step in world.steps) <= 8
    assert world.clients[key].done[0].accepted > 10


def test_a_grammar_goes_through_submit_as_a_message() -> None:
    submit = Submit(1, 0, "r", messages.pack([5]), SamplingParams(), "", 0.0, Scheduling(), FREE)
    assert messages.decode(messages.encode([submit])) == [submit]
    assert make().speculative_algorithm == "auto"
