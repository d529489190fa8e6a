"""Grammars of requests in the engine's dialect of Lark: what may stand in them.

They are cut into tokens as the engine cuts them, so that nothing hides in what looks like a comment, a text
or a regex: where the engine sees a token of no kind that is known here, the grammar is refused.
"""

from __future__ import annotations

import re

from sapwood.srt.grammar.limits import MAX_DEPTH

MAX_NESTED = 1000
"""Rules, and brackets within each other in each: the engine reads one within the other, on its stack."""
_LARK = re.compile(r"^[ \t]*(%llguidance\b|!?\??start[ \t]*:(?!:))", re.MULTILINE)
_TOKEN = re.compile(
    r"(?P<space>\s+|#[^\n]*|//[^\n]*)"
    r'|(?P<text>"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<keyword>%llguidance\s*\{\s*\}|%(?:ignore|import|regex|if))"
    r"|(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)|(?P<terminal>_?[A-Z][_A-Z0-9-]*)"
    r"|(?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<mark>->|::|\.\.|[:,.(){}\[\]~|&=+*?_])"
)
_UNKNOWN = re.compile(r'[%@][\w-]*|<[^<>\s]*>?|"[^"\n]*"?|.', re.DOTALL)
_VALUES = ("text", "regex", "terminal")
_ATTRIBUTES = re.compile(r"(?:lazy|suffix=VALUE)(?:,(?:lazy|suffix=VALUE))*")


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark, and not EBNF."""
    return _LARK.search(text) is not None


def check(text: str) -> None:
    """Raise ValueError, naming the line, for what leads beyond text, or around the limits, or too deep."""
    tokens: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            unknown = _UNKNOWN.match(text, at)
            raise _unsupported(text, at, unknown.group() if unknown else "")
        if found.lastgroup != "space":
            tokens.append(found)
        at = found.end()
    _check_nesting(text, tokens)
    _check_attributes(text, tokens)


def _unsupported(text: str, at: int, what: str) -> ValueError:
    return _error(text, at, f"{what[:40]} is not supported in a Lark grammar")


def _error(text: str, at: int, what: str) -> ValueError:
    line = text.count("\n", 0, at) + 1
    return ValueError(f"line {line}: {what}")


def _check_nesting(text: str, tokens: list[re.Match[str]]) -> None:
    total = depth = deepest = 0
    for token in tokens:
        mark = token.group() if token.lastgroup == "mark" else ""
        if mark in ("(", "[", "{"):
            depth += 1
            total += depth > deepest
            deepest = max(depth, deepest)
        elif mark in (")", "]", "}"):
            depth -= 1
        elif mark == ":":
            total, deepest = total + 1, depth
        if depth < 0 or depth > MAX_DEPTH:
            what = (
                f"brackets are nested more than {MAX_DEPTH} deep"
                if depth > 0
                else f"nothing is open at {mark}"
            )
            raise _error(text, token.start(), what)
        if total > MAX_NESTED:
            raise _error(text, token.start(), f"more than {MAX_NESTED} rules, and brackets within each other")
    if depth:
        raise _error(text, len(text), "a bracket is not closed")


def _check_attributes(text: str, tokens: list[re.Match[str]]) -> None:
    """They are between brackets before a rule's colon; some count tokens, or change how they are drawn."""
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token.lastgroup != "mark":
            continue
        if token.group() == "[":
            opened.append(index)
        if token.group() != "]":
            continue
        start = opened.pop() if opened else index
        if index + 1 == len(tokens) or tokens[index + 1].group() not in (":", "::"):
            continue
        inside = tokens[start + 1 : index]
        said = "".join("VALUE" if one.lastgroup in _VALUES else one.group() for one in inside)
        if not _ATTRIBUTES.fullmatch(said):
            raise _unsupported(text, tokens[start].start(), text[tokens[start].start() : token.end()])
