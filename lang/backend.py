"""What a program asks of a model and what it gets: the seam between the language and its backends.

A state is a tuple of segments. Those that a model has seen hold its very token ids where the backend tells
them; nothing that was sent is tokenised again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Text with tokens of its own, whatever comes after it. A special token's string is text in it, unless it
    is `special`."""

    text: str
    special: bool = False


class Ids(msgspec.Struct, frozen=True):
    """Token ids, and the text that they are."""

    ids: tuple[int, ...]
    text: str


Content = tuple[Text | Ids, ...]


class Turn(msgspec.Struct, frozen=True):
    """A message of a chat. An `open` one is the last segment of all: the model goes on with it."""

    role: str
    content: Content
    open: bool = False


Segment = Text | Ids | Turn
Segments = tuple[Segment, ...]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an output is drawn and when it ends, in the names of `/generate`; None is the backend's default.

    At most one of `regex`, `json_schema` (a JSON text), `ebnf` and `choices` says what the output must be.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    choices: tuple[str, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Which logprobs come back in an output's meta information: of its tokens, with `top` alternatives, and
    of the prompt's from index `start` on (None: none); `texts`: with the tokens' texts."""

    top: int = 0
    start: int | None = None
    texts: bool = False


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling.n` outputs that go on with `segments`. Requests of one `program` share what is kept."""

    segments: Segments
    sampling: Sampling = Sampling()
    logprobs: Logprobs | None = None
    reasoning: bool = False
    """Tell reasoning apart from content (meta information `reasoning_content`)."""
    program: str = ""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each of `choices` is after `segments`; with `unconditional`, after nothing too."""

    segments: Segments
    choices: tuple[str, ...]
    unconditional: bool = False
    program: str = ""


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """Have `segments` computed, so that what goes on with them finds them in the cache."""

    segments: Segments
    program: str = ""


Call = Generate | Score | Fill


class Output(msgspec.Struct, kw_only=True):
    """One output. `content` is what the state goes on with: the ids that were drawn, but for one with which
    it ended and what a stop string cut off. `meta` is the backend's meta information."""

    text: str
    content: Content
    meta: dict[str, Any]


class Scored(msgspec.Struct, kw_only=True):
    """A choice's tokens and their natural-log probabilities; `unconditional`: those after nothing."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()


class Answer(msgspec.Struct, kw_only=True):
    """What a call gave: `outputs`, or for a Score each choice `scored`. `input_ids` are the tokens of its
    segments, if the backend tells them; `rewritten` the messages at which the chat template changed what
    came before them; `meta` is the backend's meta information of a Score."""

    outputs: list[Output] = []
    scored: list[Scored] = []
    meta: dict[str, Any] = {}
    input_ids: tuple[int, ...] | None = None
    rewritten: tuple[int, ...] = ()


class Piece(msgspec.Struct, kw_only=True):
    """New text of output `choice`; with its last piece comes the whole output, and the answer's ids."""

    choice: int
    text: str
    output: Output | None = None
    input_ids: tuple[int, ...] | None = None
    rewritten: tuple[int, ...] = ()


class Backend(Protocol):
    """Answers calls. Every method but `check` runs on the loop that awaits it; cancelling it cancels the
    request. A backend may be used from several loops."""

    def check(self, call: Call) -> None:
        """Raise Unsupported, naming the field, if it cannot do what is asked; nothing is sent before. For a
        Fill: if its `fill` does nothing."""

    async def generate(self, call: Generate) -> Answer:
        """All outputs."""

    def stream(self, call: Generate) -> AsyncIterator[Piece]:
        """The outputs as they come."""

    async def score(self, call: Score) -> Answer:
        """Without outputs; one Scored for each choice, in order."""

    async def fill(self, call: Fill) -> Answer:
        """Without outputs; the ids, if it tells them."""

    async def end(self, program: str) -> dict[str, Any] | None:
        """A program is over: what was kept for it need not be. What its requests used, if that is known."""

    async def flush_cache(self) -> None:
        """Forget every cached prefix that nothing uses."""

    async def server_info(self) -> dict[str, Any]:
        """What the backend says of itself."""

    async def aclose(self) -> None:
        """Close what belongs to the running loop."""


@runtime_checkable
class Door(Protocol):
    """A runtime that takes the bodies of `/generate` and its like: `sapwood.Engine` is one. `backends.native`
    makes a Backend of it."""

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of a route as plain values. Raises the error that it answers with, which has `status`,
        `code` and `param`: a program sees it as a RequestFailed."""

    def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer; closed early, it cancels the request."""
