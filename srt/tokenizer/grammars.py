"""The tokenizer's side of the grammar process: a request's grammar is made while its prompt is encoded."""

from __future__ import annotations

from sapwood.srt.errors import Overloaded
from sapwood.srt.messages import Compile, Compiled, Forget, Generate, Grammar, Ids
from sapwood.srt.tokenizer.delivery import Sender
from sapwood.srt.tokenizer.requests import Request

Encoded = tuple[Request, Generate, Ids]
"""A request with its prompt's ids."""


class _Waiting:
    __slots__ = ("encoded", "grammar", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.grammar: Grammar | None = None
        self.encoded: Encoded | None = None


class Grammars:
    """The constraints of one tokenizer's requests, each from `begin` to `take` or `forget`."""

    def __init__(self, index: int, outbox: Sender) -> None:
        self._index = index
        self._outbox = outbox
        self._waiting: dict[int, _Waiting] = {}

    def begin(self, request: Request, party: str) -> None:
        """Have the request's constraint compiled, if it has one, and that is not done; `party` as in Compile.
        Raises Overloaded."""
        if request.constraint is None or request.key in self._waiting:
            return
        if not self._outbox.send(Compile(request.key, self._index, request.constraint, party)):
            raise Overloaded("the queue of the grammar process is full; try again later")
        self._waiting[request.key] = _Waiting(request)

    def hold(self, encoded: Encoded) -> bool:
        """Whether the request has to wait for its grammar: then `compiled` gives it back."""
        waiting = self._waiting.get(encoded[0].key)
        if waiting is None or waiting.grammar is not None:
            return False
        waiting.encoded = encoded
        return True

    def take(self, request: Request) -> Grammar | None:
        """The request's grammar, which is not kept; None if it has no constraint."""
        waiting = self._waiting.pop(request.key, None)
        return None if waiting is None else waiting.grammar

    def compiled(self, message: Compiled) -> tuple[Request, Encoded | None] | None:
        """Take an answer in: whose it is, and what has been held for it; None if that has ended meanwhile."""
        waiting = self._waiting.get(message.call)
        if waiting is None:
            return None
        waiting.grammar = message.grammar
        if message.error is not None:
            del self._waiting[message.call]
        return waiting.request, waiting.encoded

    def forget(self, request: Request) -> None:
        """The request has ended: nobody needs its grammar any more."""
        waiting = self._waiting.pop(request.key, None)
        if waiting is not None and waiting.grammar is None:
            self._outbox.send(Forget(request.key, self._index))  # unheard, it is made for nothing
