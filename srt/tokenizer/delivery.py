"""Messages to the server, which may be slower than we are: kept in order, bounded, no end ever lost."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Protocol

from sapwood.srt.errors import ErrorInfo, Overloaded
from sapwood.srt.messages import Chunk, Ended, Started, Stats

FRAME = 256
"""Most messages of a frame that is sent again."""


class Sender(Protocol):
    def send(self, *batch: Any) -> bool: ...


class Delivery:
    """Sends frames, and keeps what the server's queue has no room for, up to `limit` messages.

    Above that `shed` gives up the output of the requests that wait there: each keeps its one end, an error.
    """

    def __init__(self, outbox: Sender, limit: int = 100_000) -> None:
        self._outbox = outbox
        self._limit = limit
        self._backlog: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._backlog)

    @property
    def overfull(self) -> bool:
        return len(self._backlog) > self._limit

    def send(self, batch: list[Any]) -> None:
        """Send a frame, or keep it behind what waits already."""
        if self._backlog or not self._outbox.send(*batch):
            self._backlog += (message for message in batch if not isinstance(message, Stats))

    def retry(self) -> None:
        """Send what the queue has room for now."""
        while self._backlog:
            batch = list(islice(self._backlog, FRAME))
            if not self._outbox.send(*batch):
                return
            for _ in batch:
                self._backlog.popleft()

    def shed(self) -> list[str]:
        """Drop the output that waits. Returns the rids that have lost some of it and still need their end."""
        lost = {m.rid for m in self._backlog if isinstance(m, (Started, Chunk))}
        ended = {m.rid for m in self._backlog if isinstance(m, Ended)}
        kept = (m for m in self._backlog if not isinstance(m, (Started, Chunk)))
        error = overloaded()
        self._backlog = deque(
            Ended(m.rid, m.error or error) if isinstance(m, Ended) and m.rid in lost else m for m in kept
        )
        return sorted(lost - ended)


def overloaded() -> ErrorInfo:
    return Overloaded("the server reads its output too slowly; the output of this request was dropped").info()
