"""The parts that a constraint's grammar is made of: literals, JSON, patterns, lists, and free text.

All of one grammar's parts are written into the same Rules, so what is equal in them is there once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import language, regex
from sapwood.srt.grammar.engine import Engine
from sapwood.srt.grammar.lark import Emitter
from sapwood.srt.grammar.limits import MAX_CHOICES, MAX_SHORTEST
from sapwood.srt.grammar.numbers import FRACTION_DIGITS, INTEGER_DIGITS
from sapwood.srt.grammar.rules import Rules, quote
from sapwood.srt.grammar.schema import read

MAX_CUT = 4096
"""Characters of a literal that is cut where JSON is."""
MAX_GAP = 4
"""Line ends between the text after which a constraint begins and what it constrains."""

ANYTHING = "/(?s:.*)/"
_JSON_STRING = r'"(?:[^"\\]|\\.)*"'
_JSON_PIECES = re.compile(
    rf"{_JSON_STRING}|[{{}}\[\]]|[,:] |(?:(?!{_JSON_STRING})[^{{}}\[\],:]|[,:](?! ))+|.", re.DOTALL
)


class Parts:
    """Expressions of one grammar, for a request's `field`; schemas leave their `warnings` here.

    `opening` is what the text begins with after which the constraint begins, if there may be one.

    All methods raise BadRequest naming the field (or the part of it that they are given) and what is wrong.
    """

    def __init__(self, engine: Engine, whitespace: int, field: str, opening: str = "") -> None:
        self.rules = Rules()
        self.warnings: list[str] = []
        self._engine = engine
        self._whitespace = whitespace
        self._field = field
        self._opening = opening

    def refusal(self, reason: str, where: str = "") -> BadRequest:
        return BadRequest(f"{where or self._field}: {reason}", param=self._field)

    def special(self, text: str) -> int | None:
        """The special token that is written so, if there is one."""
        return self._engine.special(text)

    def schema(self, text: str, where: str = "") -> str:
        """The JSON documents that a schema allows."""
        document = read(text, where or self._field)
        self.warnings += document.warnings
        emitter = Emitter(self.rules, document, self._whitespace, self._engine.admits)
        try:
            whole = emitter.document()
        except ValueError as error:
            raise self.refusal(str(error), where) from None
        if whole is None:
            digits = f"{INTEGER_DIGITS} digits before the point and {FRACTION_DIGITS} behind it"
            why = f" that can be written: numbers have at most {digits}" if emitter.unwritten else ""
            raise self.refusal(f"the schema admits no value{why}", where)
        return whole

    def tree(self, text: str, where: str = "") -> regex.Node:
        """The texts that a pattern matches as a whole."""
        if not text:
            raise self.refusal("an empty pattern admits only the empty text", where)
        try:
            node = regex.parse(text)
            shortest = regex.shortest(node)
            if shortest > MAX_SHORTEST:
                raise ValueError(
                    f"the shortest text that it matches has {shortest} characters, above the limit of"
                    f" {MAX_SHORTEST}"
                )
            return language.whole(node)
        except ValueError as error:
            raise self.refusal(str(error), where) from None

    def pattern(self, text: str, where: str = "") -> str:
        """A terminal of the texts that a pattern matches as a whole."""
        return self.rules.terminal(f"/{language.written(self.tree(text, where), language.plain) or '(?:)'}/")

    def choices(self, text: str) -> str:
        """A terminal of the texts in a JSON list."""
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise self.refusal(f"is not valid JSON: {error}") from None
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_CHOICES:
            got = f"{len(listed)} of them" if isinstance(listed, list) else f"{listed!r:.80}"
            raise self.refusal(f"must be a list of 1 to {MAX_CHOICES} strings, got {got}")
        for index, choice in enumerate(listed):
            if not isinstance(choice, str) or not choice:
                raise self.refusal(f"[{index}] must be a string that is not empty, got {choice!r:.80}")
            if any("\ud800" <= char <= "\udfff" for char in choice):
                raise self.refusal(f"[{index}] is not valid Unicode: it has half a surrogate pair")
        return self.rules.terminal(" | ".join(quote(choice) for choice in dict.fromkeys(listed)))

    def literal(self, text: str) -> str:
        """One text, in which a special token that is written so may stand for what it is written as.

        It is cut where JSON is, so that a document may begin as it does.
        """
        found: list[str] = []
        for part, token in self._engine.pieces(text):
            if token is None:
                found += map(quote, _JSON_PIECES.findall(part) if len(part) <= MAX_CUT else [part])
            else:
                found.append(f"(<[{token}]> | {quote(part)})")
        return " ".join(found) or '""'

    def free(self, without: Sequence[str]) -> str:
        """A terminal of any text, the empty one too, in which none of some strings is.

        Nor is the opening of the text after which the constraint begins: it would be taken for more of this.
        """
        without = [*without, self._opening] if self._opening else without
        if not without:
            return self.rules.terminal(ANYTHING)
        strings = regex.Choice(tuple(regex.text(text) for text in without))
        unwanted = language.written(language.searched(strings), language.plain)
        return self.rules.terminal(f"{ANYTHING} & ~/{unwanted}/")

    def text(self, ends: Sequence[str], without: Sequence[str] = (), before: str = "") -> str:
        """`until` the first of some ends; without any, free text (or what stands before) and no end."""
        if not ends:
            return before or self.free(without)
        return f"({' | '.join(self.until(end, without, before) for end in ends)})"

    def until(self, ending: str, without: Sequence[str] = (), before: str = "") -> str:
        """Free text up to the first `ending`, with it, and without some other strings.

        With `before`, a terminal, it is that which stands before the ending.
        """
        lazy = self.rules.reserve()
        self.rules.define(
            f"{lazy}[lazy]", self.rules.terminal(f"{before or self.free(without)} {quote(ending)}")
        )
        token = self._engine.special(ending)
        if token is None:
            return lazy
        return self.rules.rule(f"{lazy} | {before or self.free([*without, ending])} <[{token}]>")

    def nested(self, text: str) -> str:
        """A whole Lark grammar as a part of this one."""
        return f"%lark {{\n{text}\n}}"

    def whole(self, body: str, after: str) -> str:
        """The grammar of a body, which begins after a text if that is not empty.

        With an opening the body does so only in a text that begins with that, and at once in any other.
        """
        if after:
            gap = self.rules.terminal(f"/\\n{{1,{MAX_GAP}}}/")
            opening, self._opening = self._opening, ""
            before = f"{self.until(after)} {gap}?"
            if opening:
                before = f"({self.rules.rule(f'{self.literal(opening)} {before}')})?"
            body = f"{before} {self.rules.rule(body)}"
        return self.rules.text(body)
