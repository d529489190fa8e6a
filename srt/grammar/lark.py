"""A schema's Document as a grammar: what it allows is exactly what the forms say, in one order and layout.

What is scalar at one place is one terminal. String literals and keys end at their quote, and no
separator begins as a number goes on: the lexer's longest match never takes what belongs to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sapwood.srt.grammar import arrays, numbers, strings
from sapwood.srt.grammar.form import (
    ANY_NAME,
    EVERYTHING,
    Array,
    Boolean,
    Document,
    Form,
    Null,
    Number,
    Object,
    Others,
    Ref,
    Shape,
    String,
)
from sapwood.srt.grammar.json_text import PRELUDE
from sapwood.srt.grammar.limits import MAX_ITEMS, MAX_UNIQUE
from sapwood.srt.grammar.members import Member, Members
from sapwood.srt.grammar.rules import Rules, quote, repeated

MAX_PREFIX = 256


class Emitter:
    """Writes one document's forms into `rules`; between tokens stand at most `whitespace` characters.

    `admits` says whether a grammar has any text. All methods raise ValueError with the reason if something
    cannot be enforced.
    """

    def __init__(
        self, rules: Rules, document: Document, whitespace: int, admits: Callable[[str], bool]
    ) -> None:
        self._rules, self._document, self._admits = rules, document, admits
        self._space = f"[ \\t\\n\\r]{{0,{whitespace}}}" if whitespace else ""
        self._comma = rules.terminal(f"/{self._space},{self._space}/") if whitespace else '", "'
        self._colon = rules.terminal(f"/{self._space}:{self._space}/") if whitespace else '": "'
        self._forms: dict[Form, str | None] = {}
        self._references: dict[str, str] = {}
        self._waiting: list[str] = []
        self.unwritten = False
        """Whether there are numbers of which none has few enough digits to be written."""

    def document(self) -> str | None:
        """The expression of the whole document; None if it admits nothing."""
        whole = self.form(self._document.form)
        while self._waiting:
            name = self._waiting.pop()
            body = self.form(self._rule(name))
            if body is None:
                raise ValueError("a part of it that refers to itself admits nothing")
            self._rules.define(self._references[name], body)
        return whole

    def _rule(self, name: str) -> Form:
        return EVERYTHING if name == ANY_NAME else self._document.rules[name]

    def form(self, form: Form) -> str | None:
        """The name of a rule or terminal for a form; None if it admits nothing."""
        if form not in self._forms:
            self._forms[form] = self._written(form)
        return self._forms[form]

    def _written(self, form: Form) -> str | None:
        scalars: list[str] = []
        found: list[str] = []
        for shape in form:
            if isinstance(shape, Number) and (nested := numbers.nested(shape)):
                found.append(nested)
            elif isinstance(shape, Null | Boolean | Number | String):
                scalars += filter(None, [self._scalar(shape)])
            else:
                found += filter(None, [self._composite(shape)])
        if scalars:
            found.insert(0, self._rules.terminal(" | ".join(scalars)))
        if len(found) == 1 and " " not in found[0]:
            return found[0]
        return self._rules.rule(" | ".join(found)) if found else None

    def _scalar(self, shape: Null | Boolean | Number | String) -> str | None:
        if isinstance(shape, Null):
            return '"null"'
        if isinstance(shape, Boolean):
            return " | ".join('"true"' if value else '"false"' for value in shape.values) or None
        if isinstance(shape, Number):
            found = numbers.terminal(shape)
            self.unwritten = self.unwritten or found is None
            return found
        return self._string(shape)

    def _string(self, shape: String) -> str | None:
        if max(shape.low, shape.high or 0) > MAX_ITEMS:
            raise ValueError(f"a length of more than {MAX_ITEMS} characters")
        body = strings.terminal(shape)
        if body is None or not strings.may_be_empty(shape, body):
            return body
        return body if self._admits(f"start: T\nT: {body}\n{PRELUDE}") else None

    def _composite(self, shape: Shape) -> str | None:
        if isinstance(shape, Array):
            body = self._unique(shape) if shape.unique else self._array(shape)
        elif isinstance(shape, Object):
            body = self._object(shape)
        else:
            assert isinstance(shape, Ref)
            return self._reference(shape.name)
        return None if body is None else self._rules.rule(body)

    def _reference(self, name: str) -> str:
        if name not in self._references:
            self._references[name] = self._rules.reserve()
            self._waiting.append(name)
        return self._references[name]

    def _around(self, inner: list[str], ends: str) -> str | None:
        """Sequences between braces or brackets; an empty one is nothing between them."""
        opening, closing = (quote(end) for end in ends)
        if self._space:
            opening = self._rules.terminal(f"/\\{ends[0]}{self._space}/")
        last = self._rules.terminal(f"/{self._space}\\{ends[1]}/") if self._space else closing
        full = [part for part in inner if part]
        found = [f"{part} {last}" for part in full] + ([closing] if len(full) < len(inner) else [])
        return f"{opening} ({' | '.join(found)})" if found else None

    def _array(self, shape: Array) -> str | None:
        if max(shape.low, shape.high or 0) > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items")
        if len(shape.prefix) > MAX_PREFIX:
            raise ValueError(f"more than {MAX_PREFIX} prefixItems")
        prefix = [self.form(item) for item in shape.prefix]
        high = MAX_ITEMS + 1 if shape.high is None else shape.high
        rest = self.form(shape.rest)
        if None in prefix:
            high = min(high, prefix.index(None))
        if rest is None:
            high = min(high, len(prefix))
        if shape.low > high:
            return None
        items = [item for item in prefix[:high] if item is not None]
        most = None if high > MAX_ITEMS else high - len(items)
        tail = ""
        if rest is not None and most != 0:
            tail = repeated(f"{self._comma} {rest}", max(0, shape.low - len(items)), most)
            if not items:
                less = None if most is None else most - 1
                tail = f"{rest} {repeated(f'{self._comma} {rest}', max(0, shape.low - 1), less)}"
        for index in range(len(items) - 1, 0, -1):
            tail = f"{self._comma} {items[index]} {tail}"
            if index >= shape.low:
                tail = self._rules.rule(f"({tail})?")
        whole = f"{items[0]} {tail}" if items else tail
        return self._around([whole, *([""] if whole and shape.low == 0 else [])], "[]")

    def _unique(self, shape: Array) -> str | None:
        """Each item once: a rule whose parameter is the set of those that stand written."""
        items = self._listed(shape.rest)
        count = len(items)
        high = count if shape.high is None else min(count, shape.high)
        if shape.low > high:
            return None
        if count > MAX_UNIQUE:
            raise ValueError(f"uniqueItems with more than {MAX_UNIQUE} different items")
        if high == 0:
            return self._around([""], "[]")
        name, seen = self._rules.reserve(), f"[0:{count}]"
        more = [f'"" %if bit_count_ge({seen}, {shape.low})']
        for bit, item in enumerate(items):
            allowed = f"and(bit_clear({bit}), bit_count_lt({seen}, {high}))"
            more.append(f"{self._comma} {item} {name}::set_bit({bit}) %if {allowed}")
        self._rules.define(f"{name}::_", " | ".join(more))
        whole = [f"{item} {name}::{1 << bit:#x}" for bit, item in enumerate(items)]
        return self._around([*whole, *([""] if shape.low == 0 else [])], "[]")

    def _listed(self, form: Form) -> list[str]:
        """The terminals of a finite list of scalars, one for each value."""
        values = arrays.singles(form)
        if values is None:
            raise ValueError("uniqueItems of what is no finite list of scalars")
        written = [self.form((shape,)) for shape in values]
        return [item for item in written if item is not None]

    def _object(self, shape: Object) -> str | None:
        declared: list[Member] = []
        for prop in shape.properties:
            value = self.form(prop.form)
            if value is not None:
                declared.append(Member(f"{self._key(prop.name)} {value}", prop.required))
            elif prop.required:
                return None
        names = frozenset(prop.name for prop in shape.properties)
        others = [text for kind in shape.others if (text := self._other(kind, names))]
        either = None if not others else others[0] if len(others) == 1 else f"({' | '.join(others)})"
        members = Members(self._rules, self._comma, declared, either, shape.low, shape.high)
        return self._around(members.alternatives(), "{}")

    def _other(self, kind: Others, declared: frozenset[str]) -> str | None:
        value, name = self.form(kind.form), kind.name
        if name.values is not None:
            name = replace(name, values=tuple(text for text in name.values if text not in declared))
        else:
            name = replace(name, excluded=name.excluded | declared)
        key = self._string(name) if value is not None else None
        return None if key is None else f"{self._rules.terminal(key)} {self._colon} {value}"

    def _key(self, name: str) -> str:
        # The colon is a terminal of its own: where other names may stand too, all of them end at their quote.
        spellings = [quote(spelling) for spelling in strings.literals(name)]
        either = spellings[0] if len(spellings) == 1 else f"({' | '.join(spellings)})"
        return f"{either} {self._colon}"
