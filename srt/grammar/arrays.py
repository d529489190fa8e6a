"""Meets, complements and expansions of arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sapwood.srt.grammar.form import ANY, Array, Boolean, Form, Null, Number, Shape, String
from sapwood.srt.grammar.limits import MAX_UNIQUE, Inexact

if TYPE_CHECKING:
    from sapwood.srt.grammar.algebra import Algebra

_FEW_ITEMS = 16
"""Places at which an item that must be somewhere is looked for."""


def item(shape: Array, index: int) -> Form:
    """The form of the item at this index."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def meet(a: Array, b: Array, algebra: Algebra) -> Array | None:
    """What both allow; None if that is nothing."""
    count = max(len(a.prefix), len(b.prefix))
    algebra.budget.spend(count)
    highs = [high for high in (a.high, b.high) if high is not None]
    return tidy(
        Array(
            prefix=tuple(algebra.both(item(a, i), item(b, i)) for i in range(count)),
            rest=algebra.both(a.rest, b.rest),
            low=max(a.low, b.low),
            high=min(highs) if highs else None,
            unique=a.unique or b.unique,
            needs=tuple(dict.fromkeys(a.needs + b.needs)),
        )
    )


def tidy(shape: Array) -> Array | None:
    """The one way to write the shape; None if no array is so."""
    prefix, rest, high = shape.prefix, shape.rest, shape.high
    end = prefix.index(()) if () in prefix else len(prefix) if not rest else None
    if end is not None and (high is None or end < high):
        high = end
    if high is not None and high <= len(prefix):
        prefix, rest = prefix[:high], ()
    while prefix and prefix[-1] == rest:
        prefix = prefix[:-1]
    if high is not None and (high < shape.low or any(high <= start for start, _ in shape.needs)):
        return None
    needs = tuple(need for need in shape.needs if not _met(shape, need))
    if any(form == () for _, form in needs):
        return None
    unique = shape.unique and (high is None or high > 1)
    return replace(shape, prefix=prefix, rest=rest, high=high, unique=unique, needs=needs)


def _met(shape: Array, need: tuple[int, Form]) -> bool:
    start, form = need
    return any(
        item(shape, i) == form or form == ANY for i in range(start, min(shape.low, start + _FEW_ITEMS))
    )


def within(a: Array, b: Array) -> bool:
    """Whether all that the first allows the second does, as far as that is plain to see."""
    if b.unique or b.needs or a.low < b.low or (b.high is not None and (a.high is None or a.high > b.high)):
        return False
    count = max(len(a.prefix), len(b.prefix))
    pairs = [(item(a, i), item(b, i)) for i in range(count)] + [(a.rest, b.rest)]
    return all(theirs in (ANY, mine) or not mine for mine, theirs in pairs)


def violations(shape: Array, algebra: Algebra) -> list[Array]:
    """Arrays that the shape does not allow, all of them. Raises Inexact for what cannot be said."""
    if shape.unique:
        raise Inexact("that two items are equal cannot be asked for", "uniqueItems")
    out = []
    if shape.low:
        out.append(Array(rest=ANY, high=shape.low - 1))
    if shape.high is not None:
        out.append(Array(rest=ANY, low=shape.high + 1))
    for i, form in enumerate(shape.prefix):
        other = algebra.without(form)
        if other:
            out.append(Array(prefix=(*[ANY] * i, other), rest=ANY, low=i + 1))
    if shape.rest:
        other = algebra.without(shape.rest)
        if other:
            out.append(Array(rest=ANY, low=len(shape.prefix) + 1, needs=((len(shape.prefix), other),)))
    for start, form in shape.needs:
        out.append(Array(prefix=(ANY,) * start, rest=algebra.without(form)))
    return [tidied for tidied in map(tidy, out) if tidied is not None]


def expand(shape: Array, algebra: Algebra) -> list[Array]:
    """Arrays without needs that together are this one. Raises Inexact if there are none, or too many."""
    if not shape.needs:
        return [shape]
    (start, form), others = shape.needs[0], shape.needs[1:]
    end = shape.high if shape.high is not None else max(len(shape.prefix), start)
    if end - start > _FEW_ITEMS:
        raise Inexact(
            f"an item among more than {_FEW_ITEMS} that is as asked for cannot be enforced", "contains"
        )
    found = [
        Array(
            prefix=(*(item(shape, k) for k in range(i)), algebra.both(item(shape, i), form)),
            rest=ANY,
            low=i + 1,
        )
        for i in range(start, end)
    ]
    if shape.high is None and shape.rest:
        common = algebra.both(shape.rest, form)
        if common == shape.rest:
            found.append(Array(rest=ANY, low=end + 1))
        elif common:
            raise Inexact(
                "an item that is as asked for, anywhere in an array, cannot be enforced", "contains"
            )
    out: list[Array] = []
    for one in found:
        met = tidy(one)
        both = met and meet(replace(shape, needs=others), met, algebra)
        if both:
            out += expand(both, algebra)
    return out


def settle_unique(shape: Array, algebra: Algebra) -> list[Array]:
    """Arrays that need no two items told apart, but for those of a short list of scalars. Raises Inexact if
    there are none."""
    if not shape.unique:
        return [shape]
    if not shape.prefix:
        values = singles(shape.rest)
        if values is None or len(values) > MAX_UNIQUE:
            raise Inexact(
                f"supported are arrays of one item, or items of at most {MAX_UNIQUE} fixed values",
                "uniqueItems",
            )
        if shape.low > len(values):
            return []
        high = len(values) if shape.high is None else min(shape.high, len(values))
        return [replace(shape, high=high, unique=high > 1)]
    if shape.rest:
        raise Inexact("it is not supported beside prefixItems with other items after them", "uniqueItems")
    return _spelt_out(shape, algebra)


def _spelt_out(shape: Array, algebra: Algebra) -> list[Array]:
    runs: list[tuple[Form, ...]] = [()]
    out: list[Array] = []
    for size in range(len(shape.prefix) + 1):
        if size >= shape.low:
            out += [Array(prefix=run, low=size, high=size) for run in runs]
        if size == len(shape.prefix):
            break
        choices = singles(shape.prefix[size])
        if choices is None or len(choices) > MAX_UNIQUE:
            raise Inexact(f"an item has more than {MAX_UNIQUE} possible values", "uniqueItems")
        algebra.budget.spend(len(runs) * len(choices))
        runs = [(*run, (value,)) for run in runs for value in choices if (value,) not in run]
        if len(runs) > 2 * MAX_UNIQUE:
            raise Inexact("too many arrays without equal items", "uniqueItems")
    return out


def singles(form: Form) -> list[Shape] | None:
    """The values of a form, each as a shape of its own; None if it is no finite list of scalars."""
    found: list[Shape] = []
    for shape in form:
        if isinstance(shape, Null):
            found.append(shape)
        elif isinstance(shape, Boolean):
            found += [Boolean((value,)) for value in shape.values]
        elif isinstance(shape, Number) and shape.values is not None:
            found += [Number(values=(value,)) for value in shape.values]
        elif isinstance(shape, String) and shape.values is not None:
            found += [String(values=(value,)) for value in shape.values]
        else:
            return None
    return [*dict.fromkeys(found)]
