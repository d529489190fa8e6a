"""Every message between processes: one union, one codec (see docs/architecture.md). What the launcher and its
children tell each other, over sockets of their own, is in orders.py.

    server ──Generate, Abort, Ask──► tokenizer ──Submit, Cancel, StopAt, Ask──► scheduler ──Step──► worker
       ▲                               │  ▲                                       │   ▲               │
       └Started, Read, Chunk, Ended, …─┘  └Admitted, PromptRead, Tokens, Done, …──┘   └──StepResult───┘

A frame on a socket is one encoded list of messages. Token ids, positions, rows and slots travel as
little-endian int32 bytes (`pack` and `unpack`), keys as int64.

A request has two names. `rid` is the unique string that server and tokenizer use. `key` is the number
that its tokenizer gives it for the scheduler: choice c of the request is `key + c`, so that a step's
tokens are told in two packed arrays.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.params import SamplingParams, Scheduling

Ids = bytes
"""Little-endian int32 values."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """One of the structs below."""


# ---- server → tokenizer


class TextPrompt(Message):
    text: str
    add_special_tokens: bool = True


class IdsPrompt(Message):
    ids: Ids


class ChatPrompt(Message):
    """Messages as the client sent them (dicts of JSON values), rendered by the model's template.

    With `continue_final` the last message is left open and the model goes on with it.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final: bool = False
    template_kwargs: dict[str, Any] = {}


class Generate(Message):
    """One prompt with its n choices. The answer: Started, Chunks, and exactly one Ended.

    `namespace` separates caches: requests with different ones share nothing. `arrived` is
    `time.monotonic()` of the server (one clock for all processes of a machine). If not
    `streamed`, nobody sees the Chunks one by one: they may be few and large.
    """

    rid: str
    prompt: TextPrompt | IdsPrompt | ChatPrompt
    params: SamplingParams
    namespace: str = ""
    arrived: float = 0.0
    scheduling: Scheduling = Scheduling()
    streamed: bool = True


class Abort(Message):
    rid: str


ASK_SECONDS = 10.0  # nobody waits longer for an Answer


class Ask(Message):
    """A question that one Answer with the same call answers; "cancel": nobody waits for that one any more.

    The tokenizer answers "tokenize" (of `prompt`) and "detokenize" (of `prompt.ids`) itself, passes the rest
    on, and puts text beside the ids of what comes back. "explain" asks what `prompt` (ids, for the scheduler)
    would find in `namespace` now; "tree" for a snapshot. `options` are the route's own.
    """

    call: int
    what: Literal["flush", "state", "check", "tree", "explain", "tokenize", "detokenize", "cancel"]
    tokenizer: int = 0
    prompt: TextPrompt | IdsPrompt | ChatPrompt | None = None
    namespace: str = ""
    options: dict[str, Any] = {}


# ---- tokenizer → server


class TokenLogprob(msgspec.Struct, array_like=True):
    """Natural-log probability of a token, the token itself, the most likely alternatives, best first, and
    the values of the request's `logprob_ids`, in their order."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = []
    chosen: list[float] = []


class TextLogprob(msgspec.Struct, array_like=True):
    """A TokenLogprob with each token's own text and raw bytes, for the OpenAI shapes."""

    id: int
    logprob: float
    text: str
    raw: bytes
    top: list[tuple[int, float, str, bytes]] = []
    chosen: list[tuple[int, float, str, bytes]] = []


Stopped = Literal["cold", "diverged", "evicted", "namespace", "last_token", "logprobs", "pooling", "disabled"]


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """What a prefix lookup found: `matched` tokens, and why it stopped there.

    `stopped`: "cold" (nothing of it was ever seen), "diverged" (the tree goes on otherwise at token
    `matched`), "evicted" (it went on once), "namespace" (without its salt it would find more),
    "last_token" (all but the last token, which is always computed), "logprobs" or "pooling" (what comes after
    is asked for and must be computed), "disabled" (no radix cache).
    """

    matched: int
    stopped: Stopped


class Started(Message):
    """The request was admitted: its prompt is being computed. Comes before the first Chunk.

    `queued` is seconds from arrival to admission, `saved` the seconds of prefill that the cache saved.
    `first` is the prompt's first token, which has no Read, as text and bytes, if its logprobs are asked for.
    """

    rid: str
    prompt_ids: Ids
    verdict: Verdict
    queued: float
    saved: float = 0.0
    first: tuple[str, bytes] = ("", b"")


class Read(Message):
    """What a request reads of its prompt, in pieces, after Started and before the first Chunk.

    `logprobs` are of the prompt's tokens from index `start` on (never of the first one of all, which has
    none); each token comes once. `pooled` is the hidden state asked for, float32 [hidden] little-endian.
    """

    rid: str
    start: int = 0
    logprobs: list[TextLogprob] = []
    pooled: bytes = b""


class Chunk(Message):
    """New output of one choice; the last one of a choice carries `finish`.

    `text` never holds any part of a stop string. `ids` are the tokens since the last chunk (those that a stop
    string ate are included, so that usage adds up); `logprobs` goes with `ids`, if asked for.
    """

    rid: str
    choice: int
    text: str
    ids: Ids
    logprobs: list[TextLogprob] | None = None
    finish: Finish | None = None


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """Why a choice ended: EOS or a stop ("stop", with what matched), a limit ("length"), or "abort"."""

    reason: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    completion_tokens: int = 0


class Ended(Message):
    """The one terminal message of a request. `error` is None when every choice has had its finish."""

    rid: str
    error: ErrorInfo | None = None


class Answer(Message):
    call: int
    error: ErrorInfo | None
    data: dict[str, Any]


class Stats(Message):
    """The scheduler's gauges and counters, sent to the server when they change, at most every 0.2 s."""

    running: int
    waiting: int
    slots_used: int
    slots_cached: int
    slots_total: int
    retracted: int
    steps: int
    prompt_tokens_cached: int
    prompt_tokens_computed: int
    output_tokens: int
    surplus_tokens: int
    evicted_tokens: int
    seconds_saved: float


# ---- tokenizer → scheduler


class Submit(Message):
    """A tokenised request. Answered by Admitted and, for each choice, exactly one Done; or by one Refused."""

    key: int
    tokenizer: int
    rid: str
    ids: Ids
    params: SamplingParams
    namespace: str
    arrived: float
    scheduling: Scheduling = Scheduling()


class StopAt(Message):
    """A stop string ended choice `choice` at its output token number `n` (1 = the first)."""

    key: int
    choice: int
    n: int


class Cancel(Message):
    """End all choices of a request. One that comes before its Submit is kept for a short while."""

    key: int


# ---- scheduler → tokenizer


class Admitted(Message):
    key: int
    verdict: Verdict
    queued: float
    saved: float = 0.0


class PromptRead(Message):
    """What one step gave of a prompt (see Read)."""

    key: int
    start: int = 0
    logprobs: list[TokenLogprob] = []
    pooled: bytes = b""


class Tokens(Message):
    """The sampled tokens of one step for one tokenizer's requests: `keys` (int64, key + choice) and `ids`
    run side by side; `logprobs` maps an index into them to its values, for those that asked."""

    keys: bytes
    ids: Ids
    logprobs: dict[int, TokenLogprob] = {}


class Done(Message):
    """The end of one choice after `n` output tokens. `matched` is the EOS or stop id, if one ended it."""

    key: int
    choice: int
    n: int
    reason: Literal["stop", "length", "abort", "error"]
    matched: int | None = None
    error: ErrorInfo | None = None


class Refused(Message):
    """The request never ran: no choice of it gets a Done."""

    key: int
    error: ErrorInfo


# ---- scheduler ⇄ worker


class RowStart(Message):
    """Row `row` begins: its first `len(prefix) / 4` positions are already in the pool, in `prefix` slots.

    Draws are keyed by (seed, choice, position); a fork's choices are `choice`, `choice + 1`, ... `history` is
    all ids so far of a row with penalties, whose counts are rebuilt from it, or whose prompt is read, to know
    what comes after a chunk (else empty); the first `prompt_len` are the prompt.
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


class Step(Message):
    """One step: release rows, admit rows, then extend `rows[i]` by `counts[i]` tokens from `starts[i]`.

    All arrays are int32 of one entry a row, but `ids` and `slots`, which run over the rows' tokens in order.
    The one id -1 of a row means its own last sampled token. `samples[i]` tokens are drawn from the row's last
    position: 0 in the middle of a prompt, 1, or n where n choices fork. `shared` names stretches of positions
    that several rows have in the same slots, to be read once: begin, end (multiples of 64), how many rows,
    and their indices i, one stretch after the other.
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


class RowError(Message):
    row: int
    error: ErrorInfo


class RowRead(Message):
    """What a step gave of one row's prompt: logprobs from index `start` on; at its end what was pooled."""

    row: int
    start: int = 0
    logprobs: list[TokenLogprob] = []
    pooled: bytes = b""


class StepResult(Message):
    """What step `number` gave: `ids` in the order of rows and samples; `logprobs` maps an index into `ids`.

    A row in `errors` has failed; its ids here are meaningless. `seconds` is the worker's time for the step.
    """

    number: int
    ids: Ids
    logprobs: dict[int, TokenLogprob]
    errors: list[RowError]
    seconds: float
    reads: list[RowRead] = []


class WorkerReady(Message):
    """The weights of worker `index` are loaded; `num_slots` KV slots exist."""

    num_slots: int
    index: int = 0


AnyMessage = (
    Generate | Abort | Ask | Started | Read | Chunk | Ended | Answer | Stats
    | Submit | StopAt | Cancel | Admitted | PromptRead | Tokens | Done | Refused
    | Step | StepResult | WorkerReady
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyMessage])


def encode(messages: list[Any]) -> bytes:
    return _encoder.encode(messages)


def decode(frame: bytes | memoryview) -> list[Any]:
    """The messages of a frame; msgspec.ValidationError (with the path) if it is not one."""
    return _decoder.decode(frame)


def pack(values: npt.ArrayLike) -> bytes:
    """Integers as little-endian int32 bytes."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack(data: bytes) -> npt.NDArray[np.int32]:
    """A read-only int32 view of packed integers."""
    return np.frombuffer(data, dtype="<i4")
