"""A simulated worker, whose "model" is a hash chain.

A slot holds the chain value of the prefix that ends in its token, and the next token is a function of that
value, the seed, the choice and the position. So a wrong, stale or shared-by-mistake slot gives wrong tokens,
as in a real model; `expected` is the answer without a scheduler. With a seed below 0 there are few tokens, so
that what is proposed is drawn now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.srt import messages
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.messages import (
    DropGrammars,
    Grammar,
    GrammarLoaded,
    GrammarState,
    LoadGrammar,
    RowError,
    RowRead,
    RowStart,
    Step,
    StepResult,
    TokenLogprob,
)
from sapwood.srt.params import SamplingParams
from tests.simulation.rules import Rules

VOCAB = 50
EOS = 1
MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 7) & MASK


def draw(value: int, seed: int, choice: int, position: int) -> int:
    mixed = (value ^ (seed * 31 + choice * 17 + position * 13)) * 0x9E3779B97F4A7C15 & MASK
    token = int((mixed >> 20) % VOCAB)
    return token if seed >= 0 or token == EOS else 2 + token % 2


def expected(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    choice: int,
    room: int,
    grammar: Grammar | None = None,
) -> list[int]:
    """The output tokens of a choice, computed plainly."""
    rules = Rules.of(grammar.text) if grammar is not None and params.max_tokens != 0 else None
    value = 0
    for token in prompt:
        value = chain(value, token)
    output: list[int] = []
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    while len(output) < limit:
        token = draw(value, seed, choice, len(prompt) + len(output))
        if rules is not None:
            token = rules.token(len(output), token)
        output.append(token)
        if (token == EOS and not (params.ignore_eos and rules is None)) or token in params.stop_token_ids:
            break
        if rules is not None and rules.ended(len(output)):
            break
        value = chain(value, token)
    return output


def fake_logprob(value: int, token: int) -> float:
    """What is told of a token that comes after the prefix of that chain value."""
    return -float(((value ^ token * 0x9E3779B9) >> 7) % 1_000_003)


def expected_reads(prompt: list[int], params: SamplingParams) -> tuple[dict[int, float], bytes]:
    """The values of the prompt's tokens by index, and what is pooled, computed plainly."""
    if params.pooling is None and params.logprob_start is None:
        return {}, b""
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
    """Checks each Step as it runs it: rows, positions and slots must fit what came before.

    A row in `fail_rows`, and one for which `fails` says so (asked once a step), has an error.
    """

    def __init__(self, num_slots: int, rows: int, max_tokens: int) -> None:
        self.content = [0] * num_slots
        self.table = np.zeros((rows, max_tokens + 2), dtype=np.int64)
        self.starts: dict[int, RowStart] = {}
        self.last: dict[int, int] = {}
        self.next: dict[int, int] = {}
        """By row: the next position to be computed."""
        self.output: dict[int, int] = {}
        """By row: how many output tokens it has drawn."""
        self.grammars: dict[bytes, Rules] = {}
        self.rules: dict[int, Rules] = {}
        self.unread: dict[int, int] = {}
        """By row: the next prompt index to be told."""
        self.sums: dict[int, list[int]] = {}
        self.computed = 0
        self.number = 0
        self.fail_rows: set[int] = set()
        self.fails: Callable[[RowStart], bool] = lambda start: False
        self.withdrawn: set[bytes] = set()
        """Grammars that were dropped before they were loaded."""
        self.token_cost = 0.0
        """What a token adds to the time of a step, over that of an empty one."""

    def load(self, message: LoadGrammar) -> GrammarLoaded | None:
        """Make a grammar ready, or say that it is none; nothing is said of one that was dropped meanwhile."""
        if message.key in self.withdrawn:
            self.withdrawn.remove(message.key)
            return None
        assert message.key not in self.grammars, "a grammar was loaded twice"
        rules = Rules.of(message.text)
        if rules.bad:
            return GrammarLoaded(message.key, ErrorInfo(400, "invalid_request_error", "bad_grammar", "bad"))
        self.grammars[message.key] = rules
        return GrammarLoaded(message.key)

    def drop(self, message: DropGrammars) -> None:
        """Forget grammars: rows that have begun go on with theirs."""
        for key in message.keys:
            assert key not in self.withdrawn, "a grammar was dropped twice"
            if self.grammars.pop(key, None) is None:
                self.withdrawn.add(key)

    def run(self, step: Step) -> StepResult:
        assert step.number == self.number
        self.number += 1
        for row in messages.unpack(step.released).tolist():
            del self.starts[row]
            self.rules.pop(row, None)
        for start in step.admitted:
            self._admit(start)
        rows, starts = messages.unpack(step.rows).tolist(), messages.unpack(step.starts).tolist()
        counts, samples = messages.unpack(step.counts).tolist(), messages.unpack(step.samples).tolist()
        drafts = messages.unpack(step.drafts).tolist() if step.drafts else [0] * len(rows)
        assert len(set(rows)) == len(rows), "a row comes twice"
        check_shared(step, self.table)
        ids, slots = messages.unpack(step.ids).tolist(), messages.unpack(step.slots).tolist()
        assert len(set(slots)) == len(slots), "a slot was given to two tokens"
        sampled: list[int] = []
        logprobs: dict[int, TokenLogprob] = {}
        errors, reads = [], []
        given: list[int] = []
        grammars: dict[int, GrammarState] = {}
        at = 0
        for row, first, count, wanted, proposed in zip(rows, starts, counts, samples, drafts, strict=True):
            begun = self.starts[row]
            assert first == self.next[row], "a position was left out, or comes twice"
            assert not proposed or (wanted == 1 and first >= begun.prompt_len - 1)
            values = self._extend(row, first, ids[at : at + count], slots[at : at + count])
            drawn: list[tuple[int, int]] = []
            if wanted == 1:
                self.output[row] = first + count - proposed - begun.prompt_len
                drawn = self._draw(
                    row, values[count - proposed - 1 :], ids[at + count - proposed : at + count]
                )
                self.next[row] -= proposed + 1 - len(drawn)
                self.last[row] = drawn[-1][1]
            elif wanted:
                drawn = [
                    (values[-1], draw(values[-1], begun.seed, choice, first + count))
                    for choice in range(begun.choice, begun.choice + wanted)
                ]
                self.last[row] = drawn[0][1]
            at += count
            for value, token in drawn:
                if begun.params.logprobs is not None:
                    logprobs[len(sampled)] = TokenLogprob(token, fake_logprob(value, token))
                sampled.append(token)
            given.append(len(drawn))
            if wanted and row in self.rules:
                grammars[row] = self.rules[row].state(self.output[row])
            reads += self._read(row, first, values)
            if row in self.fail_rows or self.fails(begun):
                errors.append(RowError(row, ErrorInfo(500, "server_error", "x", "bad")))
        told = messages.pack(given) if step.drafts else b""
        seconds = 0.001 * (1.0 + self.token_cost * len(ids))
        return StepResult(
            step.number, messages.pack(sampled), logprobs, errors, seconds, reads, told, grammars
        )

    def _draw(self, row: int, values: list[int], drafts: list[int]) -> list[tuple[int, int]]:
        """Tokens for a row, each with the chain value before it: one for each of `drafts` that is what is
        drawn in its place, and one more, up to an end."""
        begun, rules = self.starts[row], self.rules.get(row)
        ends = rules is not None or not begun.params.ignore_eos
        drawn: list[tuple[int, int]] = []
        for value, proposed in zip(values, [*drafts, -1], strict=True):
            n = self.output[row]
            token = draw(value, begun.seed, begun.choice, begun.prompt_len + n)
            if rules is not None:
                token = rules.token(n, token)
            drawn.append((value, token))
            self.output[row] += 1
            over = (token == EOS and ends) or (rules is not None and rules.ended(n + 1))
            if token != proposed or over:
                break
        return drawn

    def _admit(self, start: RowStart) -> None:
        assert start.row not in self.starts, "a row was admitted twice"
        self.starts[start.row] = start
        prefix = messages.unpack(start.prefix)
        self.table[start.row, : len(prefix)] = prefix
        params, matched = start.params, len(prefix)
        self.next[start.row] = matched
        if start.grammar:
            self.rules[start.row] = self.grammars[start.grammar]
            assert start.history
        self.unread[start.row] = start.read_from
        self.sums[start.row] = []
        if start.read_from >= 0:
            assert params.logprob_start is not None
            assert matched < start.read_from, "a position that is read came from the cache"
        if params.pooling == "mean":
            assert matched == 0, "a mean began in the middle"

    def _extend(self, row: int, first: int, ids: list[int], slots: list[int]) -> list[int]:
        """Compute a row's new tokens; returns the chain value after each."""
        content, values = self.content, []
        value = 0 if first == 0 else content[self.table[row, first - 1]]
        for token, slot in zip(ids, slots, strict=True):
            if token < 0:
                assert not values, "only the first id may be the worker's own"
                token = self.last[row]
            value = content[slot] = chain(value, token)
            values.append(value)
        self.table[row, first : first + len(slots)] = slots
        self.next[row] = first + len(slots)
        self.computed += len(slots)
        return values

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
