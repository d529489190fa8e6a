"""Grammars of requests: the EBNF of GBNF and xgrammar (`root ::= ...`), or the engine's own dialect of Lark.

EBNF means what its characters say. What in it is regular becomes one terminal where that changes nothing
(lexemes.py). Lark is the engine's: its terminals take the longest match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sapwood.srt.grammar import charset, user_lark
from sapwood.srt.grammar.lexemes import (
    Call,
    Tree,
    calls_of,
    emitted,
    nullable_rules,
    regular_rules,
    starts_of,
)
from sapwood.srt.grammar.limits import MAX_DEPTH, MAX_EBNF_RULES, MAX_REPEAT
from sapwood.srt.grammar.parts import Parts
from sapwood.srt.grammar.regex import Chars, Choice, Node, Repeat, Sequence, text as string

_TOKEN = re.compile(
    r"(?P<space>(?:\s|#[^\n]*)+)|(?P<head>[A-Za-z_][\w.-]*)(?=\s*::=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<is>::=)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[\^?(?:[^\]\\\n]|\\.)*\])|(?P<count>\{[^}\n]*\})|(?P<mark>[()|*+?.])'
)
_COUNT = re.compile(r"\{\s*(\d{1,6})\s*(,?)\s*(\d{1,6})?\s*\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,8})\}|(.))", re.DOTALL
)
_LETTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "b": 8, "0": 0}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


def written(text: str, parts: Parts) -> str:
    """The expression of a grammar. Raises BadRequest naming the rule and the line that is wrong."""
    return parts.nested(checked_lark(text, parts)) if user_lark.is_lark(text) else rules(text, parts)


def checked_lark(text: str, parts: Parts) -> str:
    """A Lark grammar as it is. Raises BadRequest for what `user_lark.check` refuses."""
    try:
        user_lark.check(text)
    except ValueError as error:
        raise parts.refusal(str(error)) from None
    return text


def rules(text: str, parts: Parts, where: str = "", ends: tuple[str, ...] = ()) -> str:
    """The expression of an EBNF grammar, by its rule `root`, and one of the ends behind it, if there are any.

    Raises BadRequest as `written` does.
    """
    trees = _trees(text, parts, where)
    try:
        if not ends or "root" in regular_rules(trees):
            return parts.text(ends, before=emitted(trees, "root", parts.rules))
        # The ends are a part of the grammar, which none of its words takes; special tokens are no text.
        closed: Any = (Call("root"), Choice(tuple(map(string, ends))))
        options = [emitted({**trees, "": Sequence(closed)}, "", parts.rules)]
        special = [token for end in ends if (token := parts.special(end)) is not None]
        options += [f"{emitted(trees, 'root', parts.rules)} <[{token}]>" for token in special]
        return parts.rules.rule(" | ".join(options))
    except ValueError as error:
        raise parts.refusal(str(error), where) from None


def pattern(text: str, parts: Parts, where: str) -> Node | None:
    """The tree of the texts of an EBNF grammar, if that is regular. Raises BadRequest as `written` does."""
    trees = _trees(text, parts, where)
    try:
        return regular_rules(trees).get("root")
    except ValueError as error:
        raise parts.refusal(str(error), where) from None


def _trees(text: str, parts: Parts, where: str) -> dict[str, Tree]:
    reader = _Reader(text, parts, where)
    trees = reader.grammar()
    if "root" not in trees:
        raise parts.refusal("the rule root is missing", where)
    for name, tree in trees.items():
        for call in sorted(calls_of(tree)):
            if call not in trees:
                raise reader.error(f"the rule {call} is not defined, used in {name}", reader.lines[name])
    _check(trees, reader)
    return trees


def _check(trees: dict[str, Tree], reader: _Reader) -> None:
    nullable = nullable_rules(trees)
    starts = {name: starts_of(tree, nullable) for name, tree in trees.items()}
    for name in trees:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            waiting += (new := starts[waiting.pop()] - seen)
            seen |= new
        if name in seen:
            raise reader.error(f"the rule {name} is left-recursive", reader.lines[name])
    ending: set[str] = set()
    while more := {name for name in trees if name not in ending and _ends(trees[name], ending)}:
        ending |= more
    for name in trees:
        if name not in ending:
            raise reader.error(f"the rule {name} admits no text that ends", reader.lines[name])


def _ends(tree: Tree, ending: set[str]) -> bool:
    """Whether there is a text of a tree when there are some of these rules."""
    if isinstance(tree, Call):
        return tree.name in ending
    if isinstance(tree, Repeat):
        return tree.low == 0 or _ends(tree.node, ending)
    if isinstance(tree, Sequence):
        return all(_ends(part, ending) for part in tree.parts)
    if isinstance(tree, Choice):
        return any(_ends(option, ending) for option in tree.options)
    return isinstance(tree, Chars) and bool(tree.ranges)


class _Reader:
    def __init__(self, text: str, parts: Parts, where: str) -> None:
        self.lines: dict[str, int] = {}
        self._parts, self._where = parts, where
        self._tokens = list(self._cut(text))
        self._at = 0

    def error(self, what: str, line: int) -> Exception:
        return self._parts.refusal(f"line {line}: {what}", self._where)

    def _cut(self, text: str) -> Iterator[Token]:
        at, line = 0, 1
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self.error(f"{text[at : at + 20]!r} is not understood", line)
            kind = found.lastgroup or ""
            if kind != "space":
                yield Token(kind, found.group(), line)
            line += found.group().count("\n")
            at = found.end()
        yield Token("end", "", line)

    def grammar(self) -> dict[str, Tree]:
        trees: dict[str, Tree] = {}
        while self._tokens[self._at].kind != "end":
            head = self._take()
            if head.kind != "head":
                raise self.error(f"a rule (name ::= ...) is expected, not {head.text!r:.40}", head.line)
            if head.text in trees:
                raise self.error(f"the rule {head.text} is defined twice", head.line)
            if len(trees) >= MAX_EBNF_RULES:
                raise self.error(f"more than {MAX_EBNF_RULES} rules", head.line)
            self._take()
            self.lines[head.text] = head.line
            trees[head.text] = self._choice(0)
        return trees

    def _take(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _choice(self, depth: int) -> Tree:
        token = self._tokens[self._at]
        if depth > MAX_DEPTH:
            raise self.error(f"groups are nested more than {MAX_DEPTH} deep", token.line)
        options: list[Any] = [self._sequence(depth)]
        while self._tokens[self._at].text == "|":
            self._take()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Tree:
        found: list[Any] = []
        while (token := self._tokens[self._at]).kind not in ("end", "head") and token.text not in ("|", ")"):
            found.append(self._repeated(self._atom(depth)))
        if not found:
            raise self.error('an alternative is empty; the empty text is written ""', token.line)
        return found[0] if len(found) == 1 else Sequence(tuple(found))

    def _atom(self, depth: int) -> Tree:
        token = self._take()
        if token.kind == "name":
            return Call(token.text)
        if token.kind == "text":
            points = [point for point, _ in self._points(token.text[1:-1], token)]
            return Sequence(tuple(Chars(((point, point),)) for point in points))
        if token.kind == "set":
            return Chars(self._set(token))
        if token.text == ".":
            return Chars(charset.ALL)
        if token.text == "(":
            inner = self._choice(depth + 1)
            if self._take().text != ")":
                raise self.error("a ( is not closed", token.line)
            return inner
        raise self.error(f"{token.text[:40]!r} cannot stand here", token.line)

    def _repeated(self, tree: Any) -> Any:
        token = self._tokens[self._at]
        while token.text in ("*", "+", "?") or token.kind == "count":
            self._take()
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token.text) or self._bounds(token)
            tree = Repeat(tree, low, high)
            token = self._tokens[self._at]
        return tree

    def _bounds(self, token: Token) -> tuple[int, int | None]:
        found = _COUNT.fullmatch(token.text)
        low = int(found[1]) if found else -1
        high = None if not found else int(found[3]) if found[3] else None if found[2] else low
        if low < 0 or low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
            raise self.error(f"{token.text[:40]} is no repeat of at most {MAX_REPEAT}", token.line)
        return low, high

    def _points(self, body: str, token: Token) -> Iterator[tuple[int, bool]]:
        """The characters of a text or a set, and whether each was escaped."""
        at = 0
        while at < len(body):
            if body[at] != "\\":
                yield ord(body[at]), False
                at += 1
                continue
            found = _ESCAPE.match(body, at)
            digits = next((group for group in found.groups()[:4] if group), None) if found else None
            if found is None or (digits is None and found[5].isalnum() and found[5] not in _LETTERS):
                raise self.error(f"the escape {body[at : at + 4]!r} is not supported", token.line)
            point = int(digits, 16) if digits else _LETTERS.get(found[5], ord(found[5]))
            if point > charset.LAST or 0xD800 <= point <= 0xDFFF:
                raise self.error(f"{found.group()} is no character", token.line)
            yield point, True
            at = found.end()

    def _set(self, token: Token) -> charset.Ranges:
        body = token.text[1:-1]
        negated = body.startswith("^")
        points = list(self._points(body[negated:], token))
        pairs, at = [], 0
        while at < len(points):
            low = high = points[at][0]
            if at + 2 < len(points) and points[at + 1] == (ord("-"), False):
                high, at = points[at + 2][0], at + 2
            if high < low:
                raise self.error(f"a range in {token.text[:40]} has its ends out of order", token.line)
            pairs.append((low, high))
            at += 1
        found = charset.union(pairs)
        return charset.complement(found) if negated else found
