"""What a `stop_regex` may be: patterns that can be decided, at a bounded cost, while the text comes."""

from __future__ import annotations

from functools import lru_cache

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.positions import Positions
from sapwood.srt.grammar.regex import Anchor, Node, parse, parts_of, size

MAX_SIZE = 1024
"""Characters and choices of all patterns of a request, counted repeats written out."""
MAX_STEPS = 1024
"""Ways from a character of a pattern to the next one: what one character of the output may cost."""
MAX_MATCH = 1024
"""Characters of a match: what begins earlier is no longer a part of one, and need not be held back."""


@lru_cache(maxsize=32)
def automaton(patterns: tuple[str, ...]) -> Positions:
    """The patterns of one request. Raises BadRequest naming the one that is not supported, and why."""
    nodes = [_read(pattern) for pattern in patterns]
    if (total := sum(map(size, nodes))) > MAX_SIZE:
        raise _refused(
            f"stands for {total} characters and choices when its repeats are written out, above the limit of"
            f" {MAX_SIZE}"
        )
    positions = Positions(nodes)
    for number in positions.empty:
        raise _refused(f"{patterns[number]!r} matches the empty text")
    for number in set(range(len(patterns))).difference(positions.found):
        raise _refused(f"{patterns[number]!r} can match nothing")
    if positions.steps > MAX_STEPS:
        raise _refused(
            f"has {positions.steps} ways from one of its characters to the next, above the limit of"
            f" {MAX_STEPS}"
        )
    return positions


def _read(pattern: str) -> Node:
    try:
        node = parse(pattern, properties=False)
    except ValueError as e:
        raise _refused(f"{pattern!r}: {e}") from None
    if _has_end(node):
        raise _refused(
            f"{pattern!r}: the anchor $ is not supported, as where an output ends is not known while it is"
            " written; \\n is the end of a line"
        )
    return node


def _has_end(node: Node) -> bool:
    if isinstance(node, Anchor):
        return node.end
    return any(map(_has_end, parts_of(node)))


def _refused(why: str) -> BadRequest:
    return BadRequest(f"stop_regex {why}", param="stop_regex")
