"""Strings as JSON spells them: regexes of string literals whose values are what is asked for.

Each character stands raw or in an escaped form and counts once, however it is spelled: `"`, `\\` and control
characters are escaped, by their letter where they have one or as \\u00XX; those beyond ASCII stand raw or as
\\uXXXX (two of them beyond the first plane); printable ASCII stands raw only: what is forced has one way.
"""

from __future__ import annotations

import json
from functools import cache

from sapwood.srt.grammar import charset
from sapwood.srt.grammar.charset import Ranges
from sapwood.srt.grammar.language import bound, plain, trimmed, written
from sapwood.srt.grammar.regex import Choice, Node, parse, text

_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED: Ranges = charset.union([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_NUMBERED: Ranges = charset.union([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0xFFFF)])
_RAW: Ranges = charset.complement(_ESCAPED)
_PAIRED: Ranges = ((0x10000, charset.LAST),)


def literal(value: str) -> str:
    """A string's own literal, as this module's readers and the forced text have it."""
    return json.dumps(value, ensure_ascii=False)


@cache
def chars(ranges: Ranges) -> str:
    """A regex of the spellings of one character of a set: an atom, to which a repeat can be put."""
    forms = []
    raw = charset.intersection(ranges, _RAW)
    if raw:
        forms.append(plain(raw))
    letters = [
        letter for point, letter in _LETTERS.items() if charset.intersection(ranges, ((point, point),))
    ]
    if letters:
        forms.append(r"\\" + plain(charset.of("".join(letters))))
    numbered = charset.intersection(ranges, _NUMBERED)
    if numbered:
        forms.append(r"\\u" + _digits(numbered, 4))
    paired = charset.intersection(ranges, _PAIRED)
    if paired:
        forms.append(_pairs(paired))
    # An escape alone is more than one character of the regex: a repeat would take only its last digit.
    single = len(forms) == 1 and bool(raw)
    return forms[0] if single else "(?:" + "|".join(forms) + ")"


def _digits(ranges: Ranges, width: int) -> str:
    """The numbers of a set in hexadecimal, of so many digits, as one regex."""
    if width == 0:
        return ""
    step = 16 ** (width - 1)
    ways: dict[str, list[int]] = {}
    for digit in range(16):
        low, high = digit * step, (digit + 1) * step - 1
        inside = tuple((max(a, low) - low, min(b, high) - low) for a, b in ranges if a <= high and b >= low)
        if inside:
            full = inside == ((0, step - 1),) and width > 1
            rest = (
                "[0-9A-Fa-f]" + (f"{{{width - 1}}}" if width > 2 else "")
                if full
                else _digits(inside, width - 1)
            )
            ways.setdefault(rest, []).append(digit)
    parts = [_digit(digits) + rest for rest, digits in ways.items()]
    return parts[0] if len(parts) == 1 else "(?:" + "|".join(parts) + ")"


def _digit(digits: list[int]) -> str:
    both = "".join(sorted({case for digit in digits for case in (f"{digit:x}", f"{digit:X}")}))
    return plain(charset.of(both))


def _pairs(ranges: Ranges) -> str:
    ways: dict[Ranges, list[tuple[int, int]]] = {}
    for low, high in ranges:
        first, last = (low - 0x10000) >> 10, (high - 0x10000) >> 10
        a, b = (low - 0x10000) & 0x3FF, (high - 0x10000) & 0x3FF
        if first == last:
            ways.setdefault(((a, b),), []).append((first, first))
            continue
        whole = (first + (a > 0), last - (b < 0x3FF))
        if a > 0:
            ways.setdefault(((a, 0x3FF),), []).append((first, first))
        if b < 0x3FF:
            ways.setdefault(((0, b),), []).append((last, last))
        if whole[0] <= whole[1]:
            ways.setdefault(((0, 0x3FF),), []).append(whole)
    parts = []
    for lows, highs in ways.items():
        high_digits = _digits(tuple(charset.merged((0xD800 + a, 0xD800 + b) for a, b in highs)), 4)
        low_digits = _digits(tuple((0xDC00 + a, 0xDC00 + b) for a, b in lows), 4)
        parts.append(rf"\\u{high_digits}\\u{low_digits}")
    return parts[0] if len(parts) == 1 else "(?:" + "|".join(parts) + ")"


PRELUDE = f"""CHAR: /{chars(charset.ALL)}/
CHARS: CHAR*
STRING: "\\"" CHARS "\\""
"""
"""Terminals of one character of a string, of any number of them, and of every string."""


def quoted(node: Node) -> str:
    """A terminal, with the PRELUDE, of the literals of a tree's strings."""
    return f'/"(?:{written(node, chars)})"/'


def bounded(low: int, high: int | None) -> str:
    """A terminal, with the PRELUDE, of the literals of strings of `low` to `high` characters."""
    if low == 0 and high is None:
        return "STRING"
    return f'"\\"" CHAR{{{low},{"" if high is None else high}}} "\\""'


@cache
def found(pattern: str) -> str:
    """A terminal, with the PRELUDE, of the literals of strings in which a pattern is found.

    Raises ValueError naming what the pattern has that is not supported.
    """
    options = []
    for (begins, ends), part in bound(parse(pattern)).items():
        node = trimmed(part, (begins, ends))
        inner = f"/{written(node, chars) or '(?:)'}/"
        before, after = ('"\\"" ' if begins else '"\\"" CHARS '), (' "\\""' if ends else ' CHARS "\\""')
        options.append(quoted(node) if begins and ends else before + inner + after)
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def spelled(*values: str) -> str:
    """A terminal of all literals of some strings."""
    plain_ones = [
        value for value in values if value.isascii() and literal(value)[1:-1] == value and "\x7f" not in value
    ]
    others = [text(value) for value in values if value not in plain_ones]
    options = [json.dumps(literal(value)) for value in plain_ones]
    return " | ".join([*options, *([quoted(Choice(tuple(others)))] if others else [])])
