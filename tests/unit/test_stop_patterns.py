"""stop_regex: found at the right token, cut exactly, never leaked, at a bounded cost."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings, strategies as st

from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import automaton as partial, positions
from sapwood.srt.grammar.charset import representatives
from sapwood.srt.grammar.limits import Budget
from sapwood.srt.grammar.regex import Chars, Repeat, parse, sets_of
from sapwood.srt.grammar.stop_regex import (
    MAX_MATCH,
    MAX_SIZE,
    MAX_STEPS,
    MAX_STEPS_TOGETHER,
    automaton,
    check,
)
from sapwood.srt.tokenizer.stop_patterns import PatternScanner
from sapwood.srt.tokenizer.stops import StopScanner, StopStrings

Scan = tuple[list[str], str | None, int]


def scan(tokens: list[str], patterns: list[str], stops: list[str] = [], min_tokens: int = 0) -> Scan:  # noqa: B006
    """(deltas, the pattern or stop string that matched, at which token; 0 for none)."""
    scanner = StopScanner(StopStrings(stops), automaton(tuple(patterns)), patterns)
    deltas = []
    for n, token in enumerate(tokens, 1):
        deltas.append(scanner.feed(token, n >= min_tokens))
        if scanner.matched is not None:
            return deltas, scanner.matched, n
    return [*deltas, scanner.release()], None, 0


def test_no_part_of_a_match_leaks() -> None:
    assert scan(list("abc: 12-34 x"), [r"\d\d-\d\d"]) == (
        ["a", "b", "c", ":", " ", "", "", "", "", ""], r"\d\d-\d\d", 10,
    )  # fmt: skip


def test_what_turns_out_to_be_no_match_is_sent_later_and_whole() -> None:
    assert scan(list("12-3x4"), [r"\d\d-\d\d"]) == (["", "", "", "", "12-3x", "", "4"], None, 0)
    assert scan(["1", "1", "2", "-34"], [r"\d2-\d"]) == (["", "1", "", ""], r"\d2-\d", 4)


def test_the_shortest_match_counts() -> None:
    assert scan(["a\n\n", "\n"], [r"\n+"]) == (["a"], r"\n+", 1)
    assert scan(["a<", "b", ">c>"], ["<.*>"]) == (["a", "", ""], "<.*>", 3)
    assert scan(["<<a>"], ["<.*>"]) == ([""], "<.*>", 1)


def test_the_match_that_ends_first_wins_then_that_which_begins_first() -> None:
    assert scan(["abcd"], ["abcd|bc"]) == (["a"], "abcd|bc", 1)
    assert scan(["abcd"], ["abcd", "bc"]) == (["a"], "bc", 1)
    assert scan(["abc"], ["bc", "a.c"]) == ([""], "a.c", 1)
    assert scan(["xb"], ["b", "[b]"]) == (["x"], "b", 1)


def test_beside_stop_strings_the_earlier_token_wins_then_the_earlier_beginning() -> None:
    assert scan(["ab", "cd"], ["a.cd"], ["bc"]) == (["", ""], "a.cd", 2)
    assert scan(["ab", "c", "d"], ["a.cd"], ["bc"]) == (["", "a"], "bc", 2)
    assert scan(["abcd"], ["c"], ["bcd"]) == (["a"], "bcd", 1)
    assert scan(["abcd"], ["bc"], ["bcd"]) == (["a"], "bc", 1)
    assert scan(["a1", "EN"], [r"\d\n"], ["END"]) == (["a", "1", "EN"], None, 0)


def test_a_match_before_min_tokens_is_not_acted_on() -> None:
    assert scan(["a1", "b", "2", "c"], [r"\d"], min_tokens=3) == (["a1", "b", ""], r"\d", 3)
    # One that has been complete may go on: what it has become by then is cut.
    assert scan(["x\n", "\n", "\n"], [r"\n+"], min_tokens=3) == (["x", "", ""], r"\n+", 3)
    assert scan(["x\n", "y", "\n"], [r"\n+"], min_tokens=3) == (["x", "\ny", ""], r"\n+", 3)


def test_the_beginning_of_the_output_is_an_anchor() -> None:
    assert scan(["Q", "Q"], ["^Q"]) == ([""], "^Q", 1)
    assert scan(["aQ", "Q"], ["^Q"]) == (["aQ", "Q", ""], None, 0)
    assert scan(["Q"], [r"(^|\n)Q"])[1:] == (r"(^|\n)Q", 1)
    assert scan(["aQ\n", "Q"], [r"(^|\n)Q"]) == (["aQ", ""], r"(^|\n)Q", 2)
    assert scan(["", "b"], ["^b"])[1:] == ("^b", 2)


def test_unicode() -> None:
    assert scan(["naï", "ve 🌳", "🌲 end"], ["[🌲-🌵]{2}"]) == (["naï", "ve ", ""], "[🌲-🌵]{2}", 3)
    assert scan(["a\u2028b"], ["."])[1:] == (".", 1)
    assert scan(["\u2028"], ["."]) == (["\u2028", ""], None, 0)


def test_a_match_has_at_most_so_many_characters() -> None:
    """What is held back is bounded: text so long is no part of a match any more."""
    pattern = r"<[^>]*>"
    assert scan(["<" + "a" * (MAX_MATCH - 2), ">"], [pattern]) == (["", ""], pattern, 2)
    deltas, matched, _ = scan(["<", *"a" * (MAX_MATCH + 5), ">"], [pattern])
    assert matched is None
    assert deltas[MAX_MATCH - 1] == ""
    assert deltas[MAX_MATCH] == "<" + "a" * MAX_MATCH
    # A later beginning still counts, although the older one had come to the same place.
    assert scan(["<" + "a" * 1000 + "<", "b" * 500, ">"], [pattern])[0] == ["", "<" + "a" * 1000, ""]


@pytest.mark.parametrize("first", [0, 1, 3, 500, 1026, 1030])
def test_how_long_a_match_may_be_is_the_same_in_any_tokens(first: int) -> None:
    for inside, found in ((MAX_MATCH - 2, True), (MAX_MATCH - 1, False)):
        text = "xx<" + "a" * inside + ">yy"
        deltas, matched, _ = scan([text[:first], text[first:]], [r"<[^>]*>"])
        assert (matched is not None, "".join(deltas)) == (found, "xx" if found else text)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a*", "matches the empty text"),
        ("^", "matches the empty text"),
        ("(^|a)", "matches the empty text"),
        ("a$", r"the anchor \$ is not supported"),
        ("(a|b$)c", r"the anchor \$"),
        ("(?=a)", "lookahead"),
        ("(?<!a)b", "negative lookbehind"),
        (r"(a)\1", r"backreference \\1"),
        (r"a\b", "word boundary"),
        ("(?i)a", "inline flag"),
        ("(a", r"unmatched \("),
        ("a**", "quantifier"),
        (r"\p{L}", r"property \\p"),
        ("[^\\s\\S]", "can match nothing"),
        ("a^b", "can match nothing"),
        ("a{1025}", f"stands for 1025 characters.*{MAX_SIZE}"),
        ("(a{1,50}){1,50}", f"stands for 2500 characters.*{MAX_SIZE}"),
        ("((){1000}){1000}", "stands for 1000000 characters|more than 1000000"),
        ("[ab]?" * 48 + "c", f"up to 1272 steps for one character.*{MAX_STEPS}"),
        ("[^Q]{0,500}Q", f"up to 1500 steps for one character.*{MAX_STEPS}"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_what_cannot_be_looked_for_is_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        automaton((pattern,))
    assert refused.value.param == "stop_regex"


def test_the_limits_are_for_all_patterns_together() -> None:
    with pytest.raises(BadRequest, match="stands for 1200"):
        automaton(("a{600}", "b{600}"))
    assert automaton(("a{60}",)).steps == automaton(("a{60}", "b{60}")).steps == 120
    with pytest.raises(BadRequest, match="up to 240 steps"):
        automaton(("a{60}", "[ab]{60}"))


def test_the_choices_of_a_prompt_share_a_limit() -> None:
    """Each has a token in every step of the model, and a token may have many characters."""
    assert automaton(("a{60}",)).steps * 17 <= MAX_STEPS_TOGETHER < automaton(("a{60}",)).steps * 18
    check(["a{60}"], 17)
    with pytest.raises(BadRequest, match=f"2160 for 18 choices, above the limit of {MAX_STEPS_TOGETHER}"):
        check(["a{60}"], 18)


@pytest.mark.parametrize("token", [1, 128])
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a|a)*b", "a"),
        ("(a{1,6}){1,6}b", "a"),
        ("(a+)+b", "a"),
        (".*.*.*x", "a"),
        ("(a?){50}b", "a"),
        ("(((a*)*)*)*b", "a"),
        ("([ab]|[bc]|[ac]|b|a)*d", "abc"),
        (r"(\w+\s?)+:", "ab "),
        (r"\w{79}\.", "ab"),
        ("[^x]{1,50}x", "🌳"),
        ("[^x]{0,22}[^y]{0,22}z", "a"),
    ],
)
def test_a_character_costs_no_more_than_the_limit(
    pattern: str, text: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many characters a token has: those of all positions that are looked at, and of all ways."""
    spent = 0

    class Counted(positions.Ways):
        def __getitem__(self, position: int) -> tuple[int, ...]:
            nonlocal spent
            found = super().__getitem__(position)
            spent += 1 + len(found)
            return found

    monkeypatch.setattr(positions, "Ways", Counted)
    automaton.cache_clear()
    patterns = automaton((pattern,))
    automaton.cache_clear()
    assert patterns.steps <= MAX_STEPS
    scanner = PatternScanner(patterns)
    text = (text * 10_240)[:10_240]
    for at in range(0, len(text), token):
        before = spent
        assert scanner.feed(text[at : at + token]) is None
        assert spent - before <= patterns.steps * token
    assert spent > len(text) // 2
    assert scanner.held <= MAX_MATCH


class Read(tuple[tuple[int, int], ...]):
    """A set that counts how often it is looked through."""

    times = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        Read.times += 1
        return super().__iter__()


def test_the_copies_of_a_repeat_are_read_once() -> None:
    """A set of hundreds of characters, a thousand times over, would hold up all streams."""
    odd = Read((char, char) for char in range(0x4E00, 0x5000, 2))
    counts = []
    for copies in (2, 1000):
        Read.times = 0
        positions.Positions([Repeat(Chars(odd), copies, copies)])
        counts.append(Read.times)
    assert counts[0] == counts[1]


def test_a_text_of_many_kinds_of_characters_is_not_remembered_for_ever() -> None:
    patterns = automaton(("[a-z]+[^a-z]?!",))
    scanner = PatternScanner(patterns)
    scanner.feed("".join(map(chr, range(0x100, 0x3000))))
    assert len(patterns._column_of) <= positions.MAX_COLUMNS
    assert len(patterns._columns) <= positions.MAX_COLUMNS


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "*?"])
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.builds(lambda part, count: f"(?:{part}){count}", parts, counts),
    )


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\n", "(?:^)"]), joined, max_leaves=6
)
TOKENS = st.lists(st.text("abc\n", max_size=4), max_size=8)


def supported(patterns: list[str]) -> list[str]:
    """Those that are not refused; one that matches the empty text gets a character more."""
    found = []
    for pattern in patterns:
        for one in (pattern, f"(?:{pattern})c"):
            try:
                automaton((one,))
            except BadRequest:
                continue
            found.append(one)
            break
    return found


def matches(patterns: list[str], text: str, after: int) -> Iterator[tuple[int, int, int]]:
    """(end, start, pattern) of all matches that end behind `after`."""
    for end in range(after + 1, len(text) + 1):
        for start in range(end):
            for number, pattern in enumerate(patterns):
                if re.compile(pattern).fullmatch(text, start, end):
                    yield end, start, number


def plain(
    tokens: list[str], patterns: list[str], stops: list[str], min_tokens: int
) -> tuple[str, str | None, int]:
    """The promise in a few slow lines: all beginnings and ends are tried."""
    text = ""
    for n, token in enumerate(tokens, 1):
        before, text = len(text), text + token
        hits = [
            (start, start + len(stop), 0, stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if found := min(matches(patterns, text, before), default=None):
            hits.append((found[1], found[0], 1, patterns[found[2]]))
        if hits and n >= min_tokens:
            start, _end, _kind, name = min(hits)
            return text[:start], name, n
    return text, None, 0


@settings(max_examples=400)
@given(
    st.lists(PATTERNS, min_size=1, max_size=2),
    TOKENS,
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    st.integers(0, 6),
)
@example(["(?:(?:^)|b){2}a"], ["ba"], [], 0)
@example(["(?:(?:a)?){2,}b"], ["a", "ab"], [], 0)
def test_equals_trying_all_beginnings_and_ends(
    drawn: list[str], tokens: list[str], stops: list[str], min_tokens: int
) -> None:
    if not (patterns := supported(drawn)):
        return
    deltas, matched, n = scan(tokens, patterns, stops, min_tokens)
    assert ("".join(deltas), matched, n) == plain(tokens, patterns, stops, min_tokens)


@settings(max_examples=200)
@given(PATTERNS, TOKENS)
def test_held_text_is_the_longest_suffix_that_may_become_a_match(drawn: str, tokens: list[str]) -> None:
    """By the other automaton that there is: no beginning is held that no character can carry on."""
    for pattern in supported([drawn.replace("(?:^)", "c")]):
        node = parse(pattern)
        whole, chars = partial.whole(node, Budget(10**9)), representatives(sets_of(node))
        scanner, text, sent = StopScanner(StopStrings([]), automaton((pattern,)), [pattern]), "", ""
        for token in tokens:
            text += token
            sent += scanner.feed(token, acting=False)
            states = [(start, whole.start) for start in range(len(text))]
            live = []
            for start, state in states:
                for i, char in enumerate(text[start:]):
                    state = whole.step(state, char, i == 0)
                if any(whole.step(state, char, False) != partial.LOST for char in chars):
                    live.append(start)
            assert sent == text[: min(live, default=len(text))]
