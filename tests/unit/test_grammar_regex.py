"""Patterns: the meaning of ECMA-262, found anywhere or as a whole, or a refusal that names the construct."""

from __future__ import annotations

import json
import random
import re

import pytest

from sapwood.srt.grammar import charset, language, regex
from sapwood.srt.grammar.formats import FORMATS
from tests.grammars import compiled, refusal, takes


def found(pattern: str, text: str) -> bool:
    """By this project's reading of the pattern, and Python's matching of what it says."""
    tree = language.searched(regex.parse(pattern))
    written = re.sub(
        r"\\x\{([0-9a-f]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", language.written(tree, language.plain)
    )
    return re.fullmatch(written, text) is not None


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^(?=.*[0-9])[a-z0-9]+$", "lookahead (?= at position 1"),
        ("(?!x)y", "negative lookahead (?! at position 0"),
        ("(?<=x)y", "lookbehind (?<="),
        ("a(?<!x)y", "negative lookbehind (?<! at position 1"),
        (r"\bword\b", r"a word boundary \b at position 0"),
        (r"\Ba", r"a word boundary \B"),
        (r"(a)\1", r"a backreference \1 at position 3"),
        (r"(?<n>a)\k<n>", r"a backreference \k"),
        ("(?i)a", "an inline flag (?i"),
        ("(?>a)", "an atomic group"),
        (r"\Z", r"an unknown escape \Z"),
        (r"\u12", r"a bad escape \u12"),
        (r"\ud800", r"a bad escape \ud800"),
        ("[z-a]", "a range with its ends out of order"),
        ("(", "an unmatched ("),
        (")", "an unmatched )"),
        ("[a", "an unmatched ["),
        ("*a", "a quantifier * with nothing before it"),
        ("a**", "a quantifier * after a quantifier"),
        ("a++", "a possessive quantifier"),
        ("a{2,1}", "bounds out of order"),
        ("a{10001}", "more than 10000"),
        ("a{,3}", "without its lower bound"),
        ("^*", "a repeated anchor ^"),
        ("(^a)+", "an anchor inside a repeated group"),
        (r"\p{Script=Greek}", r"the property \p{Script=Greek}"),
        ("((a{1,9000}){1,9000})", "more than 1000000 characters"),
        ("(" * 70 + "a" + ")" * 70, "at most 64 deep"),
        ("a" * 20_000, "at most 16384 characters"),
        ("a\\", "an unknown escape"),
    ],
)
def test_what_is_not_regular_or_no_pattern_is_refused_by_name(pattern: str, names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        language.searched(regex.parse(pattern))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("b+", ["abc", "b", "bb"], ["", "ac"]),
        ("^a|b$", ["a", "ax", "xb", "b"], ["xa", "bx"]),
        (r"\d{3}-\S+", ["123-x", "x123-\u00e9 y"], ["12-x", "123- x", "\u0661\u0662\u0663-x"]),
        (r"^\p{L}+$", ["a\u00e9\u4e00"], ["a1", ""]),
        (r"^\P{L}$", ["1"], ["a"]),
        (r"^\p{Lu}\p{Letter}\p{gc=Nd}$", ["A\u00e91"], ["a\u00e91"]),
        (r"^[^\W_]+$", ["ab1"], ["a_", "a b"]),
        ("a{0,3}?", ["", "xyz"], []),
        ("^a.c$", ["abc", "a\u00e9c"], ["a\nc", "a\u2028c", "ac"]),
        (r"^\s$", [" ", "\u00a0", "\ufeff", "\u2003", "\v"], ["x", "\u200b"]),
        (r"^[\w-]+$", ["a-b"], ["a b"]),
        (r"^[a-f\d-]+$", ["a-9"], ["g"]),
        (r"^[\w-.]$", ["-", ".", "a"], ["+"]),
        ("^[]$", [], ["", "a"]),
        ("^[^]$", ["a", "\n"], ["", "ab"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\u{1F600}\ud83d\ude00\x41\cA\0$", ["\U0001f600\U0001f600A\x01\x00"], ["A"]),
        (r"^\$\{x\}\-\/$", ["${x}-/"], ["x"]),
        ("^{x}$", ["{x}"], ["x"]),
        ("(^|,)a(,|$)", ["a", "x,a,y", "a,"], ["xa", "ax"]),
        ("a^b|c", ["c", "xcx"], ["ab", "b"]),
        ("^(x*^a|b)", ["a", "b", "bz"], ["xa"]),
        ("$", ["", "x"], []),
        ("(?:a|(?<n>b)|(?P<m>c))$", ["xa", "b", "c"], ["ax"]),
        ("(a*)*b", ["aaab", "b"], ["aaa"]),
        ("c(?:^a){0}b", ["cb", "xcb"], ["b", "ca"]),
    ],
)
def test_meaning(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [found(pattern, text) for text in yes + no] == [True] * len(yes) + [False] * len(no)


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(9 if depth else 4)
    if kind < 3:
        return rng.choice(
            ["a", "b", '"', "\\\\", "\\n", "\u00e9", ".", "[ab]", '[^a"]', "\\d", "\\x01", "[\u00e0-\u00ff]"]
        )
    if kind == 3:
        return rng.choice(["", "^", "$"]) if rng.random() < 0.5 else "/"
    if kind < 6:
        return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)
    inner = random_pattern(rng, depth - 1)
    if kind == 6:
        return f"(?:{inner}|{random_pattern(rng, depth - 1)})"
    return f"(?:{inner}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '{0}', '*?'])}"


def test_random_patterns_in_json_as_python_finds_them() -> None:
    rng, tried = random.Random(6), 0
    while tried < 150:
        pattern = random_pattern(rng)
        try:
            language.searched(regex.parse(pattern))
        except ValueError:
            continue
        tried += 1
        low, high = rng.choice([(0, None), (0, None), (1, 3), (2, 4)])
        schema: dict[str, object] = {"type": "string", "pattern": pattern, "minLength": low}
        if high is not None:
            schema["maxLength"] = high
        # "$" of Python is also before a last line end, and "." excludes that only.
        python = re.compile(pattern.replace("$", r"\Z").replace("[^]", "[\\s\\S]"))
        texts = ["".join(rng.choices('ab"\\\n1\u00e9/\x01\U0001f600', k=rng.randrange(6))) for _ in range(25)]
        wanted = [
            bool(python.search(t)) and low <= len(t) and (high is None or len(t) <= high) for t in texts
        ]
        try:
            matcher = compiled("json_schema", schema)
        except ValueError:
            assert not any(wanted), pattern
            continue
        for text, want in zip(texts, wanted, strict=True):
            for ascii_only in (True, False):
                assert takes(matcher, json.dumps(text, ensure_ascii=ascii_only)) is want, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"^\x01{2}$", ["\\u0001\\u0001"], ["\\u00011", "\\u0001"]),
        (r"^\x01*$", ["", "\\u0001\\u0001"], ["\\u000"]),
        (r"^\v*$", ["", "\\u000b\\u000B"], ["\\u000", "\\u000bb"]),
        (r"^\x1b?$", ["", "\\u001B"], ["\\u001"]),
        (r"^\0{2}$", ["\\u0000\\u0000"], ["\\u00000"]),
        (r"^[\x00-\x07]+$", ["\\u0000\\u0007"], ["\\u00000", "\\u00077"]),
    ],
)
def test_a_repeat_takes_all_of_an_escape(pattern: str, yes: list[str], no: list[str]) -> None:
    matcher = compiled("json_schema", {"type": "string", "pattern": pattern})
    verdicts = [takes(matcher, f'"{text}"') for text in yes + no]
    assert verdicts == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^" + "a" * 2000 + "$", "a" * 2000, "a" * 1999),
        ("^" + "[ab]c" * 700, "bc" * 700 + "x", "bc" * 699),
        ("a?" * 1500 + "b", "xb", "xa"),
    ],
)
def test_long_patterns_are_not_nested(pattern: str, yes: str, no: str) -> None:
    matcher = compiled("json_schema", {"type": "string", "pattern": pattern})
    assert takes(matcher, json.dumps(yes))
    assert not takes(matcher, json.dumps(no))


def test_sets_of_characters() -> None:
    rng = random.Random(3)
    for _ in range(200):
        pairs = [(low := rng.randrange(60), low + rng.randrange(9)) for _ in range(rng.randrange(5))]
        members = {point for low, high in pairs for point in range(low, high + 1)}
        found_set = charset.union(pairs)
        assert {p for low, high in found_set for p in range(low, high + 1)} == members
        other = charset.complement(found_set)
        assert charset.intersection(found_set, other) == ()
        assert charset.union([*found_set, *other]) == charset.ALL


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        (
            "date",
            ["2024-02-29", "2023-12-31", "2000-02-29"],
            ["2023-02-29", "1900-02-29", "2024-13-01", "0000-01-01"],
        ),
        ("time", ["12:34:56Z", "23:59:59.123+01:00"], ["24:00:00Z", "12:34:56", "08:30:06 PST"]),
        ("date-time", ["1990-12-31T15:59:50.123-08:00"], ["1990-02-31T15:59:59.123-08:00", "1990-12-31"]),
        (
            "duration",
            ["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT36H", "P2W"],
            ["PT1D", "P", "P1", "P2D1Y", "P1Y2W"],
        ),
        ("email", ["joe.bloggs@example.com"], ["2962", ".test@example.com", "te..st@example.com", "a@b@c"]),
        (
            "hostname",
            ["www.example.com", "xn--4gbwdl.xn--wgbh1c"],
            ["-a-b", "a_b", "a" * 64 + ".com", "a..b"],
        ),
        ("ipv4", ["192.168.0.1"], ["127.0.0.0.1", "256.1.1.1", "01.1.1.1"]),
        (
            "ipv6",
            ["::1", "::", "1::2:3", "::ffff:192.168.0.1", "1:2:3:4:5:6:7:8"],
            ["12345::", "1:::2", "1:2:3:4:5:6:7"],
        ),
        (
            "uuid",
            ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
            ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa98"],
        ),
        (
            "uri",
            ["http://foo.bar/?baz=qux#quux", "mailto:a@b.c", "urn:x:y", "ldap://[2001:db8::7]/c=GB"],
            ["//foo.bar/", "/abc", "http:// a", ":// should fail", "bar,baz:foo%", "http://a[b]"],
        ),
        ("json-pointer", ["", "/", "/foo/bar~0/baz~1"], ["/foo/bar~", "foo"]),
    ],
)
def test_formats(name: str, yes: list[str], no: list[str]) -> None:
    assert [found(FORMATS[name], text) for text in yes + no] == [True] * len(yes) + [False] * len(no)


def test_a_request_s_pattern_is_matched_as_a_whole() -> None:
    spaces = compiled("regex", "[a-z]+  [a-z]+")
    assert takes(spaces, "ab  cd")
    assert not takes(spaces, "ab cd")
    assert not takes(spaces, " ab  cd")
    assert takes(compiled("regex", "[a-z]+ [a-z]+"), "a b")
    either = compiled("regex", "^a|b$")
    assert [takes(either, text) for text in ("a", "b", "ab", "ax")] == [True, True, False, False]
    catastrophic = compiled("regex", "(x+x+)+y")
    assert takes(catastrophic, "x" * 50 + "y")
    assert not takes(catastrophic, "x" * 50)
    lines = compiled("regex", r"a[\s\S]*/z")
    assert takes(lines, "a\n/\n/z")
    assert "empty" in refusal("regex", "")
    assert "lookahead" in refusal("regex", "(?=a)b")
    assert "only the empty text" in refusal("regex", "a{0}")
    assert "no text at all" in refusal("regex", "a[]")
    assert "surrogate" in refusal("regex", "a\ud800")
