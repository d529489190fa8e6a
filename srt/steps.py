"""What scheduler and worker tell each other; the other messages, and the codec of all, are in messages.py.

scheduler ──LoadGrammar, Step, DropGrammars──► worker
   ▲                                             │
   └────WorkerReady, GrammarLoaded, StepResult───┘
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.srt.config import Device
from sapwood.srt.errors import ErrorInfo
from sapwood.srt.params import SamplingParams

Ids = bytes
"""Little-endian int32 values."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """One of the structs below."""


class TokenLogprob(msgspec.Struct, array_like=True):
    """Natural-log probability of a token, the token itself, the most likely alternatives, best first, and
    the values of the request's `logprob_ids`, in their order."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = []
    chosen: list[float] = []


class LoadGrammar(Message):
    """Make this grammar ready for rows: answered by GrammarLoaded, unless it is dropped before; then its key
    does not come again. It is kept until it is dropped."""

    key: bytes
    text: str


class DropGrammars(Message):
    keys: list[bytes]


class GrammarLoaded(Message):
    key: bytes
    error: ErrorInfo | None = None


class RowStart(Message):
    """Row `row` begins: its first `len(prefix) / 4` positions are already in the pool, in `prefix` slots.

    Draws are keyed by (seed, choice, position); a fork's choices are `choice`, `choice + 1`, ... `history` is
    all ids so far (the first `prompt_len` are the prompt) of a row with penalties or a `grammar` (a key),
    whose counts and matcher are rebuilt from it, or whose prompt is read, to know what comes after a chunk.
    `read_from` is the first prompt index whose logprob is still to be told (-1: none is): a row that was
    retracted goes on where it was. A row whose params ask for a mean has no cached prefix and begins anew.
    """

    row: int
    prefix: Ids
    params: SamplingParams
    seed: int
    choice: int
    prompt_len: int
    history: Ids = b""
    read_from: int = -1
    grammar: bytes = b""


class Step(Message):
    """One step: release rows, admit rows, then extend `rows[i]` by `counts[i]` tokens from `starts[i]`.

    All arrays are int32 of one entry a row, but `ids` and `slots`, which run over the rows' tokens in order.
    The one id -1 of a row means its own last sampled token. `samples[i]` tokens are drawn from the row's last
    position: 0 in the middle of a prompt, 1, or n where n choices fork. `shared` names stretches of positions
    that several rows have in the same slots, to be read once: begin, end (multiples of 64), how many rows,
    and their indices i, one stretch after the other. `drafts` (empty: all 0) says how many of a row's tokens,
    the last ones, are only proposed: each is kept if it is what is drawn at its place.
    """

    number: int
    released: bytes
    admitted: list[RowStart]
    rows: bytes
    starts: bytes
    counts: bytes
    ids: Ids
    slots: bytes
    samples: bytes
    shared: bytes = b""
    drafts: bytes = b""


class RowError(Message):
    row: int
    error: ErrorInfo


class RowRead(Message):
    """What a step gave of one row's prompt: logprobs from index `start` on; at its end what was pooled."""

    row: int
    start: int = 0
    logprobs: list[TokenLogprob] = []
    pooled: bytes = b""


class GrammarState(msgspec.Struct, array_like=True):
    """A row's grammar after its last token: whether the output may end here, whether it must (nothing may
    follow), and the tokens that must come next, if they are known."""

    complete: bool
    ended: bool = False
    forced: Ids = b""


class StepResult(Message):
    """What step `number` gave: `ids` in the order of rows and samples; `logprobs` maps an index into `ids`.

    A row in `errors` has failed; its ids here are meaningless. `seconds` is the worker's time for the step.
    `counts` (empty: as the step's samples) is how many ids each row of the step has given: with drafts, those
    that were kept and one more. `grammars` maps a row that has one and has sampled to its state.
    """

    number: int
    ids: Ids
    logprobs: dict[int, TokenLogprob]
    errors: list[RowError]
    seconds: float
    reads: list[RowRead] = []
    counts: bytes = b""
    grammars: dict[int, GrammarState] = {}


class WorkerReady(Message):
    """The weights of worker `index` are loaded, on `device`; `num_slots` KV slots exist."""

    num_slots: int
    index: int = 0
    device: Device = "cpu"


def pack(values: npt.ArrayLike) -> bytes:
    """Integers as little-endian int32 bytes."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack(data: bytes) -> npt.NDArray[np.int32]:
    """A read-only int32 view of packed integers."""
    return np.frombuffer(data, dtype="<i4")
