"""Messages to the server, which may be slower than we are: kept in order, bounded, no end ever lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from sapwood.srt.channel import frames, weight
from sapwood.srt.errors import ErrorInfo, Unavailable
from sapwood.srt.messages import Chunk, Ended, Read, Started, Stats

FRAME = 256
"""Most messages of a frame that is sent again."""


class Sender(Protocol):
    def send(self, *batch: Any) -> bool: ...


class Delivery:
    """Sends frames, and keeps what the server's queue has no room for, up to `limit` messages.

    A message with logprobs counts as many as it has (token, logprob) pairs. Above the limit `shed` gives up
    the output of the requests that wait there: each keeps its one end, an error.
    """

    def __init__(self, outbox: Sender, limit: int = 100_000) -> None:
        self._outbox = outbox
        self._limit = limit
        self._backlog: deque[Any] = deque()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._backlog)

    @property
    def overfull(self) -> bool:
        return self._weight > self._limit

    def send(self, batch: list[Any]) -> None:
        """Send a batch, or keep it behind what waits already. It is one frame, unless it is a heavy one."""
        for frame in frames(batch):
            if self._backlog or not self._outbox.send(*frame):
                self._keep(message for message in frame if not isinstance(message, Stats))

    def retry(self) -> None:
        """Send what the queue has room for now."""
        while self._backlog:
            frame = next(frames(self._backlog, FRAME))
            if not self._outbox.send(*frame):
                return
            for _ in frame:
                self._weight -= weight(self._backlog.popleft())

    def shed(self) -> list[str]:
        """Drop the output that waits. Returns the rids that have lost some of it and still need their end."""
        lost = {m.rid for m in self._backlog if isinstance(m, (Started, Read, Chunk))}
        ended = {m.rid for m in self._backlog if isinstance(m, Ended)}
        kept = [m for m in self._backlog if not isinstance(m, (Started, Read, Chunk))]
        error = overloaded()
        self._backlog.clear()
        self._weight = 0
        self._keep(
            Ended(m.rid, m.error or error) if isinstance(m, Ended) and m.rid in lost else m for m in kept
        )
        return sorted(lost - ended)

    def _keep(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._backlog.append(message)
            self._weight += weight(message)


def overloaded() -> ErrorInfo:
    text = "the server reads its output too slowly; the output of this request was dropped"
    return Unavailable(text, code="queue_full").info()
