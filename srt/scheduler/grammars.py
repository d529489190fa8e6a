"""The grammars that the worker has, as the scheduler knows it: who uses which, and what is to be sent.

Submit ──► loading ──GrammarLoaded──► loaded, with users ⇄ unused ──► DropGrammars
           requests wait outside the queue                 the least lately used first
           └─ all have left ──► DropGrammars
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sapwood.srt import messages
from sapwood.srt.messages import DropGrammars, Grammar, LoadGrammar
from sapwood.srt.scheduler.request import Request

MAX_UNUSED = 16
MAX_UNUSED_BYTES = 16 * 2**20
"""Of the text of grammars that nobody uses. In the worker one takes up to some 30 MB, once it was walked far.
Of those that are used only rows walk; the others, at most one a request, are as they were compiled."""


@dataclass(slots=True)
class _Known:
    """A grammar that was sent under a `name`; it has so many `users`, of which some are `waiting` until it is
    `loaded`."""

    name: bytes
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
        """By the grammar's own key."""
        self._named: dict[bytes, _Known] = {}
        self._unused: OrderedDict[bytes, _Known] = OrderedDict()
        """By name, too."""
        self._unused_bytes = 0
        self._withdrawn = 0
        """Loads that were dropped before they were answered."""

    def name(self, grammar: Grammar) -> bytes:
        """The key by which the worker knows one that is used."""
        return self._known[grammar.key].name

    def join(self, request: Request) -> None:
        """`request` uses its grammar until it leaves; it is `loading` until the worker has that."""
        grammar = request.grammar
        assert grammar is not None
        known = self._known.get(grammar.key)
        if known is None:
            known = self._order(grammar)
        elif self._unused.pop(known.name, None) is not None:
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
        known = self._known.get(request.grammar.key)
        if known is None:
            return  # it could not be loaded
        known.waiting.pop(request.key, None)
        known.users -= 1
        assert known.users >= 0, "a grammar was left twice"
        if known.users == 0 and known.loaded:
            self._set_aside(known)
        elif known.users == 0:
            self._withdrawn += 1
            self._drop([known])

    def loaded(self, name: bytes, failed: bool) -> list[Request]:
        """The worker has it, or cannot have it: those who wait for that, in order."""
        known = self._named.get(name)
        if known is None or known.loaded:
            return []
        waiting, known.waiting = list(known.waiting.values()), {}
        for request in waiting:
            request.loading = False
        if failed:
            self._forget(known)
            return waiting
        known.loaded = True
        if known.users == 0:
            self._set_aside(known)
        return waiting

    def forget_users(self) -> None:
        """All requests have ended; the worker has what it has."""
        for known in list(self._known.values()):
            known.waiting.clear()
            used, known.users = known.users, 0
            if used and known.loaded:
                self._set_aside(known)

    def check(self, requests: list[Request]) -> None:
        """`requests` are all that there are: AssertionError if users were not counted well."""
        users: dict[bytes, int] = {}
        for request in requests:
            if request.grammar is not None:
                name = self.name(request.grammar)
                users[name] = users.get(name, 0) + 1
                assert request.loading == (request.key in self._named[name].waiting)
        assert users == {name: known.users for name, known in self._named.items() if known.users}
        unused = {name for name, known in self._named.items() if known.loaded and not known.users}
        assert unused == set(self._unused), "an unused grammar is kept for ever, or a used one is not"
        assert self._unused_bytes == sum(known.size for known in self._unused.values())
        assert self._known == {known.grammar.key: known for known in self._named.values()}

    def _order(self, grammar: Grammar) -> _Known:
        # A dead worker may still answer for what it was told, and this one for what was withdrawn.
        suffix = self.generation, self._withdrawn
        name = grammar.key + (messages.pack(suffix) if any(suffix) else b"")
        known = self._known[grammar.key] = self._named[name] = _Known(name, grammar)
        self.orders.append(LoadGrammar(name, grammar.text))
        return known

    def _set_aside(self, known: _Known) -> None:
        self._unused[known.name] = known
        self._unused_bytes += known.size
        dropped = []
        while len(self._unused) > self.most_unused or self._unused_bytes > MAX_UNUSED_BYTES:
            _, oldest = self._unused.popitem(last=False)
            self._unused_bytes -= oldest.size
            dropped.append(oldest)
        if dropped:
            self._drop(dropped)

    def _drop(self, dropped: list[_Known]) -> None:
        for known in dropped:
            self._forget(known)
        self.orders.append(DropGrammars([known.name for known in dropped]))

    def _forget(self, known: _Known) -> None:
        del self._known[known.grammar.key], self._named[known.name]
