"""Numbers as terminals: ranges are exact in decimal digits, and no number runs away.

Integers are written as digits, without a fraction or an exponent. Other numbers may have a fraction, and an
exponent where no bound but the sign says anything. What is written is still in range when it is read as a
double: no exponent overflows or underflows one, and next to an open bound there are no more digits than one
tells apart. A negative zero is written only where negative numbers are.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction

from sapwood.srt.grammar.digits import Border, Digits, digits_of, fraction, integers, joined
from sapwood.srt.grammar.form import Number

INTEGER_DIGITS = 20
FRACTION_DIGITS = 20
DOUBLE_DIGITS = 15
MAX_LISTED = 1000
"""Multiples that are listed one by one, and the largest multipleOf else: its automaton has as many states."""
NESTED_DIGITS = 15
NESTED_SCALE = 6
"""Digits behind the point of a step by which the engine counts: it does so in 32 bits."""

# At most 287: with 20 digits before and behind the point neither infinite nor denormal as a double.
_EXPONENT = r"(?:[eE][-+]?(?:0?[0-9]{1,2}|1[0-9]{2}|2[0-7][0-9]|28[0-7]))?"
_WHOLE = rf"(?:0|[1-9][0-9]{{0,{INTEGER_DIGITS - 1}}})"
_FREE = Digits(rf"[0-9]{{1,{FRACTION_DIGITS}}}", True)


def terminal(shape: Number) -> str | None:
    """A Lark terminal of the numbers of a shape; None if there are none.

    Raises ValueError with the reason if they cannot be told exactly, `nested` included.
    """
    alternatives = _alternatives(shape)
    if not alternatives:
        return None
    regex = f"/{joined(alternatives)}/"
    without = [form for value in sorted(shape.excluded) if (form := _spelled(value, shape.integer))]
    without += [r"-?[0-9]+(?:\.0*)?"] if shape.fractional else []
    return f"({regex} & ~/{joined(without)}/)" if without and shape.values is None else regex


def nested(shape: Number) -> str | None:
    """A Lark rule's part for multiples that are no terminal of ours, but one of the engine's own; None if
    `terminal` has them. Raises ValueError with the reason if nobody does exactly."""
    step = common_step(shape)
    if shape.values is not None or step is None or _listed(shape, step) is not None or _regular(step):
        return None
    scale = _scale(step)
    if scale is None or scale > NESTED_SCALE or step * 10**scale > MAX_LISTED:
        raise ValueError(
            f"multipleOf {_shown(step)} is supported up to {MAX_LISTED} only, in units of its last digit, "
            f"which is at most the {NESTED_SCALE}th behind the point, or with few multiples"
        )
    if shape.excluded or shape.fractional:
        raise ValueError(f"multipleOf {_shown(step)} is not supported beside excluded values")
    limit = Fraction(10**NESTED_DIGITS - 1)
    low = -limit if shape.low is None else max(-limit, shape.low)
    high = limit if shape.high is None else min(limit, shape.high)
    # The nearest multiples inside: the engine's own bounds are doubles.
    first, last = math.ceil(low / step), math.floor(high / step)
    first += shape.low_open and first * step == shape.low
    last -= shape.high_open and last * step == shape.high
    kind = "integer" if step.denominator == 1 else "number"
    bounds = f'"minimum": {decimal(first * step)}, "maximum": {decimal(last * step)}'
    return f'%json {{"type": "{kind}", "multipleOf": {decimal(step)}, {bounds}}}'


def common_step(shape: Number) -> Fraction | None:
    """The number of which all a shape's numbers are multiples; None if there is none."""
    steps = [*shape.multiple_of, *([Fraction(1)] if shape.integer else [])]
    if not steps:
        return None
    scale = math.lcm(*(step.denominator for step in steps))
    return Fraction(math.lcm(*(int(step * scale) for step in steps)), scale)


def spellings(value: Fraction) -> list[str]:
    """How one given number is written: by its digits, or as JSON's writers do, or both if these differ."""
    if value.denominator == 1 and len(str(abs(value.numerator))) <= INTEGER_DIGITS:
        return [str(value.numerator)]
    text = decimal(value)
    found = [text] if text is not None and len(text) <= INTEGER_DIGITS + FRACTION_DIGITS else []
    try:
        short = json.dumps(float(value))
    except OverflowError:
        short = "0"
    if Fraction(short) == value and short not in found:
        found.append(short)
    if not found:
        raise ValueError("a number of so many digits is not supported")
    return found


def decimal(value: Fraction) -> str | None:
    """A number's digits, without an exponent; None if they do not end."""
    scale = _scale(value)
    if scale is None:
        return None
    digits = str(abs(value.numerator) * 10**scale // value.denominator).rjust(scale + 1, "0")
    whole, behind = (digits[:-scale], digits[-scale:]) if scale else (digits, "")
    return ("-" if value < 0 else "") + whole + ("." + behind if behind else "")


def _shown(value: Fraction) -> str:
    return decimal(value) or str(value)


def _scale(value: Fraction) -> int | None:
    """How many digits a number has behind its point."""
    rest, scale = value.denominator, 0
    while rest > 1:
        common = math.gcd(rest, 10)
        if common == 1 or scale > 400:
            return None
        rest, scale = rest // common, scale + 1
    return scale


def _alternatives(shape: Number) -> list[str]:
    if shape.values is not None:
        return [_escaped(text) for value in shape.values for text in spellings(value)]
    step = common_step(shape)
    listed = _listed(shape, step)
    if listed is not None:
        return [_escaped(text) for value in listed for text in spellings(value)]
    exponent = "" if shape.excluded or shape.fractional or step is not None else _EXPONENT
    if step is None and shape.low is None and shape.high is None:
        return [f"-?{_WHOLE}{_FREE.behind_point()}{exponent}"]
    zero = _has_zero(shape)
    above = _magnitudes(shape, 1, step, zero, exponent)
    below = _magnitudes(shape, -1, step, zero and step != 1, exponent)
    if zero and not above:
        above = ["0" if step == 1 else rf"0(?:\.0{{1,{FRACTION_DIGITS}}})?"]
    return ([f"-{joined(below)}"] if below else []) + above


def _has_zero(shape: Number) -> bool:
    above = shape.low is None or shape.low < 0 or (shape.low == 0 and not shape.low_open)
    below = shape.high is None or shape.high > 0 or (shape.high == 0 and not shape.high_open)
    return above and below


def _listed(shape: Number, step: Fraction | None) -> list[Fraction] | None:
    """The multiples in range if they are few and no range says it shorter."""
    if step is None or step == 1 or shape.low is None or shape.high is None:
        return None
    first, last = math.ceil(shape.low / step), math.floor(shape.high / step)
    if last - first >= MAX_LISTED or _regular(step):
        return None
    found = [count * step for count in range(first, last + 1)]
    ends = [
        bound for bound, is_open in ((shape.low, shape.low_open), (shape.high, shape.high_open)) if is_open
    ]
    found = [value for value in found if not shape.fractional or value.denominator > 1]
    return [value for value in found if value not in ends and value not in shape.excluded]


def _regular(step: Fraction) -> bool:
    """Whether the digits behind the point say if a number is a multiple."""
    scale = _scale(step)
    return (
        scale is not None
        and scale <= FRACTION_DIGITS
        and step * 10**scale in (1, 2, 5, 25)
        and (10**scale % int(step * 10**scale) == 0)
    )


def _magnitudes(shape: Number, sign: int, step: Fraction | None, zero: bool, exponent: str) -> list[str]:
    """Alternatives for what is on one side of zero, with the zero itself or without it."""
    near, near_open, far, far_open = (
        (shape.low, shape.low_open, shape.high, shape.high_open)
        if sign > 0
        else (shape.high, shape.high_open, shape.low, shape.low_open)
    )
    if far is not None and far * sign <= 0:
        return []
    from_zero = near is None or near * sign <= 0
    low = Border(Fraction(0), not zero) if near is None or from_zero else Border(abs(near), near_open)
    high = None if far is None else Border(abs(far), far_open)
    if high is not None and (low.value > high.value or (low.value == high.value and (low.open or high.open))):
        return []
    if step == 1:
        return _whole(low, high)
    found = _range(low, high, step)
    return [joined(found) + exponent] if high is None and from_zero else found


def _whole(low: Border, high: Border | None) -> list[str]:
    first = math.ceil(low.value) + (low.open and low.value.denominator == 1)
    last = 10**INTEGER_DIGITS - 1
    if high is not None:
        last = min(last, math.floor(high.value) - (high.open and high.value.denominator == 1))
    return integers(first, last) if first <= last else []


def _range(low: Border, high: Border | None, step: Fraction | None) -> list[str]:
    count = _fraction_digits(low, high) if step is None else min(FRACTION_DIGITS, _scale(step) or 0)
    first = math.floor(low.value)
    last = 10**INTEGER_DIGITS if high is None else min(10**INTEGER_DIGITS, math.floor(high.value))
    if high is not None and math.floor(high.value) == first:
        return _at(
            first, Border(low.value - first, low.open), Border(high.value - first, high.open), count, step
        )
    found = _at(first, Border(low.value - first, low.open), None, count, step)
    if first + 1 < last:
        behind = _behind(Border(Fraction(0), open=False), None, count, step)
        found.append(joined(integers(first + 1, last - 1)) + (behind or ""))
    if high is not None and last == math.floor(high.value):
        found += _at(last, Border(Fraction(0), open=False), Border(high.value - last, high.open), count, step)
    return found


def _at(whole: int, low: Border, high: Border | None, count: int, step: Fraction | None) -> list[str]:
    if whole >= 10**INTEGER_DIGITS:
        return []
    behind = _behind(low, high, count, step)
    return [] if behind is None else [str(whole) + behind]


def _behind(low: Border, high: Border | None, count: int, step: Fraction | None) -> str | None:
    part = 1 if step is None else int(step * 10**count)
    if part == 1:
        return fraction(low, high, count).behind_point()
    some = []
    for number in range(0, 10**count, part):
        value = Fraction(number, 10**count)
        if (value > low.value or (value == low.value and not low.open)) and (
            high is None or value < high.value or (value == high.value and not high.open)
        ):
            some.append(digits_of(value))
    none = "" in some
    forms = [f"{text}0{{0,{count - len(text)}}}" if len(text) < count else text for text in some if text]
    forms += [f"0{{1,{count}}}"] if none else []
    return Digits(joined(forms) if forms else None, none).behind_point()


def _fraction_digits(low: Border, high: Border | None) -> int:
    """Digits behind the point that are sure to stay on their side of both bounds when read as a double."""
    count = FRACTION_DIGITS
    for border in (low, high):
        if border is None or border.value == 0:
            continue
        whole = len(str(math.floor(border.value))) if border.value >= 1 else 0
        if border.open or whole > DOUBLE_DIGITS:
            count = min(count, max(0, DOUBLE_DIGITS - whole))
    return count


def _spelled(value: Fraction, integer: bool) -> str | None:
    """A regex of every spelling of a number that has no exponent; None if it is never written so."""
    text = decimal(value)
    if text is None or (integer and value.denominator != 1):
        return None
    tail = "" if integer else "0*" if "." in text else r"(?:\.0*)?"
    return ("-?" if value == 0 else "") + _escaped(text) + tail


def _escaped(text: str) -> str:
    return text.replace(".", r"\.").replace("+", r"\+")
