"""A request and its choices, as the scheduler knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sapwood.srt.messages import Grammar, Ids
from sapwood.srt.params import SamplingParams

if TYPE_CHECKING:
    from sapwood.srt.scheduler.acceptance import Drafting
    from sapwood.srt.scheduler.lines import Line
    from sapwood.srt.scheduler.programs import Program
    from sapwood.srt.scheduler.spots import Spot

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Request:
    """One submitted prompt. `max_tokens` is what the request may produce after all limits. `urgency` is the
    lower, the sooner its priority lets it go; `priority` is for the eviction of what it used: the higher, the
    later. `tenant` is its tenant's number. What it has put into the cache is kept there for `keep` seconds
    after its end. `unsalted` is the namespace that it would have without its cache_salt, if it may be told
    of that.

    Choices 1 to n - 1 come to life when the prompt's last logits have been sampled (`forked`). With a
    `grammar`, which is `loading` until the worker has it, each draws its first token in a row of its own: its
    state is told by row. `reads_from`
    is the first prompt position whose hidden state is still to be read for more than that (-1: none is). It
    moves on as values are told: those told before a retraction are not computed again, let alone told.
    `judged` is the token after the prompt, if there is one, that only gets its logprob.
    """

    key: int
    tokenizer: int
    rid: str
    prompt: Int32s
    params: SamplingParams
    namespace: str
    seed: int
    max_tokens: int
    arrived: float
    order: int
    live: int
    urgency: int = 0
    priority: int = 0
    tenant: int = 0
    keep: float = 0.0
    unsalted: str | None = None
    reads_from: int = -1
    judged: Ids = b""
    admitted: bool = False
    forked: bool = False
    program: Program | None = None
    grammar: Grammar | None = None
    loading: bool = False

    @property
    def ignores_eos(self) -> bool:
        """Whether EOS does not end it: a grammar allows EOS at its end only."""
        return self.params.ignore_eos and self.grammar is None

    @property
    def sent(self) -> int:
        """Tokens that its tokenizer has sent: what is told is told of these."""
        return len(self.prompt) + len(self.judged) // 4

    def rows_held(self, capacity: int) -> int:
        """How many of `capacity` rows its choices take up once they fork."""
        return min(self.params.n, capacity) if self.max_tokens else 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    It is waiting (`row` is -1: `ids` holds all its tokens) or running (its tokens are in the columns of
    `row`). `resumed` marks one that has run before, or was forked: it goes ahead of new requests. While
    `pending` is not 0 a step that works for it is in flight though it has no row: it was retracted.

    `spot` and `line` are its places among those that wait (spots.py, lines.py): both None if it does not.
    `raw` are its ids as long as it has a spot. It is `work`; `ahead` was waiting in its line when it came.
    Running, with `computes`, it has a spot as long as it puts into the tree what others may wait for.

    Of its tokens `drafted` had been proposed, and `accepted` of these were drawn; `drafting` is how well that
    went. `forced` are the tokens that its grammar leaves no choice of, after the last one known. Its first
    `known` tokens have been computed before, in a row that it has no more, or for another choice.
    """

    request: Request
    choice: int
    ids: Int32s
    row: int = -1
    resumed: bool = False
    pending: int = 0
    drafted: int = 0
    accepted: int = 0
    drafting: Drafting | None = None
    known: int = 0
    forced: bytes = b""
    spot: Spot | None = None
    line: Line | None = None
    raw: bytes = b""
    work: int = 0
    ahead: int = 0
    computes: bool = False

    @property
    def key(self) -> int:
        """Its number in messages."""
        return self.request.key + self.choice

    @property
    def samples(self) -> int:
        """How many tokens are drawn from the logits of its last known token."""
        if not self.request.max_tokens:
            return 0
        return 1 if self.request.forked or self.request.grammar is not None else self.request.params.n

    @property
    def queued(self) -> bool:
        """Whether one without a row may get one: nothing of it is in flight, and its grammar is there."""
        return not self.pending and not self.request.loading

    @property
    def matchable(self) -> int:
        """How many leading tokens of a waiting sequence may come from the cache: never the last one, nor any
        whose hidden state is still to be read."""
        last, reads_from = len(self.ids) - 1, self.request.reads_from
        return last if reads_from < 0 else min(last, reads_from)
