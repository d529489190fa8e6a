"""What each keyword makes of the form so far, in the order in which they are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sapwood.srt.grammar import assertions, evaluated, numbers
from sapwood.srt.grammar.form import ANY, Array, Form, Number, Object, Shape, String
from sapwood.srt.grammar.limits import Inexact
from sapwood.srt.grammar.objects import FREE
from sapwood.srt.grammar.places import below

if TYPE_CHECKING:
    from sapwood.srt.grammar.schema import Reader

Step = Callable[["Reader", str, dict[str, Any], Form], Form]
"""(reader, pointer, schema, form so far) -> form; raises Inexact for what cannot be enforced."""


def narrowed(reader: Reader, found: Form, *shapes: Shape) -> Form:
    """The form with values of these shapes' type as one of them, and all others as they are."""
    kind = type(shapes[0])
    same = reader.algebra.meet(tuple(shape for shape in found if isinstance(shape, kind)), shapes)
    return reader.algebra.union([*(shape for shape in found if not isinstance(shape, kind)), *same])


def _head(reader: Reader, pointer: str, *path: str | int) -> Form:
    where = reader.where
    head = reader.head(reader.place(below(pointer, *path)))
    reader.where = where
    return head


def _asserted(shape: Callable[[dict[str, Any]], Shape]) -> Step:
    return lambda reader, pointer, schema, found: narrowed(reader, found, shape(schema))


def _types(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    return reader.algebra.meet(found, reader.algebra.union(assertions.types(schema["type"])))


def _enum(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    shapes = [assertions.constant(value) for value in schema["enum"]]
    return reader.algebra.meet(reader.algebra.union(shapes), found)


def _const(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    return reader.algebra.meet((assertions.constant(schema["const"]),), found)


def _items(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    shape = assertions.items(schema, lambda *path: reader.child(below(pointer, *path)))
    return narrowed(reader, found, shape)


def _unique(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    return narrowed(reader, found, Array(rest=ANY, unique=True)) if schema["uniqueItems"] else found


def _contains(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    least = assertions.count(schema, "minContains")
    if least is not None and least > 1:
        reader.inexact(pointer, "minContains", "it is supported up to 1")
    shape = assertions.contains(schema, lambda *path: reader.child(below(pointer, *path)))
    return narrowed(reader, found, shape)


def _properties(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    patterns = {}
    for text in schema.get("patternProperties", {}):
        try:
            patterns[text] = assertions.pattern(text, "patternProperties")
        except Inexact as error:
            # Of the others it is known what they say.
            reader.inexact(pointer, error.keyword, error.reason)

    def child(*path: str | int) -> Form:
        return reader.child(below(pointer, *path))

    shape = assertions.properties(schema, patterns, child, reader.algebra)
    return narrowed(reader, found, shape)


def _property_names(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    names = _head(reader, pointer, "propertyNames")
    return narrowed(reader, found, assertions.property_names(names, reader.algebra))


def _dependent_required(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    for keyword in ("dependentRequired", "dependencies"):
        for name, needed in schema.get(keyword, {}).items():
            if isinstance(needed, list) and needed:
                there = assertions.required([name, *needed])
                found = narrowed(reader, found, assertions.absent(name), there)
    return found


def _dependent_schemas(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    for keyword in ("dependentSchemas", "dependencies"):
        for name, needed in schema.get(keyword, {}).items():
            if not isinstance(needed, list):
                objects = tuple(s for s in _head(reader, pointer, keyword, name) if isinstance(s, Object))
                there = reader.algebra.meet((assertions.required([name]),), objects)
                found = narrowed(reader, found, assertions.absent(name), *there)
    return found


def _ref(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    target = reader.place(reader.target(pointer, schema["$ref"]))
    where = reader.where
    head = reader.head(target)
    reader.where = where
    return reader.algebra.meet(found, head)


def _all_of(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    for i in range(len(schema["allOf"])):
        head = _head(reader, pointer, "allOf", i)
        found = reader.guarded(pointer, "allOf", found, partial(_met, reader, head))
    return found


def _met(reader: Reader, head: Form, found: Form) -> Form:
    return reader.algebra.meet(found, head)


def _any_of(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    shapes: list[Shape] = []
    for i in range(len(schema["anyOf"])):
        shapes += reader.algebra.meet(found, _head(reader, pointer, "anyOf", i))
    return reader.algebra.union(shapes)


def _one_of(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    heads = [_head(reader, pointer, "oneOf", i) for i in range(len(schema["oneOf"]))]
    shapes: list[Shape] = []
    for i, head in enumerate(heads):
        one = reader.algebra.meet(found, head)
        for j, other in enumerate(heads):
            if j != i and one:
                one = reader.algebra.minus(one, other)
        shapes += one
    return reader.algebra.union(shapes)


def _not(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    return reader.algebra.minus(found, _head(reader, pointer, "not"))


def _if(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    if "then" not in schema and "else" not in schema:
        return found
    condition = _head(reader, pointer, "if")
    met = reader.algebra.meet(found, condition)
    unmet = found
    if "then" in schema:
        met = reader.algebra.meet(met, _head(reader, pointer, "then"))
    if "else" in schema:
        unmet = reader.algebra.meet(unmet, _head(reader, pointer, "else"))
    return reader.algebra.union([*met, *reader.algebra.minus(unmet, condition)])


def _unevaluated_properties(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    form = reader.child(below(pointer, "unevaluatedProperties"))
    shape = None if form == ANY else evaluated.properties(reader, pointer, schema, form)
    return found if shape is None else narrowed(reader, found, shape)


def _unevaluated_items(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    form = reader.child(below(pointer, "unevaluatedItems"))
    shape = None if form == ANY else evaluated.items(reader, pointer, schema, form)
    return found if shape is None else narrowed(reader, found, shape)


def _multiple_of(reader: Reader, pointer: str, schema: dict[str, Any], found: Form) -> Form:
    found = narrowed(reader, found, Number(multiple_of=(schema["multipleOf"],)))
    for shape in found:
        if isinstance(shape, Number):
            writable(shape)
    return found


def writable(shape: Number) -> None:
    """Raise Inexact if numbers of this shape cannot be written as digits alone tell."""
    try:
        if numbers.nested(shape) is None:
            numbers.terminal(shape)
    except ValueError as error:
        raise Inexact(str(error), "multipleOf" if shape.multiple_of else "") from None


_bounds = _asserted(assertions.bounds)
_lengths = _asserted(
    lambda schema: String(
        low=assertions.count(schema, "minLength") or 0, high=assertions.count(schema, "maxLength")
    )
)
_item_counts = _asserted(
    lambda schema: Array(
        rest=ANY, low=assertions.count(schema, "minItems") or 0, high=assertions.count(schema, "maxItems")
    )
)
_property_counts = _asserted(
    lambda schema: Object(
        others=FREE,
        low=assertions.count(schema, "minProperties") or 0,
        high=assertions.count(schema, "maxProperties"),
    )
)

STEPS: tuple[tuple[tuple[str, ...], Step], ...] = (
    (("type",), _types),
    (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bounds),
    (("multipleOf",), _multiple_of),
    (("minLength", "maxLength"), _lengths),
    (("pattern",), _asserted(lambda schema: assertions.pattern(schema["pattern"]))),
    (("format",), _asserted(lambda schema: assertions.format_of(schema["format"]))),
    (("prefixItems", "items"), _items),
    (("minItems", "maxItems"), _item_counts),
    (("uniqueItems",), _unique),
    (("contains",), _contains),
    (("properties", "patternProperties", "additionalProperties"), _properties),
    (("required",), _asserted(lambda schema: assertions.required(schema["required"]))),
    (("propertyNames",), _property_names),
    (("minProperties", "maxProperties"), _property_counts),
    (("enum",), _enum),
    (("const",), _const),
    (("$ref",), _ref),
    (("allOf",), _all_of),
    (("anyOf",), _any_of),
    (("if",), _if),
    (("dependentRequired", "dependencies"), _dependent_required),
    (("dependentSchemas", "dependencies"), _dependent_schemas),
    (("not",), _not),
    (("oneOf",), _one_of),
    (("unevaluatedProperties",), _unevaluated_properties),
    (("unevaluatedItems",), _unevaluated_items),
)
"""Each step is taken if one of its keywords is there."""

_BY_KEYWORD = {
    word: [index for index, (words, _) in enumerate(STEPS) if word in words]
    for names, _ in STEPS
    for word in names
}


BESIDE = {"additionalItems": "items", "then": "if", "else": "if", "minContains": "contains"}
"""Keywords that the steps of others read."""


def steps_for(schema: dict[str, Any]) -> list[tuple[list[str], Step]]:
    """The steps to take for a schema, in their order, each with those of its keywords that are there."""
    found: dict[int, list[str]] = {}
    for word in schema:
        for index in _BY_KEYWORD.get(word, ()):
            found.setdefault(index, []).append(word)
    for word, main in BESIDE.items():
        for index in _BY_KEYWORD[main] if word in schema and main in schema else ():
            found[index].append(word)
    return [(found[index], STEPS[index][1]) for index in sorted(found)]
