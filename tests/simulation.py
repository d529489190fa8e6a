"""A simulated worker and client around the real scheduler, on no clock: what tests drive it with.

The worker's "model" is a hash chain. A slot holds the chain value of the prefix that ends in its token, and
the next token is a function of that value, the seed, the choice and the position. So a wrong, stale or
shared-by-mistake slot gives wrong tokens, as in a real model; `expected` is the answer without a scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sapwood.srt import messages
from sapwood.srt.config import ModelSource, make
from sapwood.srt.messages import (
    Admitted,
    Answer,
    Ask,
    Cancel,
    Done,
    Refused,
    Step,
    StepResult,
    StopAt,
    Submit,
    Tokens,
)
from sapwood.srt.params import SamplingParams
from sapwood.srt.scheduler.loop import Scheduler, make_state

VOCAB = 50
EOS = 1
MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 7) & MASK


def draw(value: int, seed: int, choice: int, position: int) -> int:
    mixed = (value ^ (seed * 31 + choice * 17 + position * 13)) * 0x9E3779B97F4A7C15 & MASK
    return int((mixed >> 20) % VOCAB)


def expected(prompt: list[int], params: SamplingParams, seed: int, choice: int, room: int) -> list[int]:
    """The output tokens of a choice, computed plainly."""
    value = 0
    for token in prompt:
        value = chain(value, token)
    output: list[int] = []
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    while len(output) < limit:
        token = draw(value, seed, choice, len(prompt) + len(output))
        output.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            break
        value = chain(value, token)
    return output


class SimulatedWorker:
    """Checks each Step as it runs it: rows, positions and slots must fit what came before."""

    def __init__(self, num_slots: int, rows: int, max_tokens: int) -> None:
        self.content = [0] * num_slots
        self.table = np.zeros((rows, max_tokens + 2), dtype=np.int64)
        self.starts: dict[int, Any] = {}
        self.last: dict[int, int] = {}
        self.computed = 0
        self.number = 0
        self.fail_rows: set[int] = set()

    def run(self, step: Step) -> StepResult:
        assert step.number == self.number
        self.number += 1
        for row in messages.unpack(step.released):
            del self.starts[int(row)]
        for start in step.admitted:
            assert start.row not in self.starts, "a row was admitted twice"
            self.starts[start.row] = start
            prefix = messages.unpack(start.prefix)
            self.table[start.row, : len(prefix)] = prefix
        rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
        counts, samples = messages.unpack(step.counts), messages.unpack(step.samples)
        assert len(set(rows.tolist())) == len(rows)
        ids, slots = messages.unpack(step.ids), messages.unpack(step.slots)
        assert len(set(slots.tolist())) == len(slots), "a slot was given to two tokens"
        sampled: list[int] = []
        errors = []
        at = 0
        for row, first, count, wanted in zip(rows, starts, counts, samples, strict=True):
            value = 0 if first == 0 else self.content[self.table[row, first - 1]]
            for k in range(count):
                token = int(ids[at])
                if token < 0:
                    assert count == 1
                    token = self.last[int(row)]
                value = chain(value, token)
                self.content[slots[at]] = value
                self.table[row, first + k] = slots[at]
                at += 1
                self.computed += 1
            begun = self.starts[int(row)]
            new = [draw(value, begun.seed, begun.choice + c, int(first + count)) for c in range(int(wanted))]
            if new:
                self.last[int(row)] = new[0]
            sampled += new
            if int(row) in self.fail_rows:
                errors.append(
                    messages.RowError(int(row), messages.ErrorInfo(500, "server_error", "x", "bad"))
                )
        return StepResult(step.number, messages.pack(sampled), {}, errors, 0.001)


@dataclass
class Client:
    """What a client has seen of one request."""

    submit: Submit
    admitted: Admitted | None = None
    refused: Refused | None = None
    output: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.refused is not None or len(self.done) == self.submit.params.n


class World:
    """Scheduler, worker and clients. `turn` does one exchange; steps are answered in order."""

    def __init__(self, num_slots: int = 256, context: int = 200, **options: Any) -> None:
        config = make(**{"max_running_requests": 8, "chunked_prefill_size": 16, "random_seed": 1, **options})
        source = ModelSource(
            name="m", format="dummy", path="", files=[], architecture="LlamaForCausalLM", config={},
            vocab_size=VOCAB, context_length=context, eos_ids=[EOS], tokenizer_file=None,
            chat_template=None, template_vars={}, sampling_defaults={},
        )  # fmt: skip
        self.state = make_state(config, source, num_slots)
        self.sent: deque[Step] = deque()
        self.worker = SimulatedWorker(num_slots, config.max_running_requests, context)
        self.scheduler = Scheduler(self.state, self._send)
        self.clients: dict[int, Client] = {}
        self.steps: list[Step] = []
        self._key = 0

    def _send(self, step: Step) -> bool:
        # Through the codec, as between processes.
        self.sent.append(messages.decode(messages.encode([step]))[0])
        self.steps.append(step)
        return True

    def submit(self, prompt: list[int], namespace: str = "", **params: Any) -> int:
        checked = SamplingParams(**{"max_tokens": 8, "seed": 5, **params}).check(VOCAB)
        key, self._key = self._key, self._key + checked.n
        message = Submit(key, 0, f"r{key}", messages.pack(prompt), checked, namespace, 0.0)
        self.clients[key] = Client(message)
        self.scheduler.handle(message)
        return key

    def stop_at(self, key: int, choice: int, n: int) -> None:
        self.scheduler.handle(StopAt(key, choice, n))
        self.collect()

    def cancel(self, key: int) -> None:
        self.scheduler.handle(Cancel(key))
        self.collect()

    def ask(self, what: Literal["flush", "state", "check"]) -> None:
        self.scheduler.handle(Ask(1, what))
        self.collect()

    def answer(self) -> None:
        """The worker runs the oldest step sent."""
        if self.sent:
            self.scheduler.handle(self.worker.run(self.sent.popleft()))
            self.collect()

    def turn(self, check: bool = True) -> None:
        self.scheduler.advance()
        self.collect()
        self.answer()
        if check:
            self.state.check()

    def run(self, turns: int = 10_000, check: bool = True) -> None:
        """Until nothing is left to do; fails if it takes more than `turns`."""
        for _ in range(turns):
            self.turn(check)
            if not self.sent and not self.state.requests:
                return
        raise AssertionError(f"not done after {turns} turns: {self.state.stats()}")

    def collect(self) -> None:
        outgoing, self.state.outgoing = self.state.outgoing, {}
        for message in outgoing.get(0, []):
            self._receive(message)

    def _receive(self, message: Any) -> None:
        if isinstance(message, Tokens):
            keys = np.frombuffer(message.keys, dtype="<i8")
            for key, token in zip(keys.tolist(), messages.unpack(message.ids).tolist(), strict=True):
                base = max(k for k in self.clients if k <= key)
                client = self.clients[base]
                assert key - base not in client.done, "a token after Done"
                client.output.setdefault(key - base, []).append(token)
            return
        if isinstance(message, Answer):
            assert message.error is None
            return
        client = self.clients[message.key]
        if isinstance(message, Admitted):
            assert client.admitted is None
            client.admitted = message
        elif isinstance(message, Refused):
            assert not client.finished
            client.refused = message
        elif isinstance(message, Done):
            assert message.choice not in client.done, "two terminal messages"
            client.done[message.choice] = message
            client.output.setdefault(message.choice, [])

    def expect(self, key: int) -> None:
        """The client's whole answer is what the plain recurrence gives."""
        client = self.clients[key]
        params = client.submit.params
        assert client.refused is None
        assert client.finished
        assert params.seed is not None
        prompt = messages.unpack(client.submit.ids).tolist()
        room = self.state.max_request_tokens - len(prompt)
        for choice in range(params.n):
            want = expected(prompt, params, params.seed, choice, room)
            assert client.output[choice] == want, (key, choice)
            assert client.done[choice].n == len(want)

    def idle(self) -> None:
        """Nothing runs, nothing waits, and every slot is free or cached."""
        state = self.state
        state.check()
        assert not state.requests
        assert not state.sequences
        assert not state.waiting
        assert state.rows.num_active == 0
        assert state.reserved_rows == 0
        assert state.pool.num_free + state.tree.cached_tokens == state.pool.total
        assert state.tree.evictable_tokens == state.tree.cached_tokens


def random_prompt(rng: random.Random, families: list[list[int]], longest: int) -> list[int]:
    """A prompt that shares a prefix with its family, as real traffic does."""
    base = rng.choice(families)
    shared = base[: rng.randint(0, len(base))]
    own = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))]
    return (shared + own)[:longest]
