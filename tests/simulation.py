"""A simulated worker and client around the real scheduler, on no clock: what tests drive it with.

The worker's "model" is a hash chain. A slot holds the chain value of the prefix that ends in its token, and
the next token is a function of that value, the seed, the choice and the position. So a wrong, stale or
shared-by-mistake slot gives wrong tokens, as in a real model; `expected` is the answer without a scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.config import Config, ModelSource, make
from sapwood.srt.messages import (
    Admitted,
    Answer,
    Ask,
    Cancel,
    Done,
    PromptRead,
    Refused,
    RowRead,
    RowStart,
    Step,
    StepResult,
    StopAt,
    Submit,
    TokenLogprob,
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


def fake_logprob(value: int, token: int) -> float:
    """What is told of a token that comes after the prefix of that chain value."""
    return -float(((value ^ token * 0x9E3779B9) >> 7) % 1_000_003)


def expected_reads(prompt: list[int], params: SamplingParams) -> tuple[dict[int, float], bytes]:
    """The values of the prompt's tokens by index, and what is pooled, computed plainly."""
    values = [0]
    for token in prompt:
        values.append(chain(values[-1], token))
    if params.pooling is not None:
        return {}, pooled(params.pooling, values[1:])
    start = len(prompt) if params.logprob_start is None else max(1, params.logprob_start)
    return {i: fake_logprob(values[i], prompt[i]) for i in range(start, len(prompt))}, b""


def pooled(how: str, values: list[int]) -> bytes:
    return (values[-1] if how == "last" else sum(values)).to_bytes(16, "little")


def check_shared(step: Step, table: npt.NDArray[Any]) -> None:
    """The step's stretches are of whole tiles that lie before the rows' new tokens, in the same slots of
    `table` for all of a stretch's rows; and they are all that there are, each for as many rows as can be."""
    rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
    shared = messages.unpack(step.shared).tolist()
    named: dict[tuple[int, int], list[int]] = {}
    while shared:
        begin, end, n = shared[:3]
        members, shared = shared[3 : 3 + n], shared[3 + n :]
        assert len(members) == n >= 2
        assert members == sorted(set(members)), "not the indices of rows, each once"
        assert 0 <= begin < end
        assert begin % 64 == end % 64 == 0
        for i in members:
            assert end <= starts[i], "a row shares what it has not computed"
            assert np.array_equal(table[rows[i], begin:end], table[rows[members[0]], begin:end])
            for tile in range(begin // 64, end // 64):
                assert tile == 0 or (i, tile - 1) in named, "a stretch comes before the one above it"
                assert (i, tile) not in named, "a row has a tile in two stretches"
                named[i, tile] = members
    for tile in range(max(starts) // 64):
        end = 64 * (tile + 1)
        alike: dict[bytes, list[int]] = {}
        for i, row in enumerate(rows):
            if end <= starts[i]:
                alike.setdefault(table[row, :end].tobytes(), []).append(i)
        for members in alike.values():
            for i in members:
                assert named.get((i, tile), [i]) == members, (i, tile)


class SimulatedWorker:
    """Checks each Step as it runs it: rows, positions and slots must fit what came before."""

    def __init__(self, num_slots: int, rows: int, max_tokens: int) -> None:
        self.content = [0] * num_slots
        self.table = np.zeros((rows, max_tokens + 2), dtype=np.int64)
        self.starts: dict[int, Any] = {}
        self.last: dict[int, int] = {}
        self.unread: dict[int, int] = {}
        """By row: the next prompt index to be told."""
        self.sums: dict[int, list[int]] = {}
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
            self._admit_reading(start)
            prefix = messages.unpack(start.prefix)
            self.table[start.row, : len(prefix)] = prefix
        rows, starts = messages.unpack(step.rows), messages.unpack(step.starts)
        counts, samples = messages.unpack(step.counts), messages.unpack(step.samples)
        assert len(set(rows.tolist())) == len(rows)
        check_shared(step, self.table)
        ids, slots = messages.unpack(step.ids), messages.unpack(step.slots)
        assert len(set(slots.tolist())) == len(slots), "a slot was given to two tokens"
        sampled: list[int] = []
        errors = []
        reads = []
        at = 0
        for row, first, count, wanted in zip(rows, starts, counts, samples, strict=True):
            value = 0 if first == 0 else self.content[self.table[row, first - 1]]
            values = []
            for k in range(count):
                token = int(ids[at])
                if token < 0:
                    assert count == 1
                    token = self.last[int(row)]
                value = chain(value, token)
                values.append(value)
                self.content[slots[at]] = value
                self.table[row, first + k] = slots[at]
                at += 1
                self.computed += 1
            begun = self.starts[int(row)]
            new = [draw(value, begun.seed, begun.choice + c, int(first + count)) for c in range(int(wanted))]
            if new:
                self.last[int(row)] = new[0]
            sampled += new
            reads += self._read(int(row), int(first), values)
            if int(row) in self.fail_rows:
                errors.append(
                    messages.RowError(int(row), messages.ErrorInfo(500, "server_error", "x", "bad"))
                )
        return StepResult(step.number, messages.pack(sampled), {}, errors, 0.001, reads)

    def _admit_reading(self, start: RowStart) -> None:
        params, matched = start.params, len(start.prefix) // 4
        self.unread[start.row] = start.read_from
        self.sums[start.row] = []
        if start.read_from >= 0:
            assert params.logprob_start is not None
            assert matched < start.read_from, "a position that is read came from the cache"
        if params.pooling == "mean":
            assert matched == 0, "a mean began in the middle"

    def _read(self, row: int, first: int, values: list[int]) -> list[RowRead]:
        """What the chunk whose chain values these are gives of its row's prompt."""
        start, told = self.starts[row], self.unread[row]
        reads = []
        end = min(first + len(values) + 1, start.prompt_len)
        if 0 <= told < end:
            prompt = messages.unpack(start.history).tolist()
            got = [
                TokenLogprob(prompt[i], fake_logprob(values[i - 1 - first], prompt[i]))
                for i in range(told, end)
            ]
            reads.append(RowRead(row, told, got))
            self.unread[row] = end
        if start.params.pooling is not None:
            self.sums[row] += values
            if first + len(values) == start.prompt_len:
                reads.append(RowRead(row, pooled=pooled(start.params.pooling, self.sums[row])))
        return reads


@dataclass
class Client:
    """What a client has seen of one request."""

    submit: Submit
    admitted: Admitted | None = None
    refused: Refused | None = None
    output: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    reads: dict[int, TokenLogprob] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    pooled: bytes = b""

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
        self.worker = SimulatedWorker(num_slots, config.max_running_requests, context)
        self.begin(config, source, num_slots, self.worker.run)

    def begin(
        self, config: Config, source: ModelSource, num_slots: int, run: Callable[[Step], StepResult]
    ) -> None:
        """An empty scheduler for the model, in front of a worker that answers a step by `run`."""
        self.source = source
        self.state = make_state(config, source, num_slots)
        self.sent: deque[Step] = deque()
        self.run_step = run
        self.scheduler = Scheduler(self.state, self._send)
        self.clients: dict[int, Client] = {}
        self.steps: list[Step] = []
        self._key = 0

    def _send(self, step: Step) -> bool:
        for start in step.admitted:
            self._check_history(start)
        # Through the codec, as between processes.
        self.sent.append(messages.decode(messages.encode([step]))[0])
        self.steps.append(step)
        return True

    def _check_history(self, start: RowStart) -> None:
        """What the worker is told of a row's tokens is the prompt and what the client has of the output."""
        client = self.clients[int(self.state.rows.key[start.row]) - start.choice]
        assert len(client.submit.ids) // 4 == start.prompt_len
        if start.params.penalised or start.read_from >= 0:
            output = client.output.get(start.choice, [])
            assert start.history == client.submit.ids + messages.pack(output), "another history"
        else:
            assert not start.history

    def submit(self, prompt: list[int], namespace: str = "", **params: Any) -> int:
        checked = SamplingParams(**{"max_tokens": 8, "seed": 5, **params}).check(self.source.vocab_size)
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
            self.scheduler.handle(self.run_step(self.sent.popleft()))
            self.collect()

    def turn(self, check: bool = True) -> None:
        self.scheduler.advance()
        self.collect()
        self.answer()
        if check:
            self.check()

    def check(self) -> None:
        """What holds between any two turns: each slot and each who waits is in one place, and told and untold
        values add up."""
        self.state.check()
        for key, request in self.state.requests.items():
            params = request.params
            if params.logprob_start is None:
                continue
            first, end = max(1, params.logprob_start), len(request.prompt)
            told = len(self.clients[key].reads)
            assert request.reads_from == (first + told - 1 if first + told < end else -1)

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
            for i, (key, token) in enumerate(
                zip(keys.tolist(), messages.unpack(message.ids).tolist(), strict=True)
            ):
                base = max(k for k in self.clients if k <= key)
                client = self.clients[base]
                assert key - base not in client.done, "a token after Done"
                client.output.setdefault(key - base, []).append(token)
                if i in message.logprobs:
                    client.logprobs.setdefault(key - base, []).append(message.logprobs[i])
            return
        if isinstance(message, Answer):
            assert message.error is None
            return
        client = self.clients[message.key]
        if isinstance(message, Admitted):
            assert client.admitted is None
            client.admitted = message
        elif isinstance(message, PromptRead):
            assert client.admitted is not None
            assert not client.output, "a prompt's values after its output"
            self._take_read(client, message)
        elif isinstance(message, Refused):
            assert not client.finished
            client.refused = message
        elif isinstance(message, Done):
            assert message.choice not in client.done, "two terminal messages"
            client.done[message.choice] = message
            client.output.setdefault(message.choice, [])

    @staticmethod
    def _take_read(client: Client, message: PromptRead) -> None:
        prompt = messages.unpack(client.submit.ids)
        for i, value in enumerate(message.logprobs, message.start):
            assert i not in client.reads, "a value was told twice"
            assert not client.reads or i - 1 in client.reads, "a value was left out"
            assert value.id == prompt[i]
            client.reads[i] = value
        if message.pooled:
            assert not client.pooled, "two hidden states"
            client.pooled = message.pooled

    def expect(self, key: int, cut: Mapping[int, int | None] | None = None) -> None:
        """The client's answer is what the plain recurrence gives.

        `cut` holds the choices that were cut while they ran, with the output token at which they were
        stopped (None: cancelled); all others are whole.
        """
        client, cut = self.clients[key], cut or {}
        params = client.submit.params
        assert client.refused is None
        assert client.finished
        assert params.seed is not None
        prompt = messages.unpack(client.submit.ids).tolist()
        room = self.state.max_request_tokens - len(prompt)
        for choice in range(params.n):
            want = expected(prompt, params, params.seed, choice, room)
            output, done = client.output[choice], client.done[choice]
            assert output == want[: len(output)], (key, choice)
            if choice not in cut:
                assert (len(output), done.n) == (len(want), len(want)), (key, choice)
                continue
            stopped_at = cut[choice]
            assert done.reason == ("abort" if stopped_at is None else "stop"), (key, choice)
            assert done.n == (len(output) if stopped_at is None else stopped_at) <= len(output), (key, choice)
        reads = {i: value.logprob for i, value in client.reads.items()}
        values, state = expected_reads(prompt, params)
        if None not in cut.values():
            assert (reads, client.pooled) == (values, state), key
        else:
            assert reads.items() <= values.items(), key
            assert client.pooled in (b"", state), key

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
