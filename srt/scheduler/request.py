"""A request and its choices, as the scheduler knows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood.srt.params import SamplingParams

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Request:
    """One submitted prompt. `max_tokens` is what the request may produce after all limits.

    Choices 1 to n - 1 come to life when the prompt's last logits have been sampled (`forked`).
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
    work_at_arrival: int
    live: int
    admitted: bool = False
    forked: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    It is waiting (`row` is -1: `ids` holds all its tokens) or running (its tokens are in the columns of
    `row`). `resumed` marks one that has run before, or was forked: it goes ahead of new requests. While
    `pending` is not 0 a step that works for it is in flight though it has no row: it was retracted.
    `peeked` tokens of it were in the tree at `peeked_at` (the tree's version, its own length).
    """

    request: Request
    choice: int
    ids: Int32s
    row: int = -1
    resumed: bool = False
    pending: int = 0
    peeked: int = 0
    peeked_at: tuple[int, int] = (-1, 0)

    @property
    def key(self) -> int:
        """Its number in messages."""
        return self.request.key + self.choice

    @property
    def samples(self) -> int:
        """How many tokens are drawn from the logits of its last known token."""
        return 1 if self.request.forked else self.request.params.n
