"""Patterns as one automaton of their characters' positions (Glushkov 1961), counted repeats written out.

What it may cost is known before a character is read: one more takes at most `steps`, whatever the text is.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence as Several
from itertools import accumulate
from typing import NamedTuple

from sapwood.srt.grammar.charset import Ranges
from sapwood.srt.grammar.regex import Anchor, Chars, Choice, Node, Repeat, Sequence

MAX_COLUMNS = 256
"""Kinds of characters whose ways are remembered."""


class Piece(NamedTuple):
    """What a part of a pattern begins and ends with, as sets of positions, and whether it matches nothing.

    `..._at_start`: where the text has only begun, and `^` matches nothing.
    """

    empty: bool = False
    empty_at_start: bool = False
    first: int = 0
    first_at_start: int = 0
    last: int = 0

    def optional(self) -> Piece:
        return self._replace(empty=True, empty_at_start=True)


_NOTHING = Piece(empty=True, empty_at_start=True)
_NEVER = Piece()


class Ways(dict[int, tuple[int, ...]]):
    """Where one may get from each position with one of the characters of `here`, found when it is asked."""

    def __init__(self, follow: Several[int], here: int) -> None:
        self._follow = follow
        self._here = here

    def __missing__(self, position: int) -> tuple[int, ...]:
        ways = self[position] = tuple(_bits(self._follow[position] & self._here))
        return ways


class Column:
    """Where one may get with characters that are in the same sets: from a position, and from nowhere."""

    __slots__ = ("begin", "begin_at_start", "ways")

    def __init__(self, positions: Positions, here: int) -> None:
        self.ways = Ways(positions.follow, here)
        self.begin = tuple(_bits(positions.first & here))
        self.begin_at_start = tuple(_bits(positions.first_at_start & here))


class Positions:
    """The positions of several patterns, side by side.

    `follow` has for each position the set of those that may come next, `first` is the set of those that a
    match may begin with (`first_at_start` at the beginning of the text), `ends[p]` the number of the pattern
    that is matched where position p is reached, or -1; `ending` has the positions where one is. Positions
    from which no pattern can be matched any more are in none of them. `found` are the patterns that can be
    matched at all, `empty` those that match the empty text. `steps` is the most that one character may cost:
    the positions that the one before it can have reached, the ways from these, and the positions that it can
    begin at.
    """

    def __init__(self, nodes: Several[Node]) -> None:
        self._sets: list[Ranges] = []
        self.follow: list[int] = []
        pieces: list[Piece] = []
        self.ends: list[int] = []
        for number, node in enumerate(nodes):
            piece = self._piece(node)
            pieces.append(piece)
            self.ends += [-1] * (len(self._sets) - len(self.ends))
            for position in _bits(piece.last):
                self.ends[position] = number
        useful = self._useful()
        self.follow = [follow & useful for follow in self.follow]
        self.first = self.first_at_start = 0
        for piece in pieces:
            self.first |= piece.first & useful
            self.first_at_start |= piece.first_at_start & useful
        self.ending = frozenset(position for position, number in enumerate(self.ends) if number >= 0)
        self.empty = [i for i, piece in enumerate(pieces) if piece.empty or piece.empty_at_start]
        self.found = [i for i, piece in enumerate(pieces) if piece.first_at_start & useful]
        alike = self._alike()
        self._edges, self._here = self._kinds(alike)
        self.steps = self._steps(alike)
        self._columns: dict[int, Column] = {}
        self._column_of: dict[str, Column] = {}

    def column(self, char: str) -> Column:
        """The ways of a character."""
        column = self._column_of.get(char)
        if column is None:
            here = self._here[bisect(self._edges, ord(char))]
            if len(self._column_of) >= MAX_COLUMNS:
                self._column_of.clear()
                self._columns.clear()
            column = self._column_of[char] = self._columns.setdefault(here, Column(self, here))
        return column

    def _alike(self) -> list[tuple[Ranges, int]]:
        """Each set with its positions."""
        # A repeat's copies share one, which may have hundreds of ranges: it is hashed once.
        sets = {id(ranges): ranges for ranges in self._sets}
        copies = dict.fromkeys(sets, 0)
        for position, ranges in enumerate(self._sets):
            copies[id(ranges)] |= 1 << position
        having: dict[Ranges, int] = {}
        for name, positions in copies.items():
            having[sets[name]] = having.get(sets[name], 0) | positions
        return [*having.items()]

    def _kinds(self, alike: list[tuple[Ranges, int]]) -> tuple[list[int], list[int]]:
        """The code points at which a set begins or has ended, and the positions whose sets have what is below
        the first of them, below the second, and so on."""
        changes: dict[int, int] = {}
        for ranges, positions in alike:
            for low, high in ranges:
                for edge in (low, high + 1):
                    changes[edge] = changes.get(edge, 0) ^ positions
        edges = sorted(changes)
        here = [0]
        for edge in edges:
            here.append(here[-1] ^ changes[edge])
        return edges, here

    def _steps(self, alike: list[tuple[Ranges, int]]) -> int:
        ways = [1 + follow.bit_count() for follow in self.follow]
        reached: list[tuple[int, int]] = []
        begun: list[tuple[int, int]] = []
        for ranges, positions in alike:
            cost = sum(ways[position] for position in _bits(positions))
            first = (positions & self.first_at_start).bit_count()
            for low, high in ranges:
                reached += (low, cost), (high + 1, -cost)
                begun += (low, first), (high + 1, -first)
        return _most(reached) + _most(begun)

    def _useful(self) -> int:
        """The positions from which a pattern can still be matched."""
        useful = sum(1 << position for position, number in enumerate(self.ends) if number >= 0)
        before = -1
        while useful != before:
            before = useful
            for position in range(len(self.follow) - 1, -1, -1):
                if self.follow[position] & useful:
                    useful |= 1 << position
        return useful

    def _piece(self, node: Node) -> Piece:
        if isinstance(node, Chars):
            return self._char(node.ranges)
        if isinstance(node, Anchor):
            assert not node.end, "the end of a text is not known while it comes"
            return Piece(empty_at_start=True)
        if isinstance(node, Repeat):
            return self._repeat(node.node, node.low, node.high)
        if isinstance(node, Choice):
            pieces = [self._piece(option) for option in node.options]
            return Piece(
                any(piece.empty for piece in pieces),
                any(piece.empty_at_start for piece in pieces),
                _union(piece.first for piece in pieces),
                _union(piece.first_at_start for piece in pieces),
                _union(piece.last for piece in pieces),
            )
        piece = _NOTHING
        for part in node.parts:
            piece = self._then(piece, self._piece(part))
        return piece

    def _char(self, ranges: Ranges) -> Piece:
        if not ranges:
            return _NEVER
        self._sets.append(ranges)
        self.follow.append(0)
        position = 1 << (len(self._sets) - 1)
        return Piece(False, False, position, position, position)

    def _then(self, piece: Piece, rest: Piece) -> Piece:
        self._link(piece.last, rest.first)
        return Piece(
            piece.empty and rest.empty,
            piece.empty_at_start and rest.empty_at_start,
            piece.first | (rest.first if piece.empty else 0),
            piece.first_at_start | (rest.first_at_start if piece.empty_at_start else 0),
            rest.last | (piece.last if rest.empty else 0),
        )

    def _link(self, before: int, after: int) -> None:
        if after:
            for position in _bits(before):
                self.follow[position] |= after

    def _repeat(self, node: Node, low: int, high: int | None) -> Piece:
        if high == 0:
            return _NOTHING
        low = 0 if _may_be_empty(node) else low
        piece = _NOTHING
        for _ in range(low - (high is None)):
            piece = self._then(piece, self._piece(node))
        if high is None:
            again = self._piece(node)
            self._link(again.last, again.first)
            return self._then(piece, again if low else again.optional())
        # (x(x(x)?)?)? has one way on from each x, where x?x?x? has many. An empty x would add nothing.
        tail = _NOTHING
        for _ in range(high - low):
            one = self._piece(node)._replace(empty=False, empty_at_start=False)
            tail = self._then(one, tail).optional()
        return self._then(piece, tail)


def _most(changes: Iterable[tuple[int, int]]) -> int:
    """The largest sum on the way, of changes at code points."""
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _may_be_empty(node: Node) -> bool:
    if isinstance(node, Repeat):
        return node.low == 0 or _may_be_empty(node.node)
    if isinstance(node, Choice):
        return any(map(_may_be_empty, node.options))
    return isinstance(node, Sequence) and all(map(_may_be_empty, node.parts))


def _union(sets: Iterator[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _bits(positions: int) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest
