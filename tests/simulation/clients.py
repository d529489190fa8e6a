"""What the clients have been told: every message of the scheduler is checked as it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sapwood.srt import messages
from sapwood.srt.messages import Admitted, Done, PromptRead, Refused, RowStart, Submit, TokenLogprob, Tokens
from tests.simulation.worker import fake_logprob


@dataclass(slots=True)
class Client:
    """What a client has seen of one request. `draws` is the seed with which its tokens are drawn."""

    submit: Submit
    admitted: Admitted | None = None
    refused: Refused | None = None
    draws: int | None = None
    output: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    reads: dict[int, TokenLogprob] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    pooled: bytes = b""

    @property
    def prompt(self) -> list[int]:
        ids: list[int] = messages.unpack(self.submit.ids).tolist()
        return ids

    @property
    def finished(self) -> bool:
        return self.refused is not None or len(self.done) == self.submit.params.n

    def take(self, choice: int, token: int, logprob: TokenLogprob | None) -> None:
        """One output token more."""
        assert self.admitted is not None, "a token before Admitted"
        assert choice not in self.done, "a token after Done"
        self.output.setdefault(choice, []).append(token)
        assert (logprob is None) == (self.submit.params.logprobs is None), "a logprob is missing, or too many"
        if logprob is not None:
            assert logprob.id == token
            self.logprobs.setdefault(choice, []).append(logprob)

    def hear(self, message: Admitted | PromptRead | Done | Refused) -> None:
        """A message about this request alone."""
        match message:
            case Admitted():
                assert self.admitted is None, "admitted twice"
                assert not self.done, "admitted after an end"
                self.admitted = message
            case PromptRead():
                assert self.admitted is not None, "a prompt's values before Admitted"
                assert not self.output, "a prompt's values after its output"
                self._read(message)
            case Refused():
                assert self.admitted is None, "refused after Admitted"
                assert not self.finished, "two terminal messages"
                self.refused = message
            case Done():
                assert self.refused is None, "Done after Refused"
                assert 0 <= message.choice < self.submit.params.n, "no such choice"
                assert message.choice not in self.done, "two terminal messages"
                assert (message.reason == "error") == (message.error is not None)
                self.done[message.choice] = message
                self.output.setdefault(message.choice, [])

    def _read(self, message: PromptRead) -> None:
        prompt = messages.unpack(self.submit.ids)
        for i, value in enumerate(message.logprobs, message.start):
            assert i not in self.reads, "a value was told twice"
            assert not self.reads or i - 1 in self.reads, "a value was left out"
            assert value.id == prompt[i]
            self.reads[i] = value
        if message.pooled:
            assert not self.pooled, "two hidden states"
            self.pooled = message.pooled

    def check_start(self, start: RowStart) -> None:
        """What the worker is told of a row of this request is what the client has of it."""
        assert len(self.submit.ids) // 4 == start.prompt_len
        assert self.draws in (None, start.seed), "a request's seed has changed"
        self.draws = start.seed
        grammar = self.submit.grammar if start.params.max_tokens != 0 else None
        assert start.grammar.startswith(grammar.key if grammar is not None else b"")
        assert bool(start.grammar) == (grammar is not None)
        if start.params.penalised or start.read_from >= 0 or grammar is not None:
            output = self.output.get(start.choice, [])
            assert start.history == self.submit.ids + messages.pack(output), "another history"
        else:
            assert not start.history


class Clients(dict[int, Client]):
    """By key."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: dict[int, tuple[Client, int]] = {}

    def open(self, submit: Submit) -> Client:
        """A request is on its way."""
        client = self[submit.key] = Client(submit)
        for choice in range(submit.params.n):
            assert submit.key + choice not in self.choices
            self.choices[submit.key + choice] = client, choice
        return client

    def tell(self, message: Any) -> None:
        """The scheduler tells a tokenizer something about requests."""
        if not isinstance(message, Tokens):
            self[message.key].hear(message)
            return
        for i, (key, token) in enumerate(tokens_of(message)):
            client, choice = self.choices[key]
            client.take(choice, token, message.logprobs.get(i))


def tokens_of(message: Tokens) -> list[tuple[int, int]]:
    """Its keys and tokens, side by side."""
    keys = np.frombuffer(message.keys, dtype="<i8").tolist()
    return list(zip(keys, messages.unpack(message.ids).tolist(), strict=True))


def check_logprobs(client: Client, values: list[int], choice: int) -> None:
    """The logprobs of a choice's output; `values` are the chain values before each of its tokens."""
    told = client.logprobs.get(choice, [])
    want = [fake_logprob(v, t) for v, t in zip(values, client.output[choice], strict=False)]
    assert [value.logprob for value in told] == want, "another logprob"
