"""Regular expressions of ECMA-262 (flag u), read into a small tree; what is not regular is refused by name.

Where the older syntax or Python's means the same thing and u would refuse it (`\\-`, a lone `{`, `(?P<n>`)
it is taken too. Lazy quantifiers mean the same strings as greedy ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sapwood.srt.grammar import charset
from sapwood.srt.grammar.charset import Ranges
from sapwood.srt.grammar.limits import MAX_REPEAT

MAX_SIZE = 1_000_000
"""Characters that a pattern stands for when its counted repeats are written out."""
MAX_DEPTH = 64
MAX_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other; without parts the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of the options; without options no string at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times (None: any number of) the same."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning (`^`) or the end (`$`) of the text."""

    end: bool


Node = Chars | Sequence | Choice | Repeat | Anchor
EMPTY = Sequence(())


class NoPattern(ValueError):
    """What is written is no pattern in any dialect."""


def parse(pattern: str, properties: bool = True) -> Node:
    """The tree of a pattern. Raises ValueError naming the construct that is not supported and where it is, or
    NoPattern saying what is wrong.

    Without `properties`, `\\p{...}` is not: its sets are large, and take a while to make.
    """
    if len(pattern) > MAX_CHARS:
        raise ValueError(f"a pattern has at most {MAX_CHARS} characters, this one has {len(pattern)}")
    reader = _Reader(pattern, properties)
    node = reader.choice(0)
    if reader.at < len(pattern):
        raise reader.broken("an unmatched )")
    if size(node) > MAX_SIZE:
        raise ValueError(f"the pattern's counted repeats stand for more than {MAX_SIZE} characters")
    return node


def size(node: Node) -> int:
    """How many characters and choices a tree has when its repeats are written out."""
    if isinstance(node, Repeat):
        return max(1, node.high if node.high is not None else node.low) * size(node.node)
    return 1 + sum(map(size, parts_of(node)))


def shortest(node: Node) -> int:
    """How many characters the shortest string of a tree has; of one that has none, about so many."""
    if isinstance(node, Repeat):
        return node.low * shortest(node.node) if node.low else 0
    if isinstance(node, Choice):
        return min(map(shortest, node.options), default=0)
    return sum(map(shortest, parts_of(node))) + isinstance(node, Chars)


def parts_of(tree: Any) -> tuple[Any, ...]:
    """What a tree is made of, which may be trees of another kind (lexemes.py); nothing if it is a leaf."""
    if isinstance(tree, Sequence):
        return tree.parts
    if isinstance(tree, Choice):
        return tree.options
    return (tree.node,) if isinstance(tree, Repeat) else ()


def rebuilt(tree: Any, change: Callable[[Any], Any]) -> Node:
    """The same tree with its parts changed."""
    if isinstance(tree, Sequence):
        return Sequence(tuple(map(change, tree.parts)))
    if isinstance(tree, Choice):
        return Choice(tuple(map(change, tree.options)))
    return Repeat(change(tree.node), tree.low, tree.high) if isinstance(tree, Repeat) else tree


def sets_of(tree: Any) -> set[Ranges]:
    """All sets of characters in a tree."""
    if isinstance(tree, Chars):
        return {tree.ranges}
    return {ranges for part in parts_of(tree) for ranges in sets_of(part)}


def text(value: str) -> Node:
    """The tree of one string."""
    return Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in value))


_CLASSES = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_GROUPS = {
    "(?=": "lookahead (?=",
    "(?!": "negative lookahead (?!",
    "(?<=": "lookbehind (?<=",
    "(?<!": "negative lookbehind (?<!",
    "(?>": "an atomic group (?>",
    "(?P=": "a backreference (?P=",
    "(?(": "a conditional group (?(",
    "(?#": "a comment (?#",
}
_HEX = set("0123456789abcdefABCDEF")
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Reader:
    def __init__(self, pattern: str, properties: bool = True) -> None:
        self.pattern = pattern
        self.properties = properties
        self.at = 0

    def error(self, what: str, at: int | None = None) -> ValueError:
        return ValueError(f"{what} at position {self.at if at is None else at} is not supported")

    def broken(self, what: str, at: int | None = None) -> NoPattern:
        return NoPattern(f"no pattern: {what} at position {self.at if at is None else at}")

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.at : self.at + count]

    def take(self, count: int = 1) -> str:
        taken = self.peek(count)
        self.at += len(taken)
        return taken

    def choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"groups are nested at most {MAX_DEPTH} deep")
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.take()
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            start = self.at
            atom = self.atom(depth)
            parts.append(self.quantified(atom, start))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def atom(self, depth: int) -> Node:
        char = self.peek()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return Chars(self.set())
        if char in "*+?" or (char == "{" and self.counts() is not None):
            raise self.broken(f"a quantifier {char} with nothing before it")
        if char == "\\":
            return Chars(self.escape(inside=False))
        self.take()
        if char in "^$":
            return Anchor(char == "$")
        return Chars(charset.complement(charset.LINE_ENDS) if char == "." else self.single(char))

    def single(self, char: str) -> Ranges:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self.broken("a lone surrogate", self.at - 1)
        return ((ord(char), ord(char)),)

    def group(self, depth: int) -> Node:
        start = self.at
        for opening, name in _GROUPS.items():
            if self.pattern.startswith(opening, start):
                raise self.error(name)
        self.take()
        if self.peek() == "?":
            self.take()
            if self.peek() == ":":
                self.take()
            elif self.peek() == "<" or self.peek(2) == "P<":
                name = self.pattern[self.at :].partition("<")[2].partition(">")[0]
                if not name.isidentifier():
                    raise self.broken("a bad group name", start)
                self.at = self.pattern.index(">", self.at) + 1
            else:
                raise self.error("an inline flag (?" + self.peek(), start)
        node = self.choice(depth + 1)
        if self.take() != ")":
            raise self.broken("an unmatched (", start)
        return node

    def counts(self) -> tuple[int, int | None] | None:
        """The counted repeat that begins here, which stays unread; None if a `{` is only a character."""
        body, closed, _ = self.pattern[self.at + 1 :].partition("}")
        low, comma, high = body.partition(",")
        if not closed or not all(part.isascii() and part.isdigit() for part in (low, high) if part):
            return None
        if not low:
            if comma:
                raise self.error("a repeat without its lower bound, {" + body + "},")
            return None
        if len(low) > 9 or len(high) > 9 or max(int(low), int(high or 0)) > MAX_REPEAT:
            raise self.error(f"a repeat {{{body}}} of more than {MAX_REPEAT}")
        if high and int(high) < int(low):
            raise self.broken(f"a repeat {{{body}}} with its bounds out of order")
        return int(low), (int(high) if high else None if comma else int(low))

    def quantified(self, node: Node, start: int) -> Node:
        char = self.peek()
        counts = self.counts() if char == "{" else _QUANTIFIERS.get(char)
        if counts is None:
            return node
        if self.pattern[start] in "^$":
            raise self.error(f"a repeated anchor {self.pattern[start]}", start)
        self.at = self.pattern.index("}", self.at) + 1 if char == "{" else self.at + 1
        if self.peek() == "?":
            self.take()
        elif self.peek() == "+":
            raise self.error("a possessive quantifier +")
        if self.peek() in ("*", "+", "?") or (self.peek() == "{" and self.counts() is not None):
            raise self.broken(f"a quantifier {self.peek()} after a quantifier")
        low, high = counts
        return Repeat(node, low, high)

    def set(self) -> Ranges:
        start = self.at
        self.take()
        negated = self.peek() == "^"
        if negated:
            self.take()
        pairs: list[tuple[int, int]] = []
        while self.peek() != "]":
            if not self.peek():
                raise self.broken("an unmatched [", start)
            first = self.member()
            if self.peek() != "-" or self.peek(2) in ("-]", "-"):
                pairs += first
                continue
            dash, at = self.take(), self.at - 1
            last = self.member()
            if _point(first) is None or _point(last) is None:
                # As without u, and as everywhere where it is no error: a class is no end of a range.
                pairs += [*first, (ord(dash), ord(dash)), *last]
            elif first[0][0] > last[0][0]:
                raise self.broken("a range with its ends out of order", at)
            else:
                pairs.append((first[0][0], last[0][0]))
        self.take()
        found = charset.union(pairs)
        return charset.complement(found) if negated else found

    def member(self) -> Ranges:
        return self.escape(inside=True) if self.peek() == "\\" else self.single(self.take())

    def escape(self, inside: bool) -> Ranges:
        start = self.at
        self.take()
        char = self.take()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return ranges if char.islower() else charset.complement(ranges)
        if char in ("p", "P"):
            return self.property(start, char == "P")
        if char in ("x", "u"):
            point = self.hexadecimal(start, char)
        elif char == "b" and inside:
            point = 8
        elif char == "c" and self.peek().isascii() and self.peek().isalpha():
            point = ord(self.take()) % 32
        elif char in _CONTROLS and not (char == "0" and self.peek().isdigit()):
            point = _CONTROLS[char]
        elif char and char.isascii() and not char.isalnum() and char.isprintable():
            point = ord(char)
        else:
            raise self.error(_escape_name(char), start)
        return ((point, point),)

    def hexadecimal(self, start: int, kind: str) -> int:
        if kind == "u" and self.peek() == "{":
            digits, closed, _ = self.pattern[self.at + 1 :].partition("}")
            self.at += len(digits) + 2
            wanted = closed and 1 <= len(digits) <= 8
        else:
            digits = self.take(2 if kind == "x" else 4)
            wanted = len(digits) == (2 if kind == "x" else 4)
            if kind == "u" and digits[:1] in ("d", "D") and self.peek(2) == "\\u":
                digits = self.paired(digits)
        point = int(digits, 16) if wanted and set(digits) <= _HEX else -1
        if not 0 <= point <= charset.LAST or 0xD800 <= point <= 0xDFFF:
            raise self.broken(f"a bad escape \\{kind}{digits}", start)
        return point

    def paired(self, high: str) -> str:
        both = high + self.pattern[self.at + 2 : self.at + 6]
        try:
            text = bytes.fromhex(both).decode("utf-16-be") if set(both) <= _HEX else ""
        except ValueError:
            text = ""
        if len(text) != 1:
            return high
        self.at += 6
        return f"{ord(text):x}"

    def property(self, start: int, negated: bool) -> Ranges:
        name, closed, _ = self.pattern[self.at + 1 :].partition("}")
        if self.peek() != "{" or not closed:
            raise self.error("\\p without {...}", start)
        if not self.properties:
            raise self.error("a property \\p{...}", start)
        self.at += len(name) + 2
        try:
            found = charset.category(name)
        except KeyError:
            raise self.error(f"the property \\p{{{name[:40]}}}", start) from None
        return charset.complement(found) if negated else found


def _point(ranges: Ranges) -> int | None:
    return ranges[0][0] if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None


def _escape_name(char: str) -> str:
    if char in ("b", "B"):
        return f"a word boundary \\{char}"
    if char == "k" or (char.isascii() and char.isdigit()):
        return f"a backreference \\{char}"
    return f"an unknown escape \\{char}"
