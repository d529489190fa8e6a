"""A grammar being written: rules and terminals in the engine's dialect of Lark, equal ones only once."""

from __future__ import annotations

import json
import re

from sapwood.srt.grammar.json_text import PRELUDE

MAX_TEXT = 1 << 20
"""Bytes of a written grammar."""
MAX_NESTED = 1000
"""Rules that lead to each other, one after the other."""
MAX_LEVELS = 1200
"""The same with the brackets within each other in each of them."""
_NAMES = re.compile(r'"(?:[^"\\]|\\.)*"|\br\d+\b|[()]')


class Rules:
    """Rules (lower case, context-free) and terminals (upper case, regular).

    The lexer takes the longest match: what may follow a terminal must never continue it, nor another one that
    may stand in its place.
    """

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._size = self._count = 0

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._name(body, "r")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body; a plain literal is its own name."""
        return body if body.startswith('"') and is_literal(body) else self._name(body, "T")

    def reserve(self) -> str:
        """The name of a rule whose body is told later, by `define`."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, body: str) -> None:
        """Tell the body of a reserved rule (`name::_` for one with a parameter).

        Raises ValueError if the grammar becomes too large, as `rule` and `terminal` do.
        """
        self._bodies[name] = body
        self._size += len(name) + len(body)
        if self._size > MAX_TEXT:
            raise ValueError(f"its grammar has more than {MAX_TEXT} bytes")

    def text(self, start: str) -> str:
        """The whole grammar, which begins at an expression. Raises ValueError if its rules are too deep."""
        self._check_depth(start)
        lines = [f"{name}: {body}" for name, body in self._bodies.items()]
        prelude = [PRELUDE] if any("STRING" in line or "CHAR" in line for line in lines) else []
        return "\n".join(["%llguidance {}", f"start: {start}", *lines, *prelude, ""])

    def _check_depth(self, start: str) -> None:
        # The engine reads a rule within the rule that it is met in, on its stack.
        bodies = {name.partition("::")[0].partition("[")[0]: body for name, body in self._bodies.items()}
        seen: set[str] = set()
        names, total = _within(start)
        path = [(iter(names), total)]
        while path:
            name = next(path[-1][0], None)
            if name is None:
                total -= path.pop()[1]
            elif name not in seen and name in bodies:
                seen.add(name)
                names, levels = _within(bodies[name])
                total += levels
                path.append((iter(names), levels))
                if len(path) > MAX_NESTED or total > MAX_LEVELS:
                    what = f"{MAX_NESTED} rules, or {MAX_LEVELS} rules and brackets,"
                    raise ValueError(f"its grammar has more than {what} within each other")

    def _name(self, body: str, kind: str) -> str:
        key = kind + body
        if key not in self._named:
            self._count += 1
            self._named[key] = f"{kind}{self._count}"
            self.define(self._named[key], body)
        return self._named[key]


def _within(body: str) -> tuple[list[str], int]:
    """The rules in a body, and how many levels it has itself."""
    names, depth, most = [], 0, 0
    for found in _NAMES.findall(body):
        if found == "(":
            depth += 1
            most = max(most, depth)
        elif found == ")":
            depth -= 1
        elif found[0] != '"':
            names.append(found)
    return names, 1 + most


def quote(text: str) -> str:
    """A text as a literal in a grammar."""
    return json.dumps(text)


def is_literal(body: str) -> bool:
    """Whether a body is one quoted literal."""
    try:
        return isinstance(json.loads(body), str)
    except ValueError:
        return False


def repeated(body: str, low: int, high: int | None) -> str:
    """A rule's part so many times (None: without end)."""
    if (low, high) == (1, 1) or high == 0:
        return body if high else ""
    if high is None and low < 2:
        return f"({body}){'+' if low else '*'}"
    if (low, high) == (0, 1):
        return f"({body})?"
    return f"({body}){{{low},{'' if high is None else high}}}"
