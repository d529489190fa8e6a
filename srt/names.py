"""The names that clients give their requests: which of them live, and what an abort of one reaches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Generic, Protocol, TypeVar

from sapwood.srt.errors import Conflict, SapwoodError, Unavailable


class Named(Protocol):
    """What lives under a name, alone or with others."""

    name: str


class Held:
    """A name that work has taken whose streams come and go under it. An abort of it ends the work, by the
    `scope` that it runs in."""

    def __init__(self, name: str, scope: asyncio.Timeout) -> None:
        self.name = name
        self.aborted = False
        self._scope = scope

    def abort(self) -> None:
        if not self._scope.expired():
            self.aborted = True
            self._scope.reschedule(asyncio.get_running_loop().time())


Rid = str | Sequence[str] | Held | None
"""What several requests that begin together are called: all the same, each something else, what is held
already, or nothing."""

S = TypeVar("S", bound=Named)


class Names(Generic[S]):
    """The names of live streams, and those that are held."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._streams: dict[str, list[S]] = {}

    def of(self, rid: Rid, count: int) -> list[str | None]:
        """One name for each of `count` requests. Raises Conflict if it belongs to another live request."""
        if isinstance(rid, Held):
            assert self.held.get(rid.name) is rid, "no longer held"
            return [rid.name] * count
        names: list[str | None] = [rid] * count if rid is None or isinstance(rid, str) else [*rid]
        assert len(names) == count, "one name for each request"
        for name in names:
            if name is not None:
                self._require_free(name)
        return names

    @contextlib.asynccontextmanager
    async def hold(self, name: str, seconds: float | None, late: SapwoodError) -> AsyncIterator[Held]:
        """Within it the name is taken. Raises Conflict if it is already, Unavailable once it is aborted, and
        `late` after so many seconds."""
        self._require_free(name)
        held = None
        try:
            async with asyncio.timeout(seconds) as scope:
                held = self.held[name] = Held(name, scope)
                yield held
        except TimeoutError:
            if held is not None and held.aborted:
                raise Unavailable("the request was aborted", code="aborted") from None
            raise late from None
        finally:
            self.held.pop(name, None)

    def add(self, stream: S) -> None:
        self._streams.setdefault(stream.name, []).append(stream)

    def remove(self, stream: S) -> None:
        namesakes = self._streams[stream.name]
        namesakes.remove(stream)
        if not namesakes:
            del self._streams[stream.name]

    def streams(self, name: str) -> list[S]:
        """Those that live under the name."""
        return [*self._streams.get(name, ())]

    def _require_free(self, name: str) -> None:
        if name in self.held or name in self._streams:
            raise Conflict(f"a request with rid {name!r} is still running", param="rid")
