"""The front pass: a JSON schema, read before anything is compiled, as a Document that says exactly the same.

Each place in the schema is a node with a name, and so is each combination of places that reading leads to. A
node's *head* is its form with the shapes at the top known; within them stand the names of other nodes, worked
out when they are asked for. So a recursive schema is met with another, or taken from it, a level at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import applicators, finish, places, wellformed
from sapwood.srt.grammar.algebra import Algebra
from sapwood.srt.grammar.form import ANY, EVERYTHING, Boolean, Document, Form, Null, Number, Ref, String
from sapwood.srt.grammar.keywords import KEYWORDS, LENIENT, is_known
from sapwood.srt.grammar.limits import MAX_ENUM, MAX_RULES, Budget, Inexact, TooMuch
from sapwood.srt.grammar.unknown import unknown
from sapwood.srt.grammar.words import Words

_MAX_HEADS = 48
"""Heads that wait for each other: places that a schema names without a value between them."""
_MAX_AHEAD = 24
"""As many may wait when a part is looked into ahead of time."""
_MAX_POINTER = 400
"""Characters of a pointer in an error."""
_HINT = f'; "{LENIENT}": true at the top of the schema makes this a warning'


def read(text: str, field: str) -> Document:
    """The Document of a JSON schema's text.

    Raises BadRequest, naming `field`, the JSON pointer and the keyword, if the text is no schema, if it
    allows nothing, if a limit is broken, or if something in it cannot be enforced to the letter; the latter
    is a warning if the schema says `"x-lenient": true`.
    """
    root = places.decode(text, field)
    reader = Reader(root, field)
    try:
        reader.check_lenient()
        reader.check_enums()
        for pointer, keyword, reason in unknown(reader.places):
            reader.warn(pointer, keyword, reason)
        return finish.document(reader)
    except TooMuch as error:
        raise reader.refusal(*reader.where, str(error)) from None
    except Loop:
        raise reader.refusal(*reader.where, "the reference leads back to itself without a value") from None


def _less(algebra: Algebra, taken: Form, form: Form) -> Form:
    return algebra.minus(form, taken)


class Loop(Exception):
    """A node's head needs itself."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place (`pointer`), or what all of `parts` allow and none of `barred`, and what `form` allows."""

    pointer: str | None = None
    parts: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    form: Form = EVERYTHING


class Reader:
    """The nodes of one schema and their heads."""

    def __init__(self, root: Any, field: str) -> None:
        self.field = field
        self.places = places.Places(root)
        self.lenient = isinstance(root, dict) and root.get(LENIENT) is True
        self.warnings: dict[str, None] = {}
        self.emptied: list[tuple[str, str]] = []
        self.where = ("", "")
        self.budget = Budget()
        self.algebra = Algebra(self, Words(self.budget), self.budget)
        self.origins: dict[str, tuple[str, str]] = {}
        self._nodes: dict[str, Node] = {}
        self._names: dict[Node, str] = {}
        self._heads: dict[str, Form] = {}
        self._open: list[str] = []
        self._not_ahead: set[str] = set()

    def refusal(self, pointer: str, keyword: str, reason: str) -> BadRequest:
        """The error for a place and a keyword."""
        at = places.below(pointer, keyword) if keyword else pointer
        at = at if len(at) <= _MAX_POINTER else f"{at[: _MAX_POINTER // 2]}...{at[-_MAX_POINTER // 2 :]}"
        return BadRequest(f"{self.field} at {at or 'the top'}: {reason}", param=self.field)

    def check_lenient(self) -> None:
        """Raise BadRequest if the schema's flag of leniency is none."""
        value = self.places.root.get(LENIENT, False) if isinstance(self.places.root, dict) else False
        if not isinstance(value, bool):
            reason = f"{LENIENT} must be true or false, got {wellformed.shown(value)}"
            raise self.refusal("", LENIENT, reason)

    def check_enums(self) -> None:
        """Raise BadRequest if the enums have too many values in all."""
        total, todo = 0, [("", self.places.root)]
        while todo:
            pointer, value = todo.pop()
            if isinstance(value, dict):
                total += len(value["enum"]) if isinstance(value.get("enum"), list) else 0
                if total > MAX_ENUM:
                    raise self.refusal(
                        pointer, "enum", f"the schema's enums have more than {MAX_ENUM} values"
                    )
                todo += [(places.below(pointer, name), part) for name, part in value.items()]
            elif isinstance(value, list):
                todo += [(places.below(pointer, i), part) for i, part in enumerate(value)]

    def place(self, pointer: str) -> str:
        """The name of a place's node. One that is only a reference is where that leads."""
        seen = set()
        while True:
            try:
                schema = self.places.at(pointer)
            except KeyError:
                raise self.refusal(pointer, "", "there is no such place in the schema") from None
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or pointer in seen or not self._bare(schema):
                break
            seen.add(pointer)
            pointer = self.target(pointer, reference)
        return self._named(Node(pointer), "#" + pointer)

    def _bare(self, schema: dict[str, Any]) -> bool:
        silent = ("$ref", "$defs", "definitions", "$schema")
        return all(
            name in silent or name not in KEYWORDS or KEYWORDS[name].status == "annotation" for name in schema
        )

    def target(self, pointer: str, reference: str) -> str:
        """The place that a reference leads to. Raises BadRequest if it is none in this document."""
        try:
            return self.places.resolve(pointer, reference)
        except (KeyError, ValueError):
            reason = (
                f"{wellformed.shown(reference)} leads to no place in the schema; others are never fetched"
            )
            raise self.refusal(pointer, "$ref", reason) from None

    def child(self, pointer: str) -> Form:
        """The form of the schema at a place, as a part of another."""
        schema = self.places.at(pointer)
        if isinstance(schema, bool):
            return ANY if schema else ()
        return self._part(self.place(pointer))

    def _named(self, node: Node, name: str = "") -> str:
        if node not in self._names:
            if len(self._nodes) >= MAX_RULES:
                raise TooMuch(f"the schema leads to more than {MAX_RULES} places and combinations of places")
            self._names[node] = name = name or f"{self.where[0]}+{len(self._nodes)}"
            self._nodes[name] = node
            self.origins[name] = self.where if node.pointer is None else (node.pointer, "")
        return self._names[node]

    def _part(self, name: str) -> Form:
        """A node as a part: its head if that has no parts itself, if it can be had at once; else its name."""
        if name not in self._heads:
            if len(self._open) >= _MAX_AHEAD or name in self._open or name in self._not_ahead:
                return (Ref(name),)
            try:
                self.head(name)
            except Loop:
                self._not_ahead.add(name)
                return (Ref(name),)
        head = self._heads[name]
        if head == EVERYTHING:
            return ANY
        return head if all(isinstance(s, (Null, Boolean, Number, String)) for s in head) else (Ref(name),)

    def both(self, a: Form, b: Form) -> Form:
        """What both parts allow, of which one at least is a Ref."""
        mine, theirs = self._node(a), self._node(b)
        form = self.algebra.meet(mine.form, theirs.form)
        parts = tuple(dict.fromkeys(mine.parts + theirs.parts))
        barred = tuple(dict.fromkeys(mine.barred + theirs.barred))
        if not form or set(parts) & set(barred):
            return ()
        if len(parts) == 1 and not barred and form == EVERYTHING:
            return self._part(parts[0])
        return self._part(self._named(Node(parts=parts, barred=barred, form=form)))

    def without(self, a: Form) -> Form:
        """What a part, which is a Ref, does not allow."""
        node = self._node(a)
        if not node.parts and node.form == EVERYTHING and len(node.barred) == 1:
            return self._part(node.barred[0])
        name = node.parts[0] if node == Node(parts=node.parts[:1]) else self._named(node)
        return self._part(self._named(Node(barred=(name,))))

    def _node(self, form: Form) -> Node:
        """The combination that a part is."""
        if len(form) == 1 and isinstance(form[0], Ref):
            node = self._nodes[form[0].name]
            return Node(parts=(form[0].name,)) if node.pointer is not None else node
        return Node(form=form)

    def head(self, name: str) -> Form:
        """The form of a node with its shapes known at the top. Raises Loop if it needs itself for that."""
        if name in self._heads:
            return self._heads[name]
        if name in self._open:
            raise Loop
        if len(self._open) >= _MAX_HEADS:
            raise TooMuch(f"more than {_MAX_HEADS} places refer to each other without a value between them")
        self.budget.spend()
        self._open.append(name)
        where, node = self.where, self._nodes[name]
        self.where = self.origins[name]
        try:
            head = self._combined(name, node) if node.pointer is None else self._read(node.pointer)
        finally:
            self._open.pop()
        self.where = where
        self._heads[name] = head
        return head

    def _combined(self, name: str, node: Node) -> Form:
        pointer, keyword = self.origins[name]
        found = node.form
        for part in node.parts:
            head = self.head(part)
            found = self.guarded(pointer, keyword, found, partial(self.algebra.meet, head))
        for part in node.barred:
            head = self.head(part)
            found = self.guarded(pointer, keyword, found, partial(_less, self.algebra, head))
        return found

    def guarded(
        self, pointer: str, keyword: str, acc: Form, step: Callable[[Form], Form], *beside: str
    ) -> Form:
        """What a step makes of a form; where that is not exact, a refusal or, if lenient, the same form.

        A step that is not taken is one of its `keyword` and of those `beside` it, and warns of all of them.
        """
        try:
            return step(acc)
        except Inexact as error:
            fault = error.keyword or keyword
            self.inexact(pointer, fault, error.reason)
            for word in dict.fromkeys((keyword, *beside)):
                if word != fault:
                    self.warn(pointer, word, f"it cannot be told without its {fault}")
            return acc
        except wellformed.Malformed as error:
            raise self.refusal(pointer, error.keyword, error.reason) from None

    def check(self, pointer: str, schema: Any) -> None:
        """Raise BadRequest if what stands at a place is no schema, as far as its own keywords go."""
        try:
            wellformed.check(schema)
        except wellformed.Malformed as error:
            raise self.refusal(pointer, error.keyword, error.reason) from None

    def inexact(self, pointer: str, keyword: str, reason: str) -> None:
        """Refuse what cannot be enforced or, if lenient, warn."""
        if not self.lenient:
            raise self.refusal(pointer, keyword, reason + _HINT)
        self.warn(pointer, keyword, reason)

    def warn(self, pointer: str, keyword: str, reason: str) -> None:
        """Note what is not enforced, or what is narrower for it."""
        known = KEYWORDS.get(keyword)
        effect = known.unenforced if known is not None else ""
        message = self.refusal(pointer, keyword, reason).message
        self.warnings[f"{message}; {effect or 'not enforced'}"] = None

    def _read(self, pointer: str) -> Form:
        schema = self.places.at(pointer)
        self.check(pointer, schema)
        if isinstance(schema, bool):
            return EVERYTHING if schema else ()
        schema = self._in_force(pointer, schema)
        found = EVERYTHING
        for keywords, step in applicators.steps_for(schema):
            if found:
                keyword = keywords[0]
                self.where = (pointer, keyword)
                found = self.guarded(pointer, keyword, found, partial(step, self, pointer, schema), *keywords)
                if not found:
                    self.emptied.append((pointer, keyword))
        return found

    def _in_force(self, pointer: str, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords that have an effect here. What is not supported is refused, or named in a warning."""
        kept = {}
        alone = self.places.old and "$ref" in schema
        for name, value in schema.items():
            known = KEYWORDS.get(name)
            if known is None or known.status == "annotation":
                continue
            if (alone and name != "$ref") or not is_known(known, self.places.draft):
                if applicators.steps_for({name: value}):
                    reason = "has no effect beside $ref" if alone else "is no keyword"
                    self.warn(pointer, name, f"it {reason} in draft {self.places.draft}")
            elif known.status == "refused" and value is not False:
                note = f" ({known.note})" if known.note else ""
                self.inexact(pointer, name, f"it is not supported{note}")
            else:
                kept[name] = value
        return kept
