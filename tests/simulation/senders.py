"""Tokenizers and the clients behind them: all messages of one request go through one of them, in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from sapwood.srt import messages
from sapwood.srt.messages import Answer, Ask, Cancel, Done, IdsPrompt, Refused, StopAt, Submit, Tokens
from sapwood.srt.namespaces import LISTED
from tests.simulation.answers import Asked, check_answer
from tests.simulation.clients import Clients, tokens_of
from tests.simulation.clock import Channel, Clock
from tests.simulation.scenario import STEP, Abort, AboutProgram, Arrival, Scenario

KEYS = 1 << 40
"""The first key of each tokenizer is a multiple, plus 1."""
LATEST = STEP / 10
"""A scheduler is busy for so long at most before it sees that a deadline is over."""
INSTANT = 1e-9


class Senders:
    """Sends what the scenario says when it says so; sees stop strings, hang-ups and ends."""

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        clients: Clients,
        channel: Callable[[Callable[[bytes], None]], Channel],
        take: Callable[[Any], None],
    ) -> None:
        self.asked: dict[int, Asked] = {}
        """By key."""
        self.tokens = 0
        self._scenario = scenario
        self._clock = clock
        self._clients = clients
        self._rng = random.Random(scenario.seed ^ 0x7075)
        self._by_place: dict[int, Asked] = {}
        self._next_key = [KEYS * i + 1 for i in range(scenario.shape.tokenizers)]
        self.inboxes = [channel(self._receive) for _ in self._next_key]
        self._outboxes = [channel(lambda frame: take(*messages.decode(frame))) for _ in self._next_key]
        self._listing: set[int] = set()
        """Places of the prefixes that are not listed yet."""
        self._calls: dict[int, str | AboutProgram] = {}
        self._answered: set[int] = set()

    def begin(self) -> None:
        """List prefixes, if there are any; all else comes when that is done."""
        arrivals = self._scenario.arrivals
        self._listing = {i for i, arrival in enumerate(arrivals) if arrival.namespace == LISTED}
        for place in sorted(self._listing):
            self._arrive(place)
        if not self._listing:
            self._serve()

    def _serve(self) -> None:
        """Say when what comes."""
        clock, scenario = self._clock, self._scenario
        begin = clock.now
        for place, arrival in enumerate(scenario.arrivals):
            if arrival.namespace != LISTED:
                clock.at(begin + arrival.at, partial(self._arrive, place))
        for when, what in scenario.questions:
            clock.at(begin + when, partial(self._ask, what))
        if scenario.shape.drain and scenario.arrivals:
            clock.at(begin + scenario.arrivals[-1].at + 10 * STEP, self._drain)

    # ---- what the scheduler does

    def taken_in(self, message: Submit, limit: int) -> None:
        """It takes the request in, which may have `limit` tokens."""
        asked = self.asked[message.key]
        asked.limit, asked.taken_in = limit, self._clock.now

    def resized(self, limit: int) -> None:
        """Requests that have never run may have `limit` tokens from now on."""
        for asked in self.asked.values():
            if asked.client.admitted is None and not asked.client.finished:
                asked.limit = limit

    def lost(self) -> None:
        """The worker has died, or the scheduler has begun anew."""
        for asked in self.asked.values():
            asked.lost |= not asked.client.finished

    def failed(self, message: Done) -> None:
        """It ends a choice with an error; here: neither too early nor too late for a deadline."""
        asked, now = self.asked[message.key], self._clock.now
        if message.error is not None and message.error.code == "queue_timeout":
            assert asked.patience is not None, f"{asked.client.submit.rid} has no deadline"
            over = asked.client.submit.arrived + asked.patience
            assert over - INSTANT <= now, "ended before its deadline"
            assert now <= max(over, asked.taken_in) + LATEST + INSTANT, "its deadline is long over"

    def answered(self, message: Answer) -> bool:
        """It answers a question; whether that is about a program."""
        what = self._calls[message.call]
        assert message.call not in self._answered, "two answers"
        self._answered.add(message.call)
        if isinstance(what, AboutProgram):
            return True
        assert (message.error is not None) == (what == "tokenize"), f"{what}: {message.error}"
        return False

    def check_over(self) -> None:
        """Every request has ended, and every question was answered."""
        for asked in self.asked.values():
            assert asked.client.finished, f"{asked.client.submit.rid} never ended"
            assert asked.over, "a terminal message did not arrive"
        assert self._answered == set(self._calls), "a question was not answered"

    # ---- what clients do

    def _arrive(self, place: int) -> None:
        arrival = self._scenario.arrivals[place]
        tokenizer, params, abort = arrival.tokenizer, arrival.params, arrival.abort
        key = self._next_key[tokenizer]
        self._next_key[tokenizer] += params.n
        ids, now = messages.pack(self._prompt(arrival)), self._clock.now
        submit = Submit(
            key,
            tokenizer,
            f"r{place}",
            ids,
            params,
            arrival.namespace,
            now,
            arrival.scheduling,
            arrival.grammar,
        )
        asked = Asked(arrival, self._clients.open(submit))
        asked.patience = self._patience(arrival)
        self.asked[key] = self._by_place[place] = asked
        if abort is not None and abort.when == "overtaking":
            self._cancel(asked, abort)
        self._send(tokenizer, submit)
        if abort is not None and abort.when == "timed":
            self._clock.after(abort.after, lambda: self._cancel(asked, abort))

    def _patience(self, arrival: Arrival) -> float | None:
        """How long it may wait; for what is listed the server itself waits."""
        options = self._scenario.shape.options
        if arrival.namespace == LISTED and not options.get("disable_radix_cache"):
            return None
        limits = (arrival.scheduling.queue_timeout, options.get("queue_timeout"))
        return min((each for each in limits if each is not None), default=None)

    def _prompt(self, arrival: Arrival) -> list[int]:
        """The next turn of a chat has what is known of the last one now, which may still run."""
        before = self._by_place.get(arrival.follows)
        if before is None:
            return arrival.prompt
        shape = self._scenario.shape
        turns = [*before.client.prompt, *before.client.output.get(0, [])[: before.seen.get(0, 0)]]
        return [*turns, *arrival.prompt][: min(shape.context, shape.num_slots)]

    def _send(self, tokenizer: int, message: Any) -> None:
        self._outboxes[tokenizer].send(messages.encode([message]))

    def _cancel(self, asked: Asked, abort: Abort | None = None) -> None:
        asked.cancelled = True
        key, tokenizer = asked.client.submit.key, asked.client.submit.tokenizer
        for _ in range(2 if abort is not None and abort.twice else 1):
            self._send(tokenizer, Cancel(key))

    def _drain(self) -> None:
        """The server ends: what still runs is cut."""
        for asked in self._by_place.values():
            if not asked.over:
                self._cancel(asked)

    # ---- what tokenizers hear

    def _receive(self, frame: bytes) -> None:
        for message in messages.decode(frame):
            if isinstance(message, Tokens):
                for key, _ in tokens_of(message):
                    self._token(key)
            elif not isinstance(message, Answer):
                self._hear(message)

    def _token(self, key: int) -> None:
        client, choice = self._clients.choices[key]
        asked = self.asked[client.submit.key]
        seen = asked.seen[choice] = asked.seen.get(choice, 0) + 1
        self.tokens += 1
        arrival, tokenizer = asked.arrival, client.submit.tokenizer
        if arrival.stops.get(choice) == seen:
            asked.stopped[choice] = seen
            for _ in range(2 if arrival.echo_stop else 1):
                self._send(tokenizer, StopAt(client.submit.key, choice, seen))
        abort = arrival.abort
        if abort is not None and abort.when == "token" and abort.after == seen and choice == 0:
            self._cancel(asked, abort)

    def _hear(self, message: Any) -> None:
        asked = self.asked[message.key]
        arrival, abort = asked.arrival, asked.arrival.abort
        if not isinstance(message, Done | Refused):
            if abort is not None and abort.when == "admitted":
                self._clock.after(abort.after if abort.twice else 0.0, lambda: self._cancel(asked, abort))
            return
        asked.ends += 1
        if not asked.over:
            return
        check_answer(asked)
        place = int(asked.client.submit.rid[1:])
        if place in self._listing:
            self._listing.remove(place)
            if not self._listing:
                self._serve()
        if abort is not None and abort.when == "ended":
            self._cancel(asked, abort)
            tokenizer, key = asked.client.submit.tokenizer, asked.client.submit.key
            self._send(tokenizer, StopAt(key, self._rng.randrange(arrival.params.n), self._rng.randint(1, 9)))
            self._send(tokenizer, StopAt(KEYS * 999 + key, 0, 1))

    def _ask(self, what: Any) -> None:
        call, rng = len(self._calls), self._rng
        self._calls[call] = what
        if isinstance(what, AboutProgram):
            options = {"program": what.name, "tenant": what.tenant, "end": what.end}
            self._send(0, Ask(call, "program", 0, None, what.namespace, options))
            return
        options: dict[str, Any] = {}
        prompt, namespace = None, ""
        if what == "explain":
            places = list(self._by_place.values())
            ids = rng.choice(places).client.submit.ids if places else messages.pack([2, 3])
            prompt = IdsPrompt(ids[: 4 * rng.randint(1, len(ids) // 4)])
            options = {"reveal": rng.random() < 0.5}
            namespace = rng.choice(self._scenario.shape.namespaces)
        elif what == "tree":
            options = {"depth": rng.randint(0, 5), "limit": rng.randint(1, 9)}
        self._send(0, Ask(call, what, 0, prompt, namespace, options))
