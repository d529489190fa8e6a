"""What the launcher and its children tell each other, over each child's own socket pair (see lifeline.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood.srt.config import Config, ModelSource
from sapwood.srt.messages import Message


class Boot(Message):
    """The first message a child gets: all that it needs to know."""

    config: Config
    source: ModelSource
    directory: str
    role: str
    index: int = 0


class Beat(Message):
    pass


class Ready(Message):
    """A child can do its work. `facts` are printed at start; `max_request_tokens` is set by the scheduler."""

    facts: dict[str, str] = msgspec.field(default_factory=dict)
    max_request_tokens: int = 0


class Serve(Message):
    """Launcher → server: every process is ready."""

    max_request_tokens: int
    facts: dict[str, str]


class Fatal(Message):
    """A child cannot go on: the reason, for a person. `expected`: it is the user's to mend (a wrong flag, a
    broken model file), and no traceback."""

    message: str
    expected: bool = False


class Died(Message):
    """Launcher → server: a process has died; end every request with an error."""

    message: str


class Drain(Message):
    """Launcher → server: admit nothing more, finish or abort what runs, then exit with 0."""

    seconds: float


AnyOrder = Boot | Beat | Ready | Serve | Fatal | Died | Drain

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyOrder)


def encode(order: Any) -> bytes:
    return _encoder.encode(order)


def decode(frame: bytes) -> Any:
    """msgspec.ValidationError if it is none."""
    return _decoder.decode(frame)
