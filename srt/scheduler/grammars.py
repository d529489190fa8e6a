"""The grammars that the worker has, as the scheduler knows it: who uses which, and what is to be sent.

Submit ──► loading ──GrammarLoaded──► loaded, with users ⇄ unused ──► DropGrammars
           requests wait outside the queue                 the least lately used first
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sapwood.srt.messages import DropGrammars, Grammar, LoadGrammar
from sapwood.srt.scheduler.request import Request

MAX_UNUSED = 64
MAX_UNUSED_BYTES = 16 * 2**20
"""Of the text of grammars that nobody uses. In the worker one takes up to some 30 MB, once it was walked far."""


@dataclass(slots=True)
class _Known:
    """A grammar that was sent; it has so many `users`, of which some are `waiting` until it is `loaded`."""

    grammar: Grammar
    users: int = 0
    loaded: bool = False
    waiting: dict[int, Request] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.grammar.text.encode())


class Grammars:
    """Those of one worker, the `generation`-th: what another one has said of a key is not meant for it."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.most_unused = MAX_UNUSED
        self.orders: list[LoadGrammar | DropGrammars] = []
        """To be sent to the worker, in order, before the next step."""
        self._known: dict[bytes, _Known] = {}
        self._unused: OrderedDict[bytes, _Known] = OrderedDict()
        self._unused_bytes = 0

    def name(self, grammar: Grammar) -> bytes:
        """The key by which the worker knows it."""
        return grammar.key + (self.generation.to_bytes(4, "little") if self.generation else b"")

    def join(self, request: Request) -> None:
        """`request` uses its grammar until it leaves; it is `loading` until the worker has that."""
        grammar = request.grammar
        assert grammar is not None
        name = self.name(grammar)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Known(grammar)
            self.orders.append(LoadGrammar(name, grammar.text))
        elif self._unused.pop(name, None) is not None:
            self._unused_bytes -= known.size
        # One text for all: each message has its own.
        request.grammar = known.grammar
        request.loading = not known.loaded
        known.users += 1
        if request.loading:
            known.waiting[request.key] = request

    def leave(self, request: Request) -> None:
        """The request has ended."""
        if request.grammar is None:
            return
        name = self.name(request.grammar)
        known = self._known.get(name)
        if known is None:
            return  # it could not be loaded
        known.waiting.pop(request.key, None)
        known.users -= 1
        assert known.users >= 0, "a grammar was left twice"
        if known.users == 0 and known.loaded:
            self._set_aside(name, known)

    def loaded(self, name: bytes, failed: bool) -> list[Request]:
        """The worker has it, or cannot have it: those who wait for that, in order."""
        known = self._known.get(name)
        if known is None or known.loaded:
            return []
        waiting, known.waiting = list(known.waiting.values()), {}
        for request in waiting:
            request.loading = False
        if failed:
            del self._known[name]
            return waiting
        known.loaded = True
        if known.users == 0:
            self._set_aside(name, known)
        return waiting

    def forget_users(self) -> None:
        """All requests have ended; the worker has what it has."""
        for name, known in list(self._known.items()):
            known.waiting.clear()
            used, known.users = known.users, 0
            if used and known.loaded:
                self._set_aside(name, known)

    def check(self, requests: list[Request]) -> None:
        """`requests` are all that there are: AssertionError if users were not counted well."""
        users: dict[bytes, int] = {}
        for request in requests:
            if request.grammar is not None:
                name = self.name(request.grammar)
                users[name] = users.get(name, 0) + 1
                assert request.loading == (request.key in self._known[name].waiting)
        assert users == {name: known.users for name, known in self._known.items() if known.users}
        unused = {name for name, known in self._known.items() if known.loaded and not known.users}
        assert unused == set(self._unused), "an unused grammar is kept for ever, or a used one is not"
        assert self._unused_bytes == sum(known.size for known in self._unused.values())

    def _set_aside(self, name: bytes, known: _Known) -> None:
        self._unused[name] = known
        self._unused_bytes += known.size
        self._drop()

    def _drop(self) -> None:
        dropped = []
        while len(self._unused) > self.most_unused or self._unused_bytes > MAX_UNUSED_BYTES:
            name, known = self._unused.popitem(last=False)
            self._unused_bytes -= known.size
            del self._known[name]
            dropped.append(name)
        if dropped:
            self.orders.append(DropGrammars(dropped))
