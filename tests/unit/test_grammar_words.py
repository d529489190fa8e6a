"""Strings of a kind: whether one is, and whether any is, against Python's own regular expressions."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from sapwood.srt.grammar.form import String
from sapwood.srt.grammar.limits import Budget, TooMuch
from sapwood.srt.grammar.words import Words
from tests.documents import found, string

PATTERNS = [
    "", "a", "^a", "a$", "^a$", "^a|b$", "ab", "^(ab)*$", "^(a|b){2,3}$", "^a?b?$", "[^a]", "^[^a]*$",
    "a{0,2}b",
    "^(?:a+)+$", "^(a*)*b$", "a^", "$a", "^$", "(^|b)a", "a($|b)", "^a{3}", "b{2,}$", ".", "^..$", "^.*$",
]  # fmt: skip
SHORT = ["".join(chars) for size in range(5) for chars in itertools.product("ab\n", repeat=size)]


def words() -> Words:
    return Words(Budget(10**9))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_found_where_python_finds_it(pattern: str) -> None:
    ours, shape = words(), String(patterns=(pattern,))
    assert [ours.holds(shape, text) for text in SHORT] == [found(pattern, text) for text in SHORT]


@pytest.mark.parametrize("seed", range(300))
def test_a_kind_is_empty_just_if_no_string_is_of_it(seed: int) -> None:
    r = random.Random(seed)
    shape = String(
        low=r.choice([0, 0, 1, 2]),
        high=r.choice([None, 2, 3]),
        patterns=tuple(r.sample(PATTERNS, r.randrange(3))),
        unlike=tuple(r.sample(PATTERNS, r.randrange(3))),
        excluded=frozenset(r.sample(SHORT[:20], r.randrange(4))),
    )
    # No pattern tells other letters apart, and none needs more than three characters; c is for the others.
    texts = SHORT + [
        "".join(chars) for size in range(1, 5) for chars in itertools.product("abc", repeat=size)
    ]
    assert words().empty(shape) == (not any(string(shape, text) for text in texts))


def test_patterns_that_say_nothing_are_known() -> None:
    assert [words().universal(pattern) for pattern in ("", "a*", "^", "$", "a|^", ".*")] == [True] * 6
    assert not any(words().universal(pattern) for pattern in ("a", "^$", "^.*$", "^a*$"))


def test_counted_repeats_and_long_patterns_take_no_time() -> None:
    start = time.process_time()
    ours = words()
    assert ours.holds(String(patterns=("^(?:a{900}){900}$",)), "a" * 900) is False
    assert ours.empty(String(patterns=("^" + "a" * 2_000 + "$",), high=1_999))
    assert not ours.empty(String(patterns=("^(a|b)*a(a|b){14}$",), low=200))
    assert time.process_time() - start < 5.0


def test_matching_spends_the_budget() -> None:
    with pytest.raises(TooMuch, match="takes more than 50 steps"):
        Words(Budget(50)).holds(String(patterns=("^a{1000}$",)), "a" * 1000)
