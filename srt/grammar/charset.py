"""Sets of characters, as sorted ranges of code points. No set has surrogates: text has none."""

from __future__ import annotations

import unicodedata
from bisect import bisect
from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges, in order, with gaps between them."""

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LONG_NAMES = {
    "letter": "L",
    "uppercaseletter": "Lu",
    "lowercaseletter": "Ll",
    "titlecaseletter": "Lt",
    "casedletter": "LC",
    "modifierletter": "Lm",
    "otherletter": "Lo",
    "mark": "M",
    "nonspacingmark": "Mn",
    "spacingmark": "Mc",
    "enclosingmark": "Me",
    "number": "N",
    "decimalnumber": "Nd",
    "letternumber": "Nl",
    "othernumber": "No",
    "punctuation": "P",
    "connectorpunctuation": "Pc",
    "dashpunctuation": "Pd",
    "openpunctuation": "Ps",
    "closepunctuation": "Pe",
    "initialpunctuation": "Pi",
    "finalpunctuation": "Pf",
    "otherpunctuation": "Po",
    "symbol": "S",
    "mathsymbol": "Sm",
    "currencysymbol": "Sc",
    "modifiersymbol": "Sk",
    "othersymbol": "So",
    "separator": "Z",
    "spaceseparator": "Zs",
    "lineseparator": "Zl",
    "paragraphseparator": "Zp",
    "control": "Cc",
    "format": "Cf",
    "privateuse": "Co",
    "unassigned": "Cn",
}


def union(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any ranges, in any order, as one set."""
    return _without_surrogates(merged(pairs))


def merged(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Any ranges of numbers, in any order, as the fewest ones."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _without_surrogates(pairs: list[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in pairs:
        parts = ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high))
        found += [part for part in parts if part[0] <= part[1]]
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is not in the set."""
    pairs, start = [], 0
    for low, high in ranges:
        if start < low:
            pairs.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        pairs.append((start, LAST))
    return _without_surrogates(pairs)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """What is in both sets."""
    pairs, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            pairs.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(pairs)


def representatives(sets: Iterable[Ranges], singles: Iterable[str] = ()) -> list[str]:
    """Characters of which each stands for all that are in the same sets; single ones stand for themselves."""
    alone = set(singles)
    found_in = [(ranges, [low for low, _ in ranges]) for ranges in sets]
    edges = {0, *(point + step for point in map(ord, alone) for step in (0, 1))}
    for ranges, _ in found_in:
        for low, high in ranges:
            edges |= {low, high + 1}
    found: dict[tuple[object, ...], str] = {}
    for point in sorted(edges):
        if point > LAST or _SURROGATES[0] <= point <= _SURROGATES[1]:
            continue
        kind = (
            *((at := bisect(lows, point)) > 0 and point <= ranges[at - 1][1] for ranges, lows in found_in),
            chr(point) if chr(point) in alone else "",
        )
        found.setdefault(kind, chr(point))
    return list(found.values())


def of(text: str) -> Ranges:
    """The set of a text's characters."""
    return union((ord(char), ord(char)) for char in text)


ALL: Ranges = complement(())
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
LINE_ENDS: Ranges = of("\n\r\u2028\u2029")
SPACE: Ranges = union(
    [
        *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
"""White space and line ends of ECMA-262."""


def category(name: str) -> Ranges:
    """The characters of a property by its name in ECMA-262: general categories, Any, ASCII and Assigned.

    Raises KeyError for others.
    """
    key = name.partition("=")[2] if name.startswith(("gc=", "General_Category=")) else name
    if key in ("Any", "ASCII", "Assigned"):
        return {"Any": ALL, "ASCII": ((0, 0x7F),), "Assigned": complement(_categories()["Cn"])}[key]
    short = _LONG_NAMES.get(key.replace("_", "").lower(), key)
    if short == "LC":
        return union(pair for part in ("Lu", "Ll", "Lt") for pair in _categories()[part])
    if len(short) == 1 and short in "LMNPSZC":
        return union(pair for part, found in _categories().items() if part[0] == short for pair in found)
    return _categories()[short]


@cache
def _categories() -> dict[str, Ranges]:
    # One pass over Unicode takes a tenth of a second: only for those who ask, and once.
    found: dict[str, list[tuple[int, int]]] = {}
    start, last = 0, unicodedata.category(chr(0))
    for point in range(1, LAST + 2):
        name = unicodedata.category(chr(point)) if point <= LAST else ""
        if name != last:
            found.setdefault(last, []).append((start, point - 1))
            start, last = point, name
    return {name: _without_surrogates(pairs) for name, pairs in found.items()}
