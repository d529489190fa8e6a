"""The real scheduler in front of a worker that only takes time, on a virtual clock.

What comes of it depends on the requests and the cost of steps alone: nothing is random, nothing is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood.srt import messages
from sapwood.srt.config import ModelSource, make
from sapwood.srt.messages import Admitted, Done, Step, StepResult, Submit, Tokens
from sapwood.srt.params import SamplingParams, Scheduling
from sapwood.srt.scheduler.loop import Scheduler, make_state

TOKEN = 3


@dataclass
class Cost:
    """Seconds of a step: `step` + `prompt` for each prompt token + `row` for each row that decodes."""

    step: float
    prompt: float
    row: float

    def of(self, prompt_tokens: int, decodes: int) -> float:
        return self.step + self.prompt * prompt_tokens + self.row * decodes


CPU = Cost(3e-3, 0.5e-3, 0.9e-3)
"""SmolLM2-135M in 4 bits on two cores (docs/steps.svg)."""
GPU = Cost(8e-3, 0.02e-3, 0.02e-3)
"""Of the size of an 8B model on one large accelerator: what matters is that a row costs next to nothing."""


@dataclass
class Served:
    """A request and when what came of it; times in seconds of the virtual clock."""

    ids: bytes
    max_tokens: int
    arrives: float = 0.0
    namespace: str = ""
    scheduling: Scheduling = field(default_factory=Scheduling)
    matched: int = -1
    admitted: float = -1.0
    first: float = -1.0
    done: float = -1.0

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4


class Virtual:
    """`run` serves requests; options are those of the configuration."""

    def __init__(self, num_slots: int, context: int, cost: Cost, **options: Any) -> None:
        config = make(**{"random_seed": 1, "speculative_algorithm": "none", **options})
        source = ModelSource(
            name="m", format="dummy", path="", files=[], architecture="LlamaForCausalLM", config={},
            vocab_size=2**31 - 1, context_length=context, eos_ids=[1], tokenizer_file=None,
            chat_template=None, template_vars={}, sampling_defaults={},
        )  # fmt: skip
        self.now = 0.0
        self.state = make_state(config, source, num_slots, lambda: self.now)
        self.scheduler = Scheduler(self.state, self._send)
        self.steps = 0
        self._cost = cost
        self._sent: deque[Step] = deque()
        self._ends = 0.0
        """When the worker is through with the oldest step sent."""
        self._takes = 0.0
        self._served: dict[int, Served] = {}

    def run(
        self, requests: Sequence[Served], every: Callable[[], None] | None = None, until: float = float("inf")
    ) -> float:
        """Serve all, or until that time; returns the virtual seconds. `every` is called after each step."""
        arriving = deque(sorted(requests, key=lambda r: r.arrives))
        while self.now < until:
            while arriving and arriving[0].arrives <= self.now:
                self._submit(arriving.popleft())
            self.scheduler.advance()
            self._collect()
            if self._sent and (not arriving or self._ends <= arriving[0].arrives):
                self.now = max(self.now, self._ends)
                self._answer()
                if every is not None:
                    every()
            elif arriving:
                self.now = arriving[0].arrives
            else:
                break
        return self.now

    def _submit(self, request: Served) -> None:
        key = len(self._served) + 1
        self._served[key] = request
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, seed=1)
        self.scheduler.handle(
            Submit(
                key, 0, str(key), request.ids, params, request.namespace, request.arrives, request.scheduling
            )
        )
        self._collect()

    def _send(self, step: Step) -> bool:
        self._sent.append(step)
        if len(self._sent) == 1:
            self._begin()
        return True

    def _begin(self) -> None:
        step = self._sent[0]
        counts, ids = messages.unpack(step.counts), messages.unpack(step.ids)
        decodes = int((ids < 0).sum())
        self._takes = self._cost.of(int(counts.sum()) - decodes, decodes)
        self._ends = self.now + self._takes

    def _answer(self) -> None:
        step = self._sent.popleft()
        self.steps += 1
        drawn = int(messages.unpack(step.samples).sum())
        result = StepResult(step.number, messages.pack(np.full(drawn, TOKEN)), {}, [], self._takes)
        if self._sent:
            self._begin()
        self.scheduler.handle(result)
        self._collect()

    def _collect(self) -> None:
        outgoing, self.state.outgoing = self.state.outgoing, {}
        for message in outgoing.get(0, []):
            if isinstance(message, Tokens):
                for key in np.frombuffer(message.keys, "<i8").tolist():
                    served = self._served[key]
                    if served.first < 0:
                        served.first = self.now
            elif isinstance(message, Admitted):
                served = self._served[message.key]
                served.matched, served.admitted = message.verdict.matched, self.now
            elif isinstance(message, Done):
                assert message.error is None, message.error
                self._served[message.key].done = self.now
