"""Stop strings: found at the right token, cut exactly, never leaked."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from sapwood.srt.tokenizer.stops import StopScanner, StopStrings


def scan(tokens: list[str], stops: list[str], min_tokens: int = 0) -> tuple[list[str], str | None, int]:
    """(deltas, the stop string that matched, at which token; 0 for none)."""
    scanner = StopScanner(StopStrings(stops))
    deltas = []
    for n, token in enumerate(tokens, 1):
        deltas.append(scanner.feed(token, n >= min_tokens))
        if scanner.matched is not None:
            return deltas, scanner.matched, n
    return [*deltas, scanner.release()], None, 0


def test_no_part_of_a_stop_string_leaks() -> None:
    deltas, matched, n = scan(list("ABCDEFGHIJKL"), ["DEFGHIJ"])
    assert deltas == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert (matched, n) == ("DEFGHIJ", 10)


def test_text_that_turns_out_not_to_be_the_stop_string_is_sent_later_and_whole() -> None:
    deltas, matched, n = scan(list("ABCDEFGXYZ"), ["DEFGHIJ"])
    assert deltas == ["A", "B", "C", "", "", "", "", "DEFGX", "Y", "Z", ""]
    assert (matched, n) == (None, 0)


def test_a_stop_that_begins_at_the_end_is_released() -> None:
    assert scan(["one ", "two DEF"], ["DEFG"]) == (["one ", "two ", "DEF"], None, 0)


def test_one_stop_over_many_tokens_and_inside_one() -> None:
    assert scan(["x<", "|", "e", "nd", "|>y"], ["<|end|>"]) == (["x", "", "", "", ""], "<|end|>", 5)
    assert scan(["ab<|end|>cd"], ["<|end|>"]) == (["ab"], "<|end|>", 1)


def test_a_failed_beginning_may_hold_the_true_one() -> None:
    assert scan(["a", "a", "a", "b"], ["aab"]) == (["", "", "a", ""], "aab", 4)
    assert scan(list("abababc"), ["ababc"])[1:] == ("ababc", 7)


def test_the_earlier_token_wins_then_the_earlier_start_then_the_shorter() -> None:
    assert scan(["a", "bc", "d"], ["abcd", "bc"]) == (["", "a"], "bc", 2)
    assert scan(["abcd"], ["bc", "abcd"]) == ([""], "abcd", 1)
    assert scan(["xbcd"], ["c", "bcd"]) == (["x"], "bcd", 1)
    assert scan(["xabc"], ["abc", "ab"]) == (["x"], "ab", 1)


def test_a_match_before_min_tokens_is_not_acted_on() -> None:
    assert scan(["a", "e", "b", "e", "c"], ["e"], min_tokens=3) == (["a", "e", "b", ""], "e", 4)
    # Complete before, going on after: only what ends at token 3 or later counts.
    assert scan(["bc", "d"], ["bc", "bcd"], min_tokens=2) == (["", ""], "bcd", 2)
    assert scan(["ab", "x", "ab"], ["ab"], min_tokens=2) == (["ab", "x", ""], "ab", 3)


def test_unicode() -> None:
    assert scan(["naï", "ve 🌳", "🌲 end"], ["🌳🌲"]) == (["naï", "ve ", ""], "🌳🌲", 3)
    assert scan(["e\u0301"], ["\u0301"]) == (["e"], "\u0301", 1)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def plain(tokens: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """The promise in a few slow lines."""
    text = ""
    for n, token in enumerate(tokens, 1):
        before, text = len(text), text + token
        hits = [
            (start, start + len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if hits and n >= min_tokens:
            start, _end, stop = min(hits)
            return text[:start], stop, n
    return text, None, 0


WORDS = st.text("abc", max_size=4)


@given(
    st.lists(WORDS, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.integers(0, 6),
)
@example(["a", "b", "a", "c"], ["ac", "ba"], 0)
def test_equals_the_plain_search(tokens: list[str], stops: list[str], min_tokens: int) -> None:
    deltas, matched, n = scan(tokens, stops, min_tokens)
    text, plain_matched, plain_n = plain(tokens, stops, min_tokens)
    assert ("".join(deltas), matched, n) == (text, plain_matched, plain_n)


@given(st.lists(WORDS, max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_held_text_is_the_longest_suffix_that_may_become_a_stop(tokens: list[str], stops: list[str]) -> None:
    scanner, text, sent = StopScanner(StopStrings(stops)), "", ""
    for token in tokens:
        text += token
        sent += scanner.feed(token)
        if scanner.matched is not None:
            return
        begun = [k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert sent == text[: len(text) - max(begun, default=0)]
