"""Choices after one prompt as a tree of their tokens, and the rows that judge all of it.

    after the prompt   New ─┬─ York ── City     row 1: New York City, and Jersey beside York
                            └─ Jersey ── Shore  row 2: New Jersey Shore, of which only Shore is still judged
    a row computes all its tokens but the last, of which the tree has those before the first one it judges

The hidden state after a token judges all that may come next, so each token that something comes after is
computed once, and a token that nothing comes after is not computed. A row follows the branch with the most
choices below it: with 256 choices no row waits for more than 8 others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sapwood.srt.messages import TextLogprob

MAX_JUDGED = 65_536
"""Logprobs of one row. It may be cut anywhere, and goes on as another one: nothing is computed twice."""


class Row(NamedTuple):
    """After the prompt come the tokens `before`, which are judged, and `path`, of which each is to be judged,
    and with it the tokens `beside` as far as they branch off there. `nodes` are where these come next."""

    before: list[int]
    path: list[int]
    beside: list[int]
    nodes: list[int]


class ChoiceTree:
    """The tree of some choices, each of at least one token. Node 0 is the prompt's end."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._parents = [-1]
        self._tokens = [-1]
        self._values: dict[int, tuple[float, str]] = {}
        self._ends = [self._add(choice) for choice in choices]
        self._ways = self._count_ways()
        self._heads = [0]

    def rows(self) -> list[Row]:
        """Those that can be computed now: what comes before them is judged. None if everything is."""
        heads, self._heads = self._heads, []
        return [self._row(head) for head in heads]

    @property
    def over(self) -> bool:
        """Whether no rows come after those that were given out."""
        return not self._heads

    def tell(self, row: Row, values: Sequence[TextLogprob]) -> None:
        """Take in what a row gave: one value for each token of its path, with those of all `beside` it."""
        assert len(values) == len(row.path), (len(values), len(row.path))
        for node, value in zip(row.nodes, values, strict=True):
            children = self._children[node]
            for token, logprob, text, _raw in value.chosen:
                if token in children:
                    self._values[children[token]] = logprob, text
            self._values[children[value.id]] = value.logprob, value.text

    def judged(self, choice: int) -> list[tuple[int, float, str]]:
        """The tokens of that choice, each with its logprob and text."""
        path = self._path(self._ends[choice])
        return [(self._tokens[node], *self._values[node]) for node in path]

    def _add(self, choice: Sequence[int]) -> int:
        """The node at which the choice ends."""
        node = 0
        for token in choice:
            child = self._children[node].get(token)
            if child is None:
                child = self._children[node][token] = len(self._children)
                self._children.append({})
                self._parents.append(node)
                self._tokens.append(token)
            node = child
        return node

    def _count_ways(self) -> list[int]:
        """For each node, the ends of the tree below it."""
        ways = [0 if children else 1 for children in self._children]
        for node in range(len(ways) - 1, 0, -1):  # children come after their parents
            ways[self._parents[node]] += ways[node]
        return ways

    def _path(self, node: int) -> list[int]:
        """The nodes from the prompt's end, without it, to `node`."""
        path = []
        while node:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def _row(self, head: int) -> Row:
        row = Row([self._tokens[node] for node in self._path(head)], [], [], [])
        beside: set[int] = set()
        node = head
        while children := self._children[node]:
            row.nodes.append(node)
            node = max(children.values(), key=self._worth)
            row.path.append(self._tokens[node])
            for child in children.values():
                if child != node:
                    beside.add(self._tokens[child])
                    self._begin(child)
            if len(row.path) * (1 + len(beside)) >= MAX_JUDGED:
                self._begin(node)
                break
        row.beside.extend(sorted(beside))
        return row

    def _worth(self, node: int) -> tuple[int, bool]:
        """The more there is below, the sooner a row goes on with it."""
        return self._ways[node], bool(self._children[node])

    def _begin(self, node: int) -> None:
        """Something comes after the node: a row will begin there."""
        if self._children[node]:
            self._heads.append(node)
