"""Scheduler, worker and clients on no clock: what tests of single promises drive turn by turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sapwood.srt import messages
from sapwood.srt.config import Config, ModelSource, make
from sapwood.srt.messages import (
    Answer,
    Ask,
    Cancel,
    DropGrammars,
    Grammar,
    LoadGrammar,
    Step,
    StepResult,
    StopAt,
    Submit,
)
from sapwood.srt.params import SamplingParams, Scheduling
from sapwood.srt.scheduler.loop import Scheduler, make_state
from tests.simulation.clients import Clients
from tests.simulation.worker import EOS, VOCAB, SimulatedWorker, expected, expected_reads


def model(context: int) -> ModelSource:
    """What a scheduler knows of the simulated worker's model."""
    return ModelSource(
        name="m", format="dummy", path="", files=[], architecture="LlamaForCausalLM", config={},
        vocab_size=VOCAB, context_length=context, eos_ids=[EOS], tokenizer_file=None,
        chat_template=None, template_vars={}, sampling_defaults={},
    )  # fmt: skip


class World:
    """Scheduler, worker and clients. `turn` does one exchange; steps are answered in order."""

    def __init__(self, num_slots: int = 256, context: int = 200, **options: Any) -> None:
        config = make(**{"max_running_requests": 8, "chunked_prefill_size": 16, "random_seed": 1, **options})
        self.worker = SimulatedWorker(num_slots, config.on("cpu").rows, context)
        self.begin(config, model(context), num_slots, self.worker.run)

    def begin(
        self, config: Config, source: ModelSource, num_slots: int, run: Callable[[Step], StepResult]
    ) -> None:
        """An empty scheduler for the model, in front of a worker that answers a step by `run`."""
        self.source = source
        self.state = make_state(config, source, num_slots)
        self.sent: deque[Any] = deque()
        self.loads: deque[LoadGrammar] = deque()
        """Grammars that the worker has been told to load."""
        self.loads_wait = False
        self.run_step = run
        self.scheduler = Scheduler(self.state, self._send)
        self.clients = Clients()
        self.steps: list[Step] = []
        self._key = 0

    def _send(self, step: Any) -> bool:
        if not isinstance(step, Step):
            self.sent.append(messages.decode(messages.encode([step]))[0])
            return True
        for start in step.admitted:
            client, choice = self.clients.choices[int(self.state.rows.key[start.row])]
            assert choice == start.choice
            client.check_start(start)
        # Through the codec, as between processes.
        self.sent.append(messages.decode(messages.encode([step]))[0])
        self.steps.append(step)
        return True

    def submit(
        self,
        prompt: list[int],
        namespace: str = "",
        scheduling: Scheduling | None = None,
        grammar: Grammar | None = None,
        **params: Any,
    ) -> int:
        checked = SamplingParams(**{"max_tokens": 8, "seed": 5, **params}).check(self.source.vocab_size)
        key, self._key = self._key, self._key + checked.n
        ids, wanted = messages.pack(prompt), scheduling or Scheduling()
        message = Submit(key, 0, f"r{key}", ids, checked, namespace, 0.0, wanted, grammar)
        self.clients.open(message)
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
        """The worker runs the oldest step sent, and loads grammars unless they are to wait."""
        while self.sent and not isinstance(self.sent[0], Step):
            order = self.sent.popleft()
            if isinstance(order, LoadGrammar):
                self.loads.append(order)
            else:
                assert isinstance(order, DropGrammars)
                self.worker.drop(order)
        if not self.loads_wait:
            self.load()
        if self.sent:
            self.scheduler.handle(self.run_step(self.sent.popleft()))
            self.collect()

    def load(self) -> None:
        """The worker loads all the grammars that it has been told to."""
        while self.loads:
            loaded = self.worker.load(self.loads.popleft())
            if loaded is not None:
                self.scheduler.handle(loaded)
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
            first, end = max(1, params.logprob_start), request.sent
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
            if isinstance(message, Answer):
                assert message.error is None
            else:
                self.clients.tell(message)

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
        prompt = client.prompt
        room = self.state.max_request_tokens - len(prompt)
        for choice in range(params.n):
            want = expected(prompt, params, params.seed, choice, room, client.submit.grammar)
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
