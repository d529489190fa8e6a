"""What waits, and for whom: one party that has much waiting does not keep the others waiting."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Things that wait, each once, for one party or several. Parties take turns, and the things of each come
    in the order in which they were put in."""

    def __init__(self) -> None:
        self._parties: dict[str, dict[T, None]] = {}
        """What each one has waiting; the first of them is next."""
        self._things: dict[T, list[str]] = {}

    def __len__(self) -> int:
        return len(self._things)

    def put(self, thing: T, party: str) -> None:
        """A thing that waits already comes in this party's turn too."""
        theirs = self._parties.setdefault(party, {})
        if thing not in theirs:
            theirs[thing] = None
            self._things.setdefault(thing, []).append(party)

    def take(self) -> T:
        """The next thing, which waits no longer."""
        party, theirs = next(iter(self._parties.items()))
        thing = next(iter(theirs))
        self.drop(thing)
        if party in self._parties:
            self._parties[party] = self._parties.pop(party)
        return thing

    def drop(self, thing: T) -> None:
        """It waits no longer, if it did."""
        for party in self._things.pop(thing, ()):
            theirs = self._parties[party]
            del theirs[thing]
            if not theirs:
                del self._parties[party]

    def shorten(self, party: str) -> T:
        """Of the party that has most waiting (of this one, if none has more) the last thing, which waits no
        longer."""
        longest = max(self._parties, key=lambda its: (len(self._parties[its]), its == party))
        thing = next(reversed(self._parties[longest]))
        self.drop(thing)
        return thing
