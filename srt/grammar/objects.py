"""Meets, complements and expansions of objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sapwood.srt.grammar.form import ANY, Boolean, Form, Null, Number, Object, Others, Property, String
from sapwood.srt.grammar.limits import Inexact
from sapwood.srt.grammar.scalars import meet_string
from sapwood.srt.grammar.words import Words

if TYPE_CHECKING:
    from sapwood.srt.grammar.algebra import Algebra

FREE = (Others(String(), ANY),)
"""Any other properties."""
_FEW_OPTIONAL = 6
"""Optional properties of which each may be there or not, where that has to be spelt out."""


def form_of(shape: Object, name: str, words: Words) -> Form:
    """The form of the property of this name; the empty one if it may not be there."""
    for prop in shape.properties:
        if prop.name == name:
            return prop.form
    return next((kind.form for kind in shape.others if words.holds(kind.name, name)), ())


def meet(a: Object, b: Object, algebra: Algebra) -> Object | None:
    """What both allow, the properties in the first one's order, and those of which only the second says more
    than that they are there in its own; None if that is nothing."""
    algebra.budget.spend(len(a.properties) + len(b.properties))
    mine = {prop.name: prop for prop in a.properties}
    theirs = {prop.name: prop for prop in b.properties}
    properties = []
    later = {name for name in mine.keys() & theirs.keys() if mine[name].form == ANY != theirs[name].form}
    for name in {**{name: None for name in mine if name not in later}, **theirs}:
        form = algebra.both(
            mine[name].form if name in mine else form_of(a, name, algebra.words),
            theirs[name].form if name in theirs else form_of(b, name, algebra.words),
        )
        required = any(name in side and side[name].required for side in (mine, theirs))
        if required and not form:
            return None
        properties.append(Property(name, form, required))
    highs = [high for high in (a.high, b.high) if high is not None]
    return tidy(
        Object(
            properties=tuple(properties),
            others=_meet_others(a.others, b.others, algebra),
            low=max(a.low, b.low),
            high=min(highs) if highs else None,
            needs=tuple(dict.fromkeys(a.needs + b.needs)),
        ),
        algebra,
    )


def _meet_others(a: tuple[Others, ...], b: tuple[Others, ...], algebra: Algebra) -> tuple[Others, ...]:
    if a == b or b == FREE:
        return a
    if a == FREE:
        return b
    out = []
    for mine in a:
        for theirs in b:
            algebra.budget.spend()
            name = meet_string(mine.name, theirs.name, algebra.words)
            form = algebra.both(mine.form, theirs.form) if name is not None else ()
            if name is not None and form:
                out.append(Others(name, form))
    return tuple(out)


def tidy(shape: Object, algebra: Algebra) -> Object | None:
    """The one way to write the shape; None if no object is so."""
    shape = _declare_listed(shape)
    others = tuple(kind for kind in shape.others if kind.form)
    properties = tuple(
        prop
        for prop in shape.properties
        if prop.form or prop.required or any(algebra.words.holds(kind.name, prop.name) for kind in others)
    )
    if any(prop.required and not prop.form for prop in properties):
        return None
    required = sum(prop.required for prop in properties)
    high, low = shape.high, shape.low
    if high is not None and high < max(required, low):
        return None
    if high == required:
        properties, others = tuple(prop for prop in properties if prop.required), ()
    if not others:
        most = sum(bool(prop.form) for prop in properties)
        if low > most:
            return None
        if low == most:
            properties = tuple(replace(prop, required=True) for prop in properties)
            required = most
        high = None if high is not None and high >= most else high
    low = low if low > required else 0
    return _tidy_needs(Object(properties, others, low, high, shape.needs), algebra)


def _declare_listed(shape: Object) -> Object:
    """The shape with others whose names are few and known as declared properties."""
    if all(kind.name.values is None for kind in shape.others):
        return shape
    names = {prop.name for prop in shape.properties}
    listed = [
        Property(name, kind.form, False)
        for kind in shape.others
        for name in kind.name.values or ()
        if kind.form and name not in names
    ]
    others = tuple(kind for kind in shape.others if kind.name.values is None)
    return replace(shape, properties=(*shape.properties, *listed), others=others)


def _tidy_needs(shape: Object, algebra: Algebra) -> Object | None:
    """The shape without the needs that are met anyhow, or that one property alone can meet."""
    open_needs = []
    for need in shape.needs:
        declared, kinds = list(_candidates(shape, need, algebra)), _kinds(shape, need, algebra)
        if any(prop.required and form == prop.form for prop, form in declared):
            continue
        if not declared and not kinds:
            return None
        if len(declared) == 1 and not kinds:
            prop, form = declared[0]
            changed = tuple(Property(p.name, form, True) if p is prop else p for p in shape.properties)
            left = tuple(other for other in shape.needs if other is not need)
            return tidy(replace(shape, properties=changed, needs=left), algebra)
        open_needs.append(need)
    return replace(shape, needs=tuple(open_needs))


def _candidates(shape: Object, need: Others, algebra: Algebra) -> Iterator[tuple[Property, Form]]:
    for prop in shape.properties:
        if prop.form and algebra.words.holds(need.name, prop.name):
            form = algebra.both(prop.form, need.form)
            if form:
                yield prop, form


def _kinds(shape: Object, need: Others, algebra: Algebra) -> tuple[Others, ...]:
    declared = String(excluded=frozenset(prop.name for prop in shape.properties))
    return tuple(
        kind
        for kind in _meet_others(shape.others, (need,), algebra)
        if meet_string(kind.name, declared, algebra.words) is not None
    )


def apart(a: Object, b: Object, algebra: Algebra) -> bool:
    """Whether no object is both, as far as one property tells: the usual case of tagged alternatives."""
    algebra.budget.spend()
    for one, other in ((a, b), (b, a)):
        theirs = {prop.name: prop.form for prop in other.properties}
        for prop in one.properties:
            if not prop.required:
                continue
            form = theirs.get(prop.name)
            if form is None and not other.others:
                return True
            if form is not None and _told_apart(prop.form, form, algebra):
                return True
    return False


def _told_apart(a: Form, b: Form, algebra: Algebra) -> bool:
    plain = all(isinstance(shape, (Null, Boolean, Number, String)) for shape in (*a, *b))
    return plain and not algebra.meet(a, b)


def within(a: Object, b: Object, algebra: Algebra) -> bool:
    """Whether all that the first allows the second does, as far as that is plain to see."""
    if b.needs or (b.low and b.low > max(a.low, sum(prop.required for prop in a.properties))):
        return False
    if b.high is not None and (a.high is None or a.high > b.high):
        return False
    if b.others != FREE and a.others not in ((), b.others):
        return False
    mine = {prop.name: prop for prop in a.properties}
    theirs = {prop.name: prop for prop in b.properties}
    algebra.budget.spend(1 + (len(mine) + len(theirs)) // 4)
    for name, prop in theirs.items():
        if prop.required and not (name in mine and mine[name].required):
            return False
        form = mine[name].form if name in mine else form_of(a, name, algebra.words)
        if form and prop.form not in (ANY, form):
            return False
    for name in mine.keys() - theirs.keys():
        if mine[name].form and form_of(b, name, algebra.words) not in (ANY, mine[name].form):
            return False
    return True


def violations(shape: Object, algebra: Algebra) -> list[Object]:
    """Objects that the shape does not allow, all of them. Raises Inexact for what cannot be said."""
    algebra.budget.spend(len(shape.properties))
    out = []
    for prop in shape.properties:
        if prop.required:
            out.append(Object((Property(prop.name, (), False),), FREE))
        other = algebra.without(prop.form)
        if other:
            out.append(Object((Property(prop.name, other, True),), FREE))
    declared = String(excluded=frozenset(prop.name for prop in shape.properties))
    for kind in shape.others:
        other, name = algebra.without(kind.form), meet_string(kind.name, declared, algebra.words)
        if other and name is not None:
            out.append(Object(others=FREE, needs=(Others(name, other),)))
    for name in remaining(declared, [kind.name for kind in shape.others], algebra):
        out.append(Object(others=FREE, needs=(Others(name, ANY),)))
    if shape.low:
        out.append(Object(others=FREE, high=shape.low - 1))
    if shape.high is not None:
        out.append(Object(others=FREE, low=shape.high + 1))
    for need in shape.needs:
        rest = tuple(Others(name, ANY) for name in remaining(String(), [need.name], algebra))
        out.append(Object(others=(Others(need.name, algebra.without(need.form)), *rest)))
    return [tidied for one in out if (tidied := tidy(one, algebra)) is not None]


def remaining(within: String, taken: list[String], algebra: Algebra) -> list[String]:
    """Names among `within` that are none of those taken, as kinds that do not overlap."""
    left = [within]
    for name in taken:
        if name == String():
            return []
        out: list[String] = []
        for one in left:
            out += _apart(one, name, algebra)
        left = out
    return left


def _apart(within: String, name: String, algebra: Algebra) -> list[String]:
    """Disjoint kinds: `within` but not `name`. Each step allows what the steps before it have forbidden."""
    parts: list[String] = []
    if name.values is not None:
        met = meet_string(within, String(excluded=frozenset(name.values)), algebra.words)
        return [met] if met is not None else []
    if name.formats:
        raise Inexact("names that are not of a format cannot be told", "format")
    steps: list[tuple[String, String]] = []
    if name.low:
        steps.append((String(high=name.low - 1), String(low=name.low)))
    if name.high is not None:
        steps.append((String(low=name.high + 1), String(high=name.high)))
    steps += [(String(unlike=(p,)), String(patterns=(p,))) for p in name.patterns]
    steps += [(String(patterns=(p,)), String(unlike=(p,))) for p in name.unlike]
    if name.excluded:
        listed = tuple(sorted(name.excluded))
        steps.append((String(values=listed), String(excluded=name.excluded)))
    rest: String | None = within
    for broken, kept in steps:
        if rest is None:
            break
        algebra.budget.spend()
        met = meet_string(rest, broken, algebra.words)
        if met is not None:
            parts.append(met)
        rest = meet_string(rest, kept, algebra.words)
    return parts


def expand(shape: Object, algebra: Algebra) -> list[Object]:
    """Objects without needs, whose `low` is at most one above the required properties, that together are
    this one. Raises Inexact if they are too many, or there are none."""
    algebra.budget.spend(1 + len(shape.properties))
    if shape.needs:
        return _expand_need(shape, algebra)
    required = sum(prop.required for prop in shape.properties)
    if shape.low <= required + 1:
        return [shape]
    free = [prop for prop in shape.properties if prop.form and not prop.required]
    if shape.others:
        # Names of others may be written twice, so they cannot be counted: only one of them is ever asked for.
        raise Inexact("it is supported up to one more than the properties that are required", "minProperties")
    return _one_more(shape, free, algebra)


def _one_more(shape: Object, free: list[Property], algebra: Algebra) -> list[Object]:
    """The shape by the first of these optional properties that is there."""
    out: list[Object] = []
    for i, prop in enumerate(free):
        absent = {p.name for p in free[:i]}
        changed = tuple(
            Property(p.name, () if p.name in absent else p.form, p.required or p is prop)
            for p in shape.properties
        )
        one = tidy(replace(shape, properties=changed), algebra)
        if one is not None:
            out += expand(one, algebra)
        if len(out) > 64:
            raise Inexact("too many choices of optional properties", "minProperties")
    return out


def _expand_need(shape: Object, algebra: Algebra) -> list[Object]:
    need, left = shape.needs[0], shape.needs[1:]
    bare = replace(shape, needs=left)
    out: list[Object] = []
    for prop, form in _candidates(shape, need, algebra):
        changed = tuple(Property(p.name, form, True) if p is prop else p for p in shape.properties)
        one = tidy(replace(bare, properties=changed), algebra)
        out += expand(one, algebra) if one is not None else []
    kinds = _kinds(shape, need, algebra)
    if kinds:
        for one in _among_others(bare, kinds, algebra):
            out += expand(one, algebra)
    if len(out) > 64:
        raise Inexact("too many ways to have a property of a kind")
    return out


def _among_others(shape: Object, kinds: tuple[Others, ...], algebra: Algebra) -> list[Object]:
    """Objects with at least one other property, which is of one of these kinds."""
    required = sum(prop.required for prop in shape.properties)
    optional = [prop for prop in shape.properties if prop.form and not prop.required]
    if shape.high == required + 1:
        kept = tuple(replace(p, form=p.form if p.required else ()) for p in shape.properties)
        one = tidy(replace(shape, properties=kept, others=kinds, low=required + 1), algebra)
        return [one] if one is not None else []
    if kinds != shape.others or len(optional) > _FEW_OPTIONAL or shape.low > required + 1:
        raise Inexact("a property of a kind, under any name, beside others cannot be asked for", "")
    out = []
    for chosen in range(2 ** len(optional)):
        there = {prop.name for i, prop in enumerate(optional) if chosen >> i & 1}
        changed = tuple(
            replace(
                p,
                form=p.form if p.required or p.name in there else (),
                required=p.required or p.name in there,
            )
            for p in shape.properties
        )
        one = tidy(replace(shape, properties=changed, low=required + len(there) + 1), algebra)
        if one is not None:
            out.append(one)
    return out
