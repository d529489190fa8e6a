"""Every message between processes: one union, one codec (see docs/architecture.md). Those of scheduler and
worker are in steps.py; what the launcher and its children tell each other, over sockets of their own, is in
orders.py.

    server ──Generate, Abort, Ask──► tokenizer ──Submit, Cancel, StopAt, Ask──► scheduler ──Step──► worker
       ▲                               │  ▲                                       │   ▲               │
       └Started, Read, Chunk, Ended, …─┘  └Admitted, PromptRead, Tokens, Done, …──┘   └──StepResult───┘
                                 grammar: Compile ► Compiled        LoadGrammar ► GrammarLoaded

A frame on a socket is one encoded list of messages. Token ids, positions, rows and slots travel as
little-endian int32 bytes (`pack` and `unpack`), keys as int64.

A request has two names. `rid` is the unique string that server and tokenizer use. `key` is the number
that its tokenizer gives it for the scheduler: choice c of the request is `key + c`, so that a step's
tokens are told in two packed arrays.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sapwood.srt.errors import ErrorInfo
from sapwood.srt.params import Constraint, Parsing, SamplingParams, Scheduling
from sapwood.srt.steps import (
    DropGrammars as DropGrammars,
    GrammarLoaded as GrammarLoaded,
    GrammarState as GrammarState,
    Ids as Ids,
    LoadGrammar as LoadGrammar,
    Message as Message,
    RowError as RowError,
    RowRead as RowRead,
    RowStart as RowStart,
    Step as Step,
    StepResult as StepResult,
    TokenLogprob as TokenLogprob,
    WorkerReady as WorkerReady,
    pack as pack,
    unpack as unpack,
)

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
    tools: list[dict[str, Any]] | None = None


class TextPart(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Text, in which a special token's string is text too, unless it is `special`."""

    text: str
    special: bool = False


class IdsPart(msgspec.Struct, array_like=True, tag=True, frozen=True):
    ids: Ids


class Spoken(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A message of a chat. An `open` one, the last part of all, is what the model goes on with."""

    role: str
    content: list[TextPart | IdsPart]
    open: bool = False


class PartsPrompt(Message):
    """Text, token ids and messages, in order (see parts.py).

    Each part has tokens of its own, whatever comes after it: the ids of a prompt that goes on where another
    one and its output ended begin with theirs.
    """

    parts: list[TextPart | IdsPart | Spoken]
    template_kwargs: dict[str, Any] = {}


AnyPrompt = TextPrompt | IdsPrompt | ChatPrompt | PartsPrompt


class Generate(Message):
    """One prompt with its n choices. The answer: Started, Chunks, and exactly one Ended.

    `namespace` separates caches: requests with different ones share nothing. `arrived` is
    `time.monotonic()` of the server (one clock for all processes of a machine). If not
    `streamed`, nobody sees the Chunks one by one: they may be few and large. `group` is the
    same for all prompts that came together.
    """

    rid: str
    prompt: AnyPrompt
    params: SamplingParams
    namespace: str = ""
    arrived: float = 0.0
    scheduling: Scheduling = Scheduling()
    streamed: bool = True
    constraint: Constraint | None = None
    parsing: Parsing | None = None
    group: str = ""


class Abort(Message):
    rid: str


ASK_SECONDS = 10.0  # nobody waits longer for an Answer, if not patient


class Ask(Message):
    """A question that one Answer with the same call answers; "cancel": nobody waits for that one any more.

    The tokenizer answers "tokenize" (of `prompt`) and "detokenize" (of `prompt.ids`) itself, passes the rest
    on, and puts text beside the ids of what comes back. "explain" asks what `prompt` (ids, for the scheduler)
    would find in `namespace` now; "tree" for a snapshot; "program" for what the requests of one have used.
    `options` are the route's own. `patient`: it is waited for until "cancel", however long that is.
    """

    call: int
    what: Literal["flush", "state", "check", "tree", "explain", "tokenize", "detokenize", "program", "cancel"]
    tokenizer: int = 0
    prompt: AnyPrompt | None = None
    namespace: str = ""
    options: dict[str, Any] = {}
    patient: bool = False


# ---- tokenizer → server


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
    `warnings` tell what of a lenient constraint is not enforced. `rewritten` are the messages of a
    PartsPrompt, by their number among its messages, at which the chat template changed what came before.
    """

    rid: str
    prompt_ids: Ids
    verdict: Verdict
    queued: float
    saved: float = 0.0
    first: tuple[str, bytes] = ("", b"")
    warnings: list[str] = []
    rewritten: list[int] = []


class Read(Message):
    """What a request reads of its prompt, in pieces, after Started and before the first Chunk.

    `logprobs` are of the prompt's tokens from index `start` on (never of the first one of all, which has
    none); each token comes once. `pooled` is the hidden state asked for, float32 [hidden] little-endian.
    """

    rid: str
    start: int = 0
    logprobs: list[TextLogprob] = []
    pooled: bytes = b""


class CallDelta(msgspec.Struct, array_like=True):
    """More of tool call number `index`; its `id` and `name` come once, at its beginning."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


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
    reasoning: str = ""
    calls: list[CallDelta] = []


class Incomplete(msgspec.Struct, array_like=True, frozen=True):
    """Where a constrained output stood when it was cut: the JSON pointer of what was being written, and
    `inside` what (string, number, key, object, array, literal, text)."""

    pointer: str
    inside: str


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """Of an output that a stop string has cut: its first `tokens` are the text before it, but for its last
    characters, `rest`, which are a part of the next token."""

    tokens: int
    rest: str


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """Why a choice ended: EOS or a stop ("stop", with what matched), complete tool calls, a limit ("length"),
    or "abort". Of its tokens `drafted` had been proposed, and `accepted` of these were drawn."""

    reason: Literal["stop", "length", "abort", "tool_calls"]
    matched: int | str | None = None
    completion_tokens: int = 0
    incomplete: Incomplete | None = None
    drafted: int = 0
    accepted: int = 0
    kept: Kept | None = None


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
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    programs: int = 0
    slots_pinned: int = 0


# ---- tokenizer ⇄ grammar


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """A constraint in the engine's own words; equal keys mean equal texts."""

    key: bytes
    text: str
    warnings: list[str] = []


class Compile(Message):
    """Answered by one Compiled with the same call, unless it is forgotten first.

    Parties take turns: `party` is whose request it is, or where all are one tenant the request itself.
    """

    call: int
    tokenizer: int
    constraint: Constraint
    party: str = ""


class Forget(Message):
    call: int
    tokenizer: int


class Compiled(Message):
    call: int
    grammar: Grammar | None
    error: ErrorInfo | None = None


class GrammarStats(Message):
    """The grammar process's counters, sent to the server when they change, at most every 0.2 s: constraints
    compiled, refused, and known from before; seconds of computing."""

    compiled: int = 0
    refused: int = 0
    known: int = 0
    seconds: float = 0.0


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
    grammar: Grammar | None = None


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
    drafted: int = 0
    accepted: int = 0


class Refused(Message):
    """The request never ran: no choice of it gets a Done."""

    key: int
    error: ErrorInfo


AnyMessage = (
    Generate | Abort | Ask | Started | Read | Chunk | Ended | Answer | Stats
    | Submit | StopAt | Cancel | Admitted | PromptRead | Tokens | Done | Refused
    | Step | StepResult | WorkerReady | LoadGrammar | DropGrammars | GrammarLoaded
    | Compile | Forget | Compiled | GrammarStats
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyMessage])


def encode(messages: list[Any]) -> bytes:
    return _encoder.encode(messages)


def decode(frame: bytes | memoryview) -> list[Any]:
    """The messages of a frame; msgspec.ValidationError (with the path) if it is not one."""
    return _decoder.decode(frame)
