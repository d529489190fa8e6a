"""Where a JSON text stands when it is cut, and that only valid ones are complete."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from sapwood.srt.messages import Incomplete
from sapwood.srt.tokenizer.partial_json import JsonScanner


def scan(text: str) -> JsonScanner:
    scanner = JsonScanner()
    scanner.feed(text)
    return scanner


@pytest.mark.parametrize(
    ("text", "pointer", "inside"),
    [
        ("", "", "text"),
        ("  ", "", "text"),
        ("{", "", "object"),
        ('{"', "", "key"),
        ('{"a', "", "key"),
        ('{"a"', "", "object"),
        ('{"a": ', "", "object"),
        ('{"a": "', "/a", "string"),
        ('{"a": "x\\', "/a", "string"),
        ('{"a": "x\\u00', "/a", "string"),
        ('{"a": "x"', "", "object"),
        ('{"a": "x", ', "", "object"),
        ('{"a": 1', "/a", "number"),
        ('{"a": -', "/a", "number"),
        ('{"a": tr', "/a", "literal"),
        ('{"a": [', "/a", "array"),
        ('{"a": [1', "/a/0", "number"),
        ('{"a": [1, ', "/a", "array"),
        ('{"a": [1, "', "/a/1", "string"),
        ('{"a": [[], {"b/c~d": {"\\u00e9\\n": "', "/a/1/b~1c~0d/é\n", "string"),
        ('"', "", "string"),
        ("12", "", "number"),
    ],
)
def test_where_it_stands(text: str, pointer: str, inside: str) -> None:
    for scanner in (scan(text), JsonScanner()):
        for char in text if scanner.place == Incomplete("", "text") else "":
            scanner.feed(char)
        assert scanner.place == Incomplete(pointer, inside)
        assert scanner.live


@pytest.mark.parametrize(
    "text",
    ["}", "]", "{]", "[}", "{,", "[,", '{"a"}', '{"a" 1', '{"a": }', "[1 2", "[1,]", '{"a":1,}', "nul1",
     "nope", "01 ", "1. ", "-a", "1e+]", '"\n', '"\\x', '"\\u12g', "[tru]", "'a'",
     '{a: 1}', "[.5]", "[+1]", "[-]"],
)  # fmt: skip
def test_what_is_no_json_breaks(text: str) -> None:
    assert scan(text).broken
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.strip())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values, st.booleans(), st.data())
def test_valid_json_is_followed_to_its_end(value: object, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(0, len(text)))
    scanner = JsonScanner()
    assert scanner.feed(text[:cut]) == cut
    assert not scanner.broken
    rest = text[cut:] + " x"
    taken = scanner.feed(rest)
    assert scanner.complete
    assert rest[taken:] in (" x", rest[-2:])
    assert scanner.place is None


def test_half_a_surrogate_pair_in_a_key_can_be_told() -> None:
    place = scan('{"\\ud83d": "x').place
    assert place == Incomplete("/?", "string")
