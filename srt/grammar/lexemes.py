"""Grammars by characters as grammars by terminals, where that is the same.

The engine's lexer takes the longest match: a terminal is exact only if no other one that may stand in its
place, nor itself, could go on with a character that may follow it. Regular parts of rules are tried as
terminals; those that would take too much are cut into their parts, down to single characters, which never do.
So the result is exact for every grammar, and fast for those whose words are told apart as they usually are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sapwood.srt.grammar.automaton import LOST, Automaton, State, whole
from sapwood.srt.grammar.charset import representatives
from sapwood.srt.grammar.language import nullable, plain, written
from sapwood.srt.grammar.limits import Budget, TooMuch
from sapwood.srt.grammar.regex import (
    MAX_SIZE,
    Chars,
    Choice,
    Node,
    Repeat,
    Sequence,
    parts_of,
    rebuilt,
    sets_of,
    size,
)
from sapwood.srt.grammar.rules import Rules, repeated

MAX_STEPS = 500_000


@dataclass(frozen=True, slots=True)
class Call:
    """The text of another rule."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Word:
    """A regular part where it stands: a candidate for a terminal."""

    node: Node


Tree = Call | Word | Node
"""A rule's body: a pattern's tree (without anchors) in which other rules may stand."""


def nullable_rules(trees: dict[str, Tree]) -> set[str]:
    """The rules that may be empty."""
    found: set[str] = set()
    while more := {name for name in trees if name not in found and _empty(trees[name], found)}:
        found |= more
    return found


def _empty(tree: Tree, empties: set[str]) -> bool:
    if isinstance(tree, Call):
        return tree.name in empties
    if isinstance(tree, Word):
        return nullable(tree.node)
    if isinstance(tree, Repeat):
        return tree.low == 0 or _empty(tree.node, empties)
    if isinstance(tree, Choice):
        return any(_empty(option, empties) for option in tree.options)
    return isinstance(tree, Sequence) and all(_empty(part, empties) for part in tree.parts)


def starts_of(tree: Tree, empties: set[str]) -> set[str]:
    """The rules whose text may stand first in a tree's."""
    if isinstance(tree, Call):
        return {tree.name}
    found: set[str] = set()
    for part in parts_of(tree):
        found |= starts_of(part, empties)
        if isinstance(tree, Sequence) and not _empty(part, empties):
            break
    return found


def calls_of(tree: Tree) -> set[str]:
    """The rules that stand in a tree."""
    return {leaf.name for leaf in _leaves(tree) if isinstance(leaf, Call)}


def regular_rules(trees: dict[str, Tree]) -> dict[str, Node]:
    """The rules that do not lead back to themselves, as patterns. Raises ValueError if one is too large."""
    reach = {name: calls_of(tree) for name, tree in trees.items()}
    found: dict[str, Node] = {}
    while more := {name for name in trees if name not in found and reach[name] <= set(found)}:
        for name in more:
            found[name] = _inlined(trees[name], found)
            if size(found[name]) > MAX_SIZE // 10:
                raise ValueError(f"the rule {name} stands for more than {MAX_SIZE // 10} characters")
    return found


def emitted(trees: dict[str, Tree], root: str, rules: Rules) -> str:
    """The expression of a rule in `rules`; a terminal if that is regular. Raises ValueError if the grammar is
    too large."""
    regular = regular_rules(trees)
    if root in regular:
        return _terminal(regular[root], rules)
    kept = {name: _worded(tree, regular) for name, tree in trees.items() if name not in regular}
    try:
        kept = _Separation(kept, root).separated()
    except TooMuch:
        kept = {name: _cut_fully(tree) for name, tree in kept.items()}
    names = {name: rules.reserve() for name in kept}
    for name, tree in kept.items():
        rules.define(names[name], _expression(tree, names, rules))
    return names[root]


def _leaves(tree: Tree) -> Iterator[Call | Word]:
    if isinstance(tree, Call | Word):
        yield tree
    for part in parts_of(tree):
        yield from _leaves(part)


def _inlined(tree: Tree, regular: dict[str, Node]) -> Any:
    return (
        regular[tree.name] if isinstance(tree, Call) else rebuilt(tree, lambda part: _inlined(part, regular))
    )


def _worded(tree: Tree, regular: dict[str, Node]) -> Tree:
    """The largest regular parts as words; those of a sequence stay apart."""
    if all(isinstance(leaf, Call) and leaf.name in regular for leaf in _leaves(tree)):
        node = _inlined(tree, regular)
        literal = isinstance(node, Sequence) and all(isinstance(part, Chars) for part in node.parts)
        if not isinstance(node, Sequence) or literal or isinstance(tree, Call):
            return Word(node)
    if isinstance(tree, Call):
        return tree
    return rebuilt(tree, lambda part: _worded(part, regular))


def _cut(word: Word) -> Tree:
    """A word's parts as words of their own."""
    return rebuilt(word.node, Word) if not isinstance(word.node, Chars) else word


def _cut_fully(tree: Tree) -> Tree:
    if isinstance(tree, Word):
        cut = _cut(tree)
        return cut if cut is tree else _cut_fully(cut)
    return rebuilt(tree, _cut_fully)


def _expression(tree: Tree, names: dict[str, str], rules: Rules) -> str:
    if isinstance(tree, Call):
        return names[tree.name]
    if isinstance(tree, Word):
        return _terminal(tree.node, rules)
    inner = [_expression(part, names, rules) for part in parts_of(tree)]
    if isinstance(tree, Repeat):
        return repeated(inner[0], tree.low, tree.high) or '""'
    return f"({' | '.join(inner)})" if isinstance(tree, Choice) else " ".join(inner) or '""'


def _terminal(node: Node, rules: Rules) -> str:
    regex = written(node, plain)
    return rules.terminal(f"/{regex}/") if regex else '""'


@dataclass(slots=True)
class _Places:
    """Which words may stand first in each rule, and after each word."""

    first: dict[str, set[Word]]
    after_rule: dict[str, set[Word]]
    after: dict[Word, set[Word]] = field(default_factory=dict)


class _Separation:
    """Cuts a grammar's words until none takes what belongs to another. Raises TooMuch if that takes long."""

    def __init__(self, trees: dict[str, Tree], root: str) -> None:
        self._trees, self._root = trees, root
        self._budget = Budget(MAX_STEPS)
        self._automata: dict[Node, Automaton] = {}

    def separated(self) -> dict[str, Tree]:
        while wide := self._too_wide():
            self._trees = {name: self._without(tree, wide) for name, tree in self._trees.items()}
        return self._trees

    def _without(self, tree: Tree, wide: set[Word]) -> Tree:
        if isinstance(tree, Word):
            return _cut(tree) if tree in wide else tree
        return rebuilt(tree, lambda part: self._without(part, wide))

    def _too_wide(self) -> set[Word]:
        places = self._places()
        chars = self._characters()
        firsts = {word: self._first_characters(word, chars) for word in places.after}
        wide: set[Word] = set()
        self._budget.spend(len(places.first[self._root]) ** 2)
        pairs = {(a, b) for a in places.first[self._root] for b in places.first[self._root]}
        waiting = list(pairs)
        while waiting:
            left, right = waiting.pop()
            follow = set().union(*(firsts[word] for word in places.after[left]))
            meet, takes = self._compared(left, right, follow, chars)
            if takes:
                wide.add(right)
            self._budget.spend(len(places.after[left]))
            if meet:
                self._budget.spend(len(places.after[left]) * len(places.after[right]))
                new = {(a, b) for a in places.after[left] for b in places.after[right]} - pairs
                pairs |= new
                waiting += new
        return wide

    def _characters(self) -> list[str]:
        """One character for each way in which the words' sets tell them apart."""
        words = [leaf for tree in self._trees.values() for leaf in _leaves(tree) if isinstance(leaf, Word)]
        sets = {ranges for word in words for ranges in sets_of(word.node)}
        # Each edge of a set is looked for in all of them.
        self._budget.spend(len(sets) * sum(map(len, sets)))
        return representatives(sets)

    def _automaton(self, word: Word) -> Automaton:
        if word.node not in self._automata:
            self._automata[word.node] = whole(word.node, self._budget)
        return self._automata[word.node]

    def _first_characters(self, word: Word, chars: list[str]) -> set[str]:
        automaton = self._automaton(word)
        return {char for char in chars if automaton.step(automaton.start, char, True) != LOST}

    def _compared(self, left: Word, right: Word, follow: set[str], chars: list[str]) -> tuple[bool, bool]:
        """Whether both may end at one place; whether the right one goes on where the left one has ended."""
        a, b = self._automaton(left), self._automaton(right)
        seen: set[tuple[State, State]] = {(a.start, b.start)}
        waiting = [(a.start, b.start, True)]
        meet = takes = False
        while waiting:
            at, other, first = waiting.pop()
            self._budget.spend(len(chars))
            ended = not first and a.accepts(at, False)
            meet = meet or (ended and b.accepts(other, False))
            takes = takes or (ended and any(b.step(other, char, False) != LOST for char in follow))
            for char in chars:
                pair = a.step(at, char, first), b.step(other, char, first)
                if LOST not in pair and pair not in seen:
                    seen.add(pair)
                    waiting.append((*pair, False))
        return meet, takes

    def _places(self) -> _Places:
        empties = nullable_rules(self._trees)
        places = _Places({name: set() for name in self._trees}, {name: set() for name in self._trees})
        for tree in self._trees.values():
            places.after |= {leaf: set() for leaf in _leaves(tree) if isinstance(leaf, Word)}
        changed = True
        while changed:
            before = self._count(places)
            for name, tree in self._trees.items():
                places.first[name] |= self._first(tree, places, empties)
                self._walk(tree, places.after_rule[name], places, empties)
            changed = self._count(places) != before
        return places

    def _count(self, places: _Places) -> int:
        groups = (places.first, places.after_rule, places.after)
        count = sum(len(words) for group in groups for words in group.values())
        self._budget.spend(count // 16)
        return count

    def _first(self, tree: Tree, places: _Places, empties: set[str]) -> set[Word]:
        if isinstance(tree, Word):
            return {tree}
        if isinstance(tree, Call):
            return places.first[tree.name]
        found: set[Word] = set()
        for part in parts_of(tree):
            found |= self._first(part, places, empties)
            if isinstance(tree, Sequence) and not _empty(part, empties):
                break
        return found

    def _walk(self, tree: Tree, after: set[Word], places: _Places, empties: set[str]) -> None:
        if isinstance(tree, Word):
            places.after[tree] |= after
        elif isinstance(tree, Call):
            places.after_rule[tree.name] |= after
        elif isinstance(tree, Repeat):
            again = set() if tree.high == 1 else self._first(tree.node, places, empties)
            self._walk(tree.node, after | again, places, empties)
        elif isinstance(tree, Choice):
            for option in tree.options:
                self._walk(option, after, places, empties)
        elif isinstance(tree, Sequence):
            for part in reversed(tree.parts):
                self._walk(part, after, places, empties)
                first = self._first(part, places, empties)
                after = first | after if _empty(part, empties) else first
