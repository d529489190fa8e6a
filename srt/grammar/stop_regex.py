"""What a `stop_regex` may be: patterns that can be decided, at a bounded cost, while the text comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.positions import Positions
from sapwood.srt.grammar.regex import Anchor, Node, parse, parts_of, size

MAX_SIZE = 1024
"""Characters and choices of all patterns of a request, counted repeats written out."""
MAX_STEPS = 160
"""For one character of the output (see Positions): at some 35 ns each, so that the worst takes 5 us."""
MAX_STEPS_TOGETHER = 2048
"""Of all choices of a prompt: in a step of the model each has a token, which may have many characters."""
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
            f"takes up to {positions.steps} steps for one character of the output, above the limit of"
            f" {MAX_STEPS}; shorter repeats take fewer"
        )
    return positions


def check(patterns: Sequence[str], n: int) -> None:
    """Raises BadRequest if the patterns cannot be looked for in the `n` choices of a prompt, and why."""
    steps = automaton(tuple(patterns)).steps
    if steps * n > MAX_STEPS_TOGETHER:
        raise _refused(
            f"takes up to {steps} steps for one character of the output, which makes {steps * n} for {n}"
            f" choices, above the limit of {MAX_STEPS_TOGETHER}"
        )


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
