"""From the nodes that a schema leads to, to its Document, without what nothing can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sapwood.srt.grammar import arrays, objects
from sapwood.srt.grammar.algebra import Algebra
from sapwood.srt.grammar.applicators import writable
from sapwood.srt.grammar.form import (
    ANY,
    ANY_NAME,
    EVERYTHING,
    Array,
    Document,
    Form,
    Number,
    Object,
    Ref,
    Shape,
)
from sapwood.srt.grammar.limits import Budget, Inexact

if TYPE_CHECKING:
    from sapwood.srt.grammar.schema import Reader


def document(reader: Reader) -> Document:
    """The Document of a schema that has been opened. Raises BadRequest if it allows nothing."""
    root = reader.place("")
    rules = _rules(reader, root)
    alive = _alive(rules, reader.budget)
    pruned = {name: _pruned(form, alive, reader.algebra) for name, form in rules.items() if name in alive}
    if not pruned.get(root):
        at = f" (see {reader.emptied[0][0]}/{reader.emptied[0][1]})" if reader.emptied else ""
        raise reader.refusal("", "", f"the schema admits no value{at}")
    form = pruned[root]
    used = _reachable(form, pruned)
    return Document(
        form=ANY if form == EVERYTHING else form,
        rules={name: rule for name, rule in pruned.items() if name in used},
        warnings=tuple(reader.warnings),
    )


def _rules(reader: Reader, root: str) -> dict[str, Form]:
    """All nodes that are reached from the root, with their forms in the shape that a Document has."""
    rules: dict[str, Form] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name in rules:
            continue
        head = reader.head(name)
        pointer, keyword = reader.origins[name]
        reader.where = (pointer, keyword)
        rules[name] = form = _settled(reader, pointer, keyword, head)
        # In the order in which they are met, so that most rules come before those that they need.
        todo += reversed([ref for ref in dict.fromkeys(_refs(form)) if ref not in rules and ref != ANY_NAME])
    return rules


def _settled(reader: Reader, pointer: str, keyword: str, head: Form) -> Form:
    shapes: list[Shape] = []
    for shape in head:
        shapes += _enforceable(reader, pointer, keyword, shape)
    try:
        return reader.algebra.union(shapes)
    except Inexact as error:
        raise reader.refusal(pointer, error.keyword or keyword, error.reason) from None


def _enforceable(reader: Reader, pointer: str, keyword: str, shape: Shape) -> list[Shape]:
    """The shape as a Document may have it; what of it cannot be is left out, one thing after the other."""
    while True:
        try:
            return _expanded(shape, reader.algebra)
        except Inexact as error:
            reader.inexact(pointer, error.keyword or keyword, error.reason)
            loosened = _loosened(shape, error.keyword)
            if loosened == shape:
                return [shape]
            shape = loosened


def _expanded(shape: Shape, algebra: Algebra) -> list[Shape]:
    if isinstance(shape, Object):
        return [*objects.expand(shape, algebra)]
    if isinstance(shape, Array):
        return [done for one in arrays.expand(shape, algebra) for done in arrays.settle_unique(one, algebra)]
    if isinstance(shape, Number) and (shape.multiple_of or shape.values is not None):
        writable(shape)
    return [shape]


def _loosened(shape: Shape, keyword: str) -> Shape:
    """The shape without what a keyword (empty: some combination) asks for, for a lenient schema."""
    if isinstance(shape, Object) and keyword == "minProperties":
        most = sum(prop.required for prop in shape.properties) + 1
        return replace(shape, low=min(shape.low, most))
    if isinstance(shape, Object):
        return replace(shape, needs=())
    if isinstance(shape, Array):
        return replace(shape, unique=False) if keyword == "uniqueItems" else replace(shape, needs=())
    return replace(shape, multiple_of=()) if isinstance(shape, Number) else shape


def _refs(form: Form) -> Iterator[str]:
    for shape in form:
        if isinstance(shape, Ref):
            yield shape.name
        for part in _parts(shape):
            yield from _refs(part)


def _parts(shape: Shape) -> Iterator[Form]:
    if isinstance(shape, Array):
        yield from shape.prefix
        yield shape.rest
    elif isinstance(shape, Object):
        yield from (prop.form for prop in shape.properties)
        yield from (kind.form for kind in shape.others)


def _alive(rules: dict[str, Form], budget: Budget) -> set[str]:
    """The rules that allow a value of finite size: the least fixed point."""
    alive: set[str] = {ANY_NAME}
    waiting = list(reversed(rules))
    while True:
        left = []
        for name in waiting:
            budget.spend(1 + len(rules[name]))
            if any(_lives(shape, alive) for shape in rules[name]):
                alive.add(name)
            else:
                left.append(name)
        if len(left) == len(waiting):
            return alive
        waiting = left


def _lives(shape: Shape, alive: set[str]) -> bool:
    if isinstance(shape, Ref):
        return shape.name in alive
    if isinstance(shape, Array):
        needed = [arrays.item(shape, i) for i in range(min(shape.low, len(shape.prefix) + 1))]
        return all(any(_lives(part, alive) for part in form) for form in needed)
    if not isinstance(shape, Object):
        return True
    required = [prop for prop in shape.properties if prop.required]
    if not all(any(_lives(part, alive) for part in prop.form) for prop in required):
        return False
    if shape.low <= len(required):
        return True
    free = [prop.form for prop in shape.properties if not prop.required] + [
        kind.form for kind in shape.others
    ]
    return any(_lives(part, alive) for form in free for part in form)


def _pruned(form: Form, alive: set[str], algebra: Algebra) -> Form:
    """The form without what nothing can be."""
    kept = (_pruned_shape(shape, alive, algebra) for shape in form if _lives(shape, alive))
    return tuple(shape for shape in kept if shape is not None)


def _pruned_shape(shape: Shape, alive: set[str], algebra: Algebra) -> Shape | None:
    if isinstance(shape, Array):
        prefix = tuple(_pruned(part, alive, algebra) for part in shape.prefix)
        return arrays.tidy(replace(shape, prefix=prefix, rest=_pruned(shape.rest, alive, algebra)))
    if isinstance(shape, Object):
        properties = tuple(replace(p, form=_pruned(p.form, alive, algebra)) for p in shape.properties)
        others = tuple(replace(kind, form=_pruned(kind.form, alive, algebra)) for kind in shape.others)
        return objects.tidy(replace(shape, properties=properties, others=others), algebra)
    return shape


def _reachable(form: Form, rules: dict[str, Form]) -> set[str]:
    used: set[str] = set()
    todo = [*_refs(form)]
    while todo:
        name = todo.pop()
        if name not in used and name in rules:
            used.add(name)
            todo += _refs(rules[name])
    return used
