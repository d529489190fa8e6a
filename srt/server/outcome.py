"""What a request has given so far: the state that every answer shape is made of."""

from __future__ import annotations

from sapwood.srt.errors import SapwoodError
from sapwood.srt.messages import Chunk, Finish, Read, Started, TextLogprob, Verdict, unpack
from sapwood.srt.server.answers import PromptDetails, Usage, cache_report


class ChoiceSoFar:
    """One choice: its text, ids and logprobs so far, and its finish once it has one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.packed_ids = bytearray()
        self.logprobs: list[TextLogprob] = []
        self.finish: Finish | None = None

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    @property
    def ids(self) -> list[int]:
        ids: list[int] = unpack(bytes(self.packed_ids)).tolist()
        return ids

    @property
    def ended(self) -> Finish:
        """The finish; SapwoodError if the request ended without one, which no peer of ours does."""
        if self.finish is None:
            raise SapwoodError("the request ended before this choice was finished")
        return self.finish


class Outcome:
    """The choices of all prompts of a request, prompt by prompt: index = prompt * n + choice."""

    def __init__(self, prompts: int, n: int) -> None:
        self.n = n
        self.started: list[Started | None] = [None] * prompts
        self.prompt_logprobs: list[list[TextLogprob]] = [[] for _ in range(prompts)]
        """Of each prompt's tokens from the index asked for on (never of its first token)."""
        self.pooled: list[bytes] = [b""] * prompts
        """What was asked for of each prompt's hidden states, float32 [hidden]."""
        self.choices = [ChoiceSoFar() for _ in range(prompts * n)]

    def index(self, prompt: int, chunk: Chunk) -> int:
        return prompt * self.n + chunk.choice

    def add(self, prompt: int, event: Started | Read | Chunk) -> None:
        if isinstance(event, Started):
            self.started[prompt] = event
            return
        if isinstance(event, Read):
            self.prompt_logprobs[prompt] += event.logprobs
            self.pooled[prompt] = event.pooled or self.pooled[prompt]
            return
        choice = self.choices[self.index(prompt, event)]
        if event.text:
            choice.texts.append(event.text)
        choice.packed_ids += event.ids
        if event.logprobs:
            choice.logprobs += event.logprobs
        if event.finish is not None:
            choice.finish = event.finish

    def prompt_tokens(self, prompt: int) -> int:
        started = self.started[prompt]
        return 0 if started is None else len(started.prompt_ids) // 4

    def verdict(self, prompt: int) -> Verdict:
        started = self.started[prompt]
        return Verdict(0, "cold") if started is None else started.verdict

    def completion_tokens(self, index: int) -> int:
        choice = self.choices[index]
        return len(choice.packed_ids) // 4 if choice.finish is None else choice.finish.completion_tokens

    def usage(self, *, report: bool) -> Usage:
        """Counts over all prompts; with `report` what each prompt's cache lookup found."""
        verdicts = [self.verdict(i) for i in range(len(self.started))]
        prompt_tokens = sum(map(self.prompt_tokens, range(len(self.started))))
        completion_tokens = sum(map(self.completion_tokens, range(len(self.choices))))
        details = PromptDetails(sum(v.matched for v in verdicts))
        usage = Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
        if report:
            reports = [cache_report(v) for v in verdicts]
            usage.cache = reports[0] if len(reports) == 1 else reports
        return usage
