"""Operations on Forms: both, either, the one without the other.

Two levels. At the top of a form its shapes are known, and operations give shapes. Within arrays and objects a
form may be a Ref, a place that may lead back to this one: there an operation gives a Ref to be worked out
later (`Later`), so that recursive schemas can be met and told apart like any others.
"""

from __future__ import annotations

from typing import Protocol

from sapwood.srt.grammar import arrays, objects
from sapwood.srt.grammar.form import (
    ANY,
    EVERYTHING,
    Array,
    Boolean,
    Form,
    Null,
    Number,
    Object,
    Ref,
    Shape,
    String,
)
from sapwood.srt.grammar.limits import MAX_ALTERNATIVES, Budget, Inexact
from sapwood.srt.grammar.scalars import (
    meet_boolean,
    meet_number,
    meet_string,
    merge_values,
    number_violations,
    string_violations,
    string_within,
)
from sapwood.srt.grammar.words import Words

_ORDER = (Null, Boolean, Number, String, Array, Object, Ref)


class Later(Protocol):
    """Combinations of forms of which one at least is a Ref: forms of the same kind, or what they come to."""

    def both(self, a: Form, b: Form) -> Form: ...

    def without(self, a: Form) -> Form: ...


class Algebra:
    """Meets, unions and differences; each shape that is looked at costs a step of the budget."""

    def __init__(self, later: Later, words: Words, budget: Budget) -> None:
        self._later = later
        self.words = words
        self.budget = budget

    def both(self, a: Form, b: Form) -> Form:
        """What both forms of a part allow."""
        if a == b or b == ANY:
            return a
        if a == ANY:
            return b
        if not a or not b:
            return ()
        if _refers(a) or _refers(b):
            return self._later.both(a, b)
        return self.meet(a, b)

    def without(self, a: Form) -> Form:
        """What the form of a part does not allow."""
        if not a or a == ANY:
            return () if a else ANY
        if _refers(a):
            return self._later.without(a)
        return self.minus(EVERYTHING, a)

    def meet(self, a: Form, b: Form) -> Form:
        """What both forms allow; neither has a Ref at its top."""
        if a == b or b == EVERYTHING:
            return a
        if a == EVERYTHING:
            return b
        met = (self._meet(x, y) for x in a for y in b if type(x) is type(y))
        return self.union([shape for shape in met if shape is not None])

    def minus(self, a: Form, b: Form) -> Form:
        """What the first form allows and the second does not. Raises Inexact where that cannot be said."""
        for y in b:
            out: list[Shape] = []
            for x in a:
                out += self._minus(x, y)
            a = self.union(out)
        return a

    def union(self, shapes: list[Shape]) -> Form:
        """The form of these alternatives, none of which is within another as far as that is easily seen."""
        by_kind: dict[type[Shape], dict[Shape, None]] = {}
        for shape in shapes:
            by_kind.setdefault(type(shape), {})[shape] = None
        kept: list[Shape] = []
        for kind in _ORDER:
            same = list(by_kind.get(kind, ()))
            kept += same if len(same) <= 1 else self._fewest(same)
        if len(kept) > MAX_ALTERNATIVES:
            raise Inexact(f"it comes to more than {MAX_ALTERNATIVES} alternatives")
        return tuple(kept)

    def _fewest(self, shapes: list[Shape]) -> list[Shape]:
        """The same alternatives, all of one type, as fewer shapes if that is easily had."""
        if isinstance(shapes[0], Boolean):
            values = {value for shape in shapes if isinstance(shape, Boolean) for value in shape.values}
            return [Boolean(tuple(sorted(values)))]
        merged = merge_values(shape for shape in shapes if isinstance(shape, (Number, String)))
        return self._outermost([*merged] if merged else shapes)

    def _outermost(self, shapes: list[Shape]) -> list[Shape]:
        free = next((shape for shape in EVERYTHING if shape in shapes), None)
        if free is not None:
            return [free]
        if len(shapes) > 24:
            return shapes
        kept: list[Shape] = []
        for shape in shapes:
            if any(self._within(shape, other) for other in kept):
                continue
            kept = [other for other in kept if not self._within(other, shape)] + [shape]
        return kept

    def _within(self, a: Shape, b: Shape) -> bool:
        # Only what is settled at once: a meet of parts may make a new place, which is not worth it here.
        if isinstance(a, Object) and isinstance(b, Object):
            return objects.within(a, b, self)
        if isinstance(a, Array) and isinstance(b, Array):
            return arrays.within(a, b)
        if isinstance(a, String) and isinstance(b, String):
            return string_within(a, b)
        return self._meet(a, b) == a

    def _meet(self, a: Shape, b: Shape) -> Shape | None:
        if a == b:
            return a
        self.budget.spend()
        if isinstance(a, Null) and isinstance(b, Null):
            return a
        if isinstance(a, Boolean) and isinstance(b, Boolean):
            return meet_boolean(a, b)
        if isinstance(a, Number) and isinstance(b, Number):
            return meet_number(a, b)
        if isinstance(a, String) and isinstance(b, String):
            return meet_string(a, b, self.words)
        if isinstance(a, Array) and isinstance(b, Array):
            return arrays.meet(a, b, self)
        if isinstance(a, Object) and isinstance(b, Object):
            return objects.meet(a, b, self)
        return None

    def _minus(self, a: Shape, b: Shape) -> list[Shape]:
        if isinstance(a, Object) and isinstance(b, Object) and objects.apart(a, b, self):
            return [a]
        common = self._meet(a, b) if type(a) is type(b) else None
        if common is None:
            return [a]
        if common == a:
            return []
        if isinstance(a, (Number, String)) and isinstance(b, (Number, String)) and a.values is not None:
            taken = common.values if isinstance(common, (Number, String)) else None
            left = tuple(value for value in a.values if value not in (taken or ()))
            return [Number(values=left) if isinstance(a, Number) else String(values=left)]  # type: ignore[arg-type]
        met = (self._meet(a, violation) for violation in self._violations(b))
        return [shape for shape in met if shape is not None]

    def _violations(self, shape: Shape) -> list[Shape]:
        """Shapes of the same type that together are all that this one does not allow."""
        if isinstance(shape, Boolean):
            return [Boolean((value,)) for value in (False, True) if value not in shape.values]
        if isinstance(shape, Number):
            return [*number_violations(shape)]
        if isinstance(shape, String):
            return [*string_violations(shape)]
        if isinstance(shape, Array):
            return [*arrays.violations(shape, self)]
        if isinstance(shape, Object):
            return [*objects.violations(shape, self)]
        return []


def _refers(form: Form) -> bool:
    return any(isinstance(shape, Ref) for shape in form)
