"""What a request has given so far: the state that every answer shape is made of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from sapwood.srt.errors import SapwoodError, Unavailable
from sapwood.srt.messages import CallDelta, Chunk, Finish, Read, Started, TextLogprob, Verdict, unpack
from sapwood.srt.server.answers import CompletionDetails, PromptDetails, Usage, cache_report
from sapwood.srt.server.logprobs import finite


class CallSoFar:
    """One call of a tool; its arguments are JSON text."""

    def __init__(self, begin: CallDelta) -> None:
        self.id = begin.id
        self.name = begin.name
        self.texts = [begin.arguments]

    @property
    def arguments(self) -> str:
        return "".join(self.texts)


class ChoiceSoFar:
    """One choice: its parts, ids and logprobs so far, and its finish once it has one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallSoFar] = []
        self.packed_ids = bytearray()
        self.logprobs: list[TextLogprob] = []
        self.finish: Finish | None = None
        self.count = 0
        """Of its tokens."""

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

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; 0 if there are none. Logprobs must have been asked for."""
        values = [finite(item.logprob) for item in self.logprobs]
        return sum(values) / len(values) if values else 0.0


class Outcome:
    """The choices of all prompts of a request, prompt by prompt: index = prompt * n + choice.

    The output's logprobs are kept only with `keep_logprobs`: a stream sends each chunk's with it.
    """

    def __init__(self, prompts: int, n: int, keep_logprobs: bool = True) -> None:
        self.n = n
        self._keep_logprobs = keep_logprobs
        # Told with every chunk of some streams, so never counted anew.
        self._prompt_tokens = self._matched = self._completion_tokens = self._drafted = self._accepted = 0
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
            self._prompt_tokens += self.prompt_tokens(prompt)
            self._matched += event.verdict.matched
            return
        if isinstance(event, Read):
            self.prompt_logprobs[prompt] += event.logprobs
            self.pooled[prompt] = event.pooled or self.pooled[prompt]
            return
        choice, made = self.choices[self.index(prompt, event)], len(event.ids) // 4
        if event.text:
            choice.texts.append(event.text)
        if event.reasoning:
            choice.reasoning.append(event.reasoning)
        for delta in event.calls:
            if delta.index < len(choice.calls):
                choice.calls[delta.index].texts.append(delta.arguments)
            else:
                choice.calls.append(CallSoFar(delta))
        choice.packed_ids += event.ids
        if event.logprobs and self._keep_logprobs:
            choice.logprobs += event.logprobs
        if event.finish is not None:
            choice.finish = event.finish
            self._drafted += event.finish.drafted
            self._accepted += event.finish.accepted
            made = event.finish.completion_tokens - choice.count
        choice.count += made
        self._completion_tokens += made

    def best(self, prompt: int, count: int) -> list[ChoiceSoFar]:
        """The `count` choices of a prompt with the highest logprob per token, best first; of equals the
        earlier; in their order if that is all of them."""
        choices = self.choices[prompt * self.n : (prompt + 1) * self.n]
        if count < self.n:
            choices.sort(key=lambda choice: -choice.mean_logprob)
        return choices[:count]

    def prompt_tokens(self, prompt: int) -> int:
        started = self.started[prompt]
        return 0 if started is None else len(started.prompt_ids) // 4

    def prompt_ids(self, prompt: int) -> list[int]:
        started = self.started[prompt]
        ids: list[int] = [] if started is None else unpack(started.prompt_ids).tolist()
        return ids

    def first_token(self, prompt: int) -> tuple[int, str, bytes] | None:
        """Id, text and bytes of the prompt's first token, if logprobs from it on were asked for."""
        started = self.started[prompt]
        if started is None:
            return None
        text, raw = started.first
        return int(unpack(started.prompt_ids[:4])[0]), text, raw

    def verdict(self, prompt: int) -> Verdict:
        started = self.started[prompt]
        return Verdict(0, "cold") if started is None else started.verdict

    @property
    def warnings(self) -> list[str] | UnsetType:
        """Of all prompts, each once; absent if there are none."""
        told = [text for started in self.started if started is not None for text in started.warnings]
        return list(dict.fromkeys(told)) or UNSET

    def completion_tokens(self, index: int) -> int:
        return self.choices[index].count

    def usage(self, *, report: bool) -> Usage:
        """Counts over all prompts; with `report` what each prompt's cache lookup found."""
        read, made = self._prompt_tokens, self._completion_tokens
        usage = Usage(read, made, read + made, PromptDetails(self._matched))
        if self._drafted:
            rejected = self._drafted - self._accepted
            usage.completion_tokens_details = CompletionDetails(self._accepted, rejected)
        if report:
            reports = [cache_report(self.verdict(i)) for i in range(len(self.started))]
            usage.cache = reports[0] if len(reports) == 1 else reports
        return usage


def vector(pooled: bytes, normalize: bool = True) -> npt.NDArray[np.float32]:
    """float32 [hidden], of length 1 if `normalize`. Raises Unavailable if the request was aborted."""
    if not pooled:
        raise Unavailable("the request was aborted before its prompt was computed", code="aborted")
    values = np.frombuffer(pooled, "<f4")
    if normalize:
        length = float(np.linalg.norm(values.astype(np.float64)))
        values = values if length == 0 else (values / length).astype("<f4")
    return values
