"""Scheduler, worker and clients on a clock that a test moves, with requests that say their programs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sapwood.srt import messages
from sapwood.srt.messages import Answer, Ask
from sapwood.srt.params import Scheduling
from tests.simulation.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class ProgramWorld(World):
    """A world whose requests may say their programs, with a clock of its own; `computed` counts the positions
    that the worker has computed for each program, from the steps alone."""

    def __init__(self, num_slots: int = 512, **options: Any) -> None:
        super().__init__(num_slots, **{"speculative_algorithm": "none", **options})
        self.time = Clock()
        self.state.clock = self.state.programs._clock = self.time
        self.computed: Counter[str] = Counter()
        self.asked: list[Answer] = []
        run = self.run_step

        def counting(step: messages.Step) -> messages.StepResult:
            rows, counts = messages.unpack(step.rows).tolist(), messages.unpack(step.counts).tolist()
            for row, count in zip(rows, counts, strict=True):
                self.computed[self.whose[step.number, row]] += count
            return run(step)

        self.whose: dict[tuple[int, int], str] = {}
        self.run_step = counting

    def _send(self, step: Any) -> bool:
        if isinstance(step, messages.Step):
            for row in messages.unpack(step.rows).tolist():
                client, _ = self.clients.choices[int(self.state.rows.key[row])]
                self.whose[step.number, row] = client.submit.scheduling.program
        return super()._send(step)

    def call(self, prompt: list[int], program: str = "p", **more: Any) -> int:
        place = {name: more.pop(name) for name in ("tenant", "keep", "priority") if name in more}
        return self.submit(prompt, scheduling=Scheduling(program=program, **place), **more)

    def done(self, prompt: list[int], program: str = "p", **more: Any) -> list[int]:
        """Run a request to its end; prompt and output."""
        key = self.call(prompt, program, **more)
        self.run()
        return [*prompt, *self.clients[key].output[0]]

    def collect(self) -> None:
        for message in self.state.outgoing.get(0, []):
            if isinstance(message, Answer):
                self.asked.append(message)
        kept = [m for m in self.state.outgoing.get(0, []) if not isinstance(m, Answer)]
        self.state.outgoing[0] = kept
        super().collect()

    def question(self, program: str = "p", **options: Any) -> None:
        namespace = options.pop("namespace", "")
        self.scheduler.handle(Ask(7, "program", 0, None, namespace, {"program": program, **options}))
        self.collect()

    def told(self, program: str = "p", **options: Any) -> dict[str, Any]:
        """What is told of a program at once."""
        before = len(self.asked)
        self.question(program, **options)
        assert len(self.asked) == before + 1
        answer = self.asked[-1]
        if answer.error is not None:
            raise LookupError(answer.error.code)
        return answer.data

    def end(self, program: str = "p", **options: Any) -> dict[str, Any]:
        return self.told(program, end=True, **options)

    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.scheduler.advance()
        self.collect()
        self.check()

    def crowd(self, tokens: int) -> None:
        """Other prompts come, which take the whole cache."""
        for i in range(0, tokens, 40):
            self.done([2 + i // 40 % 40, *[3 + (i + j) % 40 for j in range(39)]], "", max_tokens=1)

    def cached(self, prompt: list[int], namespace: str = "") -> int:
        return self.state.tree.peek(namespace, messages.pack(prompt), len(prompt))[0]
