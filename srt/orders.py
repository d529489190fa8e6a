"""What the launcher and its children tell each other, over each child's own socket pair (see lifeline.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood.srt.config import Config, Device, ModelSource
from sapwood.srt.messages import Message


class Boot(Message):
    """The first message a child gets: all that it needs to know.

    `index` tells tokenizers apart, and a worker from those before it; `rank` the workers of one model.
    """

    config: Config
    source: ModelSource
    directory: str
    role: str
    index: int = 0
    rank: int = 0

    @property
    def name(self) -> str:
        """What the process is called where people read it."""
        numbered = f"{self.role} {self.index}" if self.index else self.role
        return f"{numbered} rank {self.rank}" if self.rank else numbered


def inbox_of(rank: int) -> str:
    """What the inbox of the worker with this rank is called, beside its index (see channel.py)."""
    return f"worker.{rank}" if rank else "worker"


class Beat(Message):
    pass


class Ready(Message):
    """A child can do its work. `facts` are printed at start; `max_request_tokens` is set by the scheduler,
    which says it again whenever it has begun anew with an empty cache; `device` by the worker."""

    facts: dict[str, str] = msgspec.field(default_factory=dict)
    max_request_tokens: int = 0
    device: Device | None = None


class Serve(Message):
    """Launcher → server: every process is ready; once more whenever the cache begins empty again."""

    max_request_tokens: int
    facts: dict[str, str]
    device: Device


class Fatal(Message):
    """A child cannot go on: the reason, for a person. `expected`: it is the user's to mend (a wrong flag, a
    broken model file), and no traceback. `follows`: another process is at fault, which has ended before.
    `code` and `param` are those of the error, if it is one of ours."""

    message: str
    expected: bool = False
    follows: bool = False
    code: str | None = None
    param: str | None = None


class Died(Message):
    """Launcher → server: a process has died; end every request with an error."""

    message: str


class Restart(Message):
    """Launcher → scheduler, server: the worker (a rank of it, and so all) has died, which `message` tells;
    another one is being started, with this index."""

    index: int
    message: str


class Trouble(Message):
    """Launcher → server: why nothing is computed at present, though it may be again; empty once it is."""

    message: str


class Drain(Message):
    """Launcher → server: admit nothing more, finish or abort what runs, then exit with 0."""

    seconds: float


AnyOrder = Boot | Beat | Ready | Serve | Fatal | Died | Restart | Trouble | Drain

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyOrder)


def encode(order: Any) -> bytes:
    return _encoder.encode(order)


def decode(frame: bytes) -> Any:
    """msgspec.ValidationError if it is none."""
    return _decoder.decode(frame)
