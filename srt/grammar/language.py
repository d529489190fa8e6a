"""The strings that a pattern's tree stands for: without anchors, found anywhere or as a whole, as Rust regex.

An anchor is exact wherever it stands: `^` in the middle of a branch means that what is before it is empty. So
each tree is a union of at most four: bound to the beginning, to the end, to both or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, product

from sapwood.srt.grammar import charset
from sapwood.srt.grammar.charset import Ranges
from sapwood.srt.grammar.regex import EMPTY, Anchor, Chars, Choice, Node, Repeat, Sequence

Edges = tuple[bool, bool]
"""Whether strings begin and end where the text does."""
FREE: Edges = (False, False)
ANYTHING = Repeat(Chars(charset.ALL), 0, None)
NOTHING = Choice(())


def searched(node: Node) -> Node:
    """The strings in which a pattern is found. Raises ValueError if an anchor is repeated."""
    options = []
    for edges, part in bound(node).items():
        before, after = ((() if edge else (ANYTHING,)) for edge in edges)
        options.append(Sequence((*before, trimmed(part, edges), *after)))
    return Choice(tuple(options))


def whole(node: Node) -> Node:
    """The strings that a pattern matches from end to end. Raises ValueError if an anchor is repeated."""
    return Choice(tuple(bound(node).values()))


def bound(node: Node) -> dict[Edges, Node]:
    """A pattern's strings by their edges, without anchors. Raises ValueError if an anchor is repeated."""
    if isinstance(node, Anchor):
        return {(not node.end, node.end): EMPTY}
    if isinstance(node, Choice):
        return _united((edges, part) for option in node.options for edges, part in bound(option).items())
    if isinstance(node, Sequence):
        return _sequence(node)
    if isinstance(node, Repeat):
        inner = bound(node.node)
        if set(inner) <= {FREE}:
            return {FREE: Repeat(inner.get(FREE, NOTHING), node.low, node.high)}
        if node.high is None or node.high > 1:
            raise ValueError("an anchor inside a repeated group is not supported")
        return inner if node.low else bound(Choice((node.node, EMPTY) if node.high else (EMPTY,)))
    return {FREE: node}


def trimmed(node: Node, edges: Edges) -> Node:
    """The shortest strings of a tree that are found wherever longer ones are.

    At an edge that is not bound a repeat is no longer than it must be: else an automaton would count from all
    places where one may have begun.
    """
    for last in (False, True):
        if not edges[last]:
            node = _shortest(node, last)
    return node


def _shortest(node: Node, last: bool) -> Node:
    if isinstance(node, Repeat):
        return Repeat(node.node, node.low, node.low) if node.low else EMPTY
    if isinstance(node, Choice):
        return Choice(tuple(_shortest(option, last) for option in node.options))
    if not isinstance(node, Sequence):
        return node
    parts, at = list(node.parts), -1 if last else 0
    while parts:
        parts[at] = _shortest(parts[at], last)
        if parts[at] != EMPTY:
            break
        parts.pop(at)
    return Sequence(tuple(parts))


def _united(parts: Iterable[tuple[Edges, Node]]) -> dict[Edges, Node]:
    found: dict[Edges, list[Node]] = {}
    for edges, part in parts:
        found.setdefault(edges, []).append(part)
    return {edges: nodes[0] if len(nodes) == 1 else Choice(tuple(nodes)) for edges, nodes in found.items()}


def _sequence(node: Sequence) -> dict[Edges, Node]:
    total: dict[Edges, Node] = {FREE: EMPTY}
    for free, run in groupby(map(bound, node.parts), lambda part: set(part) <= {FREE}):
        parts = list(run)
        if free:
            parts = [{FREE: Sequence(tuple(part.get(FREE, NOTHING) for part in parts))}]
        for part in parts:
            total = _united(_joined(total, part))
    return total


def _joined(first: dict[Edges, Node], second: dict[Edges, Node]) -> Iterator[tuple[Edges, Node]]:
    for (left, before), (right, after) in product(first.items(), second.items()):
        # An end asserted on the left lets the right be empty only, and a beginning on the right the left.
        if (left[1] and not nullable(after)) or (right[0] and not nullable(before)):
            continue
        pair = (EMPTY if right[0] else before, EMPTY if left[1] else after)
        edges = (left[0] or right[0], left[1] or right[1])
        # Flat, or a pattern of many parts would be nested as deep.
        flat = [node.parts if isinstance(node, Sequence) else (node,) for node in pair]
        yield edges, Sequence((*flat[0], *flat[1]))


def nullable(node: Node) -> bool:
    """Whether the empty string is one of a tree's (which has no anchors)."""
    if isinstance(node, Sequence):
        return all(map(nullable, node.parts))
    if isinstance(node, Choice):
        return any(map(nullable, node.options))
    return isinstance(node, Repeat) and (node.low == 0 or nullable(node.node))


def written(node: Node, chars: Callable[[Ranges], str]) -> str:
    """A tree without anchors as a Rust regex. `chars` makes an atom of each set of characters."""
    if isinstance(node, Chars):
        return chars(node.ranges) if node.ranges else NOTHING_TEXT
    if isinstance(node, Sequence):
        return "".join(_grouped(part, chars) for part in node.parts)
    if isinstance(node, Choice):
        return "|".join(written(option, chars) for option in node.options) if node.options else NOTHING_TEXT
    if isinstance(node, Repeat):
        inner = written(node.node, chars)
        if not inner:
            return ""
        return (inner if isinstance(node.node, Chars) else f"(?:{inner})") + counted(node.low, node.high)
    raise AssertionError("an anchor is left")


def _grouped(node: Node, chars: Callable[[Ranges], str]) -> str:
    inner = written(node, chars)
    return f"(?:{inner})" if isinstance(node, Choice) and inner else inner


def counted(low: int, high: int | None) -> str:
    """A repeat as it is written behind what is repeated."""
    if (low, high) in ((0, None), (1, None), (0, 1)):
        return {(0, None): "*", (1, None): "+", (0, 1): "?"}[(low, high)]
    if high is None:
        return f"{{{low},}}"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


NOTHING_TEXT = r"[^\x{0}-\x{10ffff}]"
"""A set without characters."""


def plain(ranges: Ranges) -> str:
    """A set of characters as a Rust regex that can stand between the slashes of a Lark terminal."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _point(ranges[0][0])
    return "[" + "".join(_range(low, high) for low, high in ranges) + "]"


def _range(low: int, high: int) -> str:
    if low == high:
        return _point(low)
    return _point(low) + ("-" if high > low + 1 else "") + _point(high)


def _point(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and (char.isalnum() or char in " \"'_,;:%=<>!@`") else f"\\x{{{point:x}}}"
