"""What one request has a right to: the plain answer, cut only by what was asked for or done to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood.srt.messages import Done
from tests.simulation.clients import Client, check_logprobs
from tests.simulation.rules import Rules
from tests.simulation.scenario import Arrival
from tests.simulation.worker import EOS, chain, expected, expected_reads


@dataclass(slots=True, eq=False)
class Asked:
    """A request under way, as its tokenizer knows it. `limit` is how many tokens it might have in all when it
    was taken in."""

    arrival: Arrival
    client: Client
    limit: int = 0
    taken_in: float = 0.0
    seen: dict[int, int] = field(default_factory=dict)
    """By choice, how many tokens have arrived at the tokenizer."""
    ends: int = 0
    """How many terminal messages have."""
    stopped: dict[int, int] = field(default_factory=dict)
    """By choice, the token with which its stop string was complete."""
    cancelled: bool = False
    steps: int = 0
    """How many of its rows' steps the worker has run."""
    failed: bool = False
    lost: bool = False
    """The worker has died, or the scheduler has begun anew, since it was sent."""
    patience: float | None = None

    @property
    def over(self) -> bool:
        """Whether the tokenizer has heard of its end."""
        return self.ends == (1 if self.client.refused else self.client.submit.params.n)


def check_answer(asked: Asked) -> None:
    """AssertionError if the request, which has ended, was told anything but what it should have been."""
    client = asked.client
    prompt, params = client.prompt, client.submit.params
    if client.refused is not None:
        _check_refusal(asked, len(prompt))
        return
    whole = True
    if asked.patience is not None and client.admitted is not None:
        assert client.admitted.queued <= asked.patience, f"{client.submit.rid} was admitted too late"
    for choice in range(params.n):
        done, output = client.done[choice], client.output[choice]
        want: list[int] = []
        if client.draws is not None:
            room, grammar = asked.limit - len(prompt), client.submit.grammar
            want = expected(prompt, params, client.draws, choice, room, grammar)
        where = f"choice {choice} of {client.submit.rid}"
        assert output == want[: len(output)], f"{where}: {output} is not how {want} begins"
        _check_end(asked, done, output, want, where)
        whole &= done.reason in ("stop", "length")
        if params.logprobs is not None:
            check_logprobs(client, _values(prompt, output), choice)
    reads = {i: value.logprob for i, value in client.reads.items()}
    values, state = expected_reads(prompt, params)
    if whole:
        assert (reads, client.pooled) == (values, state), (
            f"{client.submit.rid}: another reading of the prompt"
        )
    else:
        assert reads.items() <= values.items(), f"{client.submit.rid}: another reading of the prompt"
        assert client.pooled in (b"", state), f"{client.submit.rid}: another hidden state"


def _values(prompt: list[int], output: list[int]) -> list[int]:
    value = 0
    for token in prompt:
        value = chain(value, token)
    values = []
    for token in output:
        values.append(value)
        value = chain(value, token)
    return values


def _check_refusal(asked: Asked, length: int) -> None:
    refused = asked.client.refused
    assert refused is not None
    too_long = length > asked.limit or (length == asked.limit and asked.client.submit.params.max_tokens != 0)
    assert (refused.error.code == "context_length_exceeded") == too_long, refused
    assert too_long or refused.error.code == "queue_full", refused


def _check_end(asked: Asked, done: Done, output: list[int], want: list[int], where: str) -> None:
    params = asked.client.submit.params
    what = f"{where}: {done}, after {len(output)} of {len(want)} tokens"
    submit = asked.client.submit
    rules = Rules.of(submit.grammar.text) if submit.grammar is not None and params.max_tokens != 0 else None
    if rules is None or done.reason == "error":
        over = False
    else:
        over = rules.ended(done.n)
    assert 0 <= done.accepted <= done.drafted, what
    match done.reason:
        case "length":
            assert asked.client.draws is not None, what
            assert done.n == len(output) == len(want), what
            assert done.matched is None, what
            assert not over, what
            assert not want or not _ends(want[-1], asked), what
        case "stop" if done.matched is not None:
            assert done.n == len(output) == len(want), what
            assert done.matched == want[-1], what
            assert _ends(want[-1], asked), what
        case "stop" if over:
            assert done.n == len(output) == len(want), what
        case "stop":
            assert done.n == asked.stopped.get(done.choice), what
            assert done.n <= len(output), what
        case "abort":
            assert asked.cancelled, what
            assert done.n == len(output), what
        case "error":
            assert done.error is not None
            assert done.n == len(output), what
            match done.error.code:
                case "x":
                    assert asked.failed, what
                case "process_died" | "internal_error":
                    assert asked.lost, what
                case "bad_grammar":
                    assert rules is not None, what
                    assert rules.bad, what
                    assert asked.client.admitted is None, what
                case "queue_timeout":
                    assert asked.patience is not None, what
                    assert asked.client.admitted is None, what
                case _:
                    raise AssertionError(what)
    assert params.max_tokens != 0 or done.n == 0, what


def _ends(token: int, asked: Asked) -> bool:
    params = asked.client.submit.params
    grammar = asked.client.submit.grammar if params.max_tokens != 0 else None
    return (token == EOS and not (params.ignore_eos and grammar is None)) or token in params.stop_token_ids
