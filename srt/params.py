"""Sampling parameters: one struct from the HTTP field to the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sapwood.srt.errors import BadRequest

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_LOGPROB_IDS = 256
MAX_CONSTRAINT_BYTES = 64 * 2**10
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: one near 0 makes infinities of them."""


class Scheduling(msgspec.Struct, frozen=True, array_like=True):
    """How a request is ordered and kept: nothing here changes its answer.

    `tenant` is whose it is, for fairness; a higher `priority` goes first. What it has put into the cache is
    kept there for `keep` seconds after its end, if there is room for that. It may wait for `queue_timeout`
    seconds. `unsalted` is the namespace that it would have without its cache_salt. `program` is the program
    that it belongs to: what that uses is kept while it lives, and counted.
    """

    tenant: str = ""
    priority: int = 0
    keep: float = 0.0
    queue_timeout: float | None = None
    unsalted: str = ""
    program: str = ""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What an output must be: nothing else can be drawn.

    `text` is a JSON schema, a regular expression (matched as a whole), an EBNF grammar, the JSON list of
    `choices`, or the JSON of a structural tag; `field` is where the request has it, for errors. Between the
    tokens of a JSON document stand at most `whitespace` characters of white space (None: the server's). The
    constraint begins `after` this text, if there is one; with an `opening`, only in an output that begins
    with that, and at once in any other.
    """

    kind: Literal["json_schema", "regex", "ebnf", "choices", "structural_tag"]
    text: str
    field: str
    whitespace: int | None = None
    after: str = ""
    opening: str = ""

    def check(self) -> Constraint:
        """Return self, or raise BadRequest naming the field if it is too long to be read, or is no text."""
        for text in (self.text, self.after, self.opening):
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise BadRequest(f"{self.field} holds a lone surrogate", param=self.field) from None
            if size > MAX_CONSTRAINT_BYTES:
                raise BadRequest(
                    f"{self.field} has {size} bytes, above the limit of {MAX_CONSTRAINT_BYTES}",
                    param=self.field,
                )
        return self


def checked_constraints(
    given: Constraint | Sequence[Constraint | None] | None, count: int
) -> Sequence[Constraint | None]:
    """One for each of `count` requests: the same for all, or each its own. Raises BadRequest."""
    if given is None:
        return [None] * count
    if isinstance(given, Constraint):
        return [given.check()] * count
    assert len(given) == count, "one constraint for each request"
    return [None if its is None else its.check() for its in given]


class Parsing(msgspec.Struct, frozen=True, array_like=True):
    """How an output is told apart: the formats of tool calls and of reasoning, and the tools' names.

    Empty formats: all of it is content. `reasons`: it begins within the reasoning, which the prompt opened.
    `calls_only`: by a constraint it is calls alone, after the reasoning, so what is left of one that was cut
    off is no content.
    """

    tool_format: str = ""
    tool_names: list[str] = []
    reasoning_format: str = ""
    reasons: bool = False
    calls_only: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request's tokens are drawn and when they end.

    `temperature == 0` is greedy. `top_k` 0 and -1 are off. Without a `seed` one is drawn per request.
    `logprobs` is None for none, else the number of alternatives (0 to 20); values are natural logarithms of
    the model's own distribution, before temperature, penalties, biases and filters. With `logprob_start` the
    prompt's tokens from that index on get theirs too (the first token of all has none; one at or beyond the
    prompt's end asks for none of them), and `logprob_ids` are further tokens to be told at every place.
    `max_tokens` 0 computes the prompt and nothing else; only then `pooling` may ask for the prompt's hidden
    state instead of logprobs: its last token's, or the mean. Only then, too, a prompt whose logprobs are told
    may say `judges_last`: its last token, after which nothing comes, gets its logprob and is not computed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: list[str] = []
    stop_regex: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logprob_start: int | None = None
    logprob_ids: list[int] = []
    judges_last: bool = False
    pooling: Literal["last", "mean"] | None = None

    def reads_from(self, prompt_tokens: int) -> int:
        """The first prompt position whose hidden state is read for more than the last token's logits; -1 if
        there is none. A prefix may be taken from the cache up to there (at most max(0, s - 1) tokens)."""
        if self.pooling == "mean":
            return 0
        start = -1 if self.logprob_start is None else max(0, self.logprob_start - 1)
        return start if start < prompt_tokens - 1 else -1

    @property
    def penalised(self) -> bool:
        """Whether the sampler needs counts of the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> SamplingParams:
        """Return self, or raise BadRequest naming the field, its value and the limit.

        `vocab_size` bounds token ids in `logit_bias` and `stop_token_ids`.
        """
        _between("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _between("top_k", self.top_k, -1, 2**62)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_reading()
        self._check_lists(vocab_size)
        return self

    def _check_reading(self) -> None:
        if self.logprob_start is not None:
            _between("logprob_start", self.logprob_start, 0, 2**31 - 1)
        for name, asked in (
            ("logprob_start", self.logprob_start is not None),
            ("logprob_ids", self.logprob_ids),
        ):
            if asked and self.logprobs is None:
                raise BadRequest(f"{name} needs logprobs", param=name)
        if self.pooling is not None and (self.max_tokens != 0 or self.n != 1 or self.logprobs is not None):
            raise BadRequest("pooling needs max_tokens 0, n 1 and no logprobs", param="pooling")
        if self.judges_last and (self.max_tokens != 0 or self.n != 1 or self.logprob_start is None):
            raise BadRequest("judges_last needs max_tokens 0, n 1 and a logprob_start", param="judges_last")

    def _check_lists(self, vocab_size: int) -> None:
        _between("length of stop", len(self.stop), 0, MAX_STOPS, param="stop")
        for text in self.stop:
            _between("length of a stop string", len(text), 1, MAX_STOP_CHARS, param="stop")
        _between("length of stop_regex", len(self.stop_regex), 0, MAX_STOPS, param="stop_regex")
        for pattern in self.stop_regex:
            _between("length of a stop_regex", len(pattern), 1, MAX_STOP_CHARS, param="stop_regex")
        _between("length of stop_token_ids", len(self.stop_token_ids), 0, 256, param="stop_token_ids")
        for token in self.stop_token_ids:
            _between("a stop token id", token, 0, vocab_size - 1, param="stop_token_ids")
        _between("length of logprob_ids", len(self.logprob_ids), 0, MAX_LOGPROB_IDS, param="logprob_ids")
        for token in self.logprob_ids:
            _between("a token id in logprob_ids", token, 0, vocab_size - 1, param="logprob_ids")
        _between("length of logit_bias", len(self.logit_bias), 0, MAX_BIASES, param="logit_bias")
        for token, bias in self.logit_bias.items():
            _between("a token id in logit_bias", token, 0, vocab_size - 1, param="logit_bias")
            _between("a logit_bias value", bias, -100.0, 100.0, param="logit_bias")


def _between(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    # Written so that NaN fails too; no float() of an int, which may have thousands of digits.
    if not low <= value <= high or (open_low and value == low):
        left = "above" if open_low else "from"
        raise BadRequest(f"{name} must be {left} {low} to {high}, got {value}", param=param or name)
