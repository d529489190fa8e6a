"""Grammars of requests mean what their characters say, or are refused by rule and line."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.grammars import compiled, refusal, takes

JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= "" | " " | "\n" [ \t]{0,20}   # bounded
"""


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= "a" | "b" more\nmore ::= [0-9]+ # digits', ["a", "b12"], ["b", "c", "ab1"]),
        ('root ::= [a-z]* "end"', ["end", "fooend", "endend"], ["foo"]),
        ('root ::= "(" root ")" | "ab" | "abc"', ["(ab)", "((abc))", "ab"], ["(ab", "abcd"]),
        # The shorter word is followed by what would go on with the longer one.
        ('root ::= x "z" | "(" root ")"\nx ::= "a" | "abc"', ["az", "abcz", "(az)"], ["abz", "(abz)"]),
        ('root ::= s\ns ::= [a-c]* "b" s | "x"', ["bx", "abbx", "cbbx", "x"], ["ax", "abbcx"]),
        ('root ::= "a" root "b" | ""', ["ab", "aaabbb", ""], ["aab", "ba"]),
        (
            'root ::= e\ne ::= t ("+" t)*\nt ::= n | "(" e ")"\nn ::= [0-9]+ ("." [0-9]+)?',
            ["1+2", "(1+2.5)+3", "((1))"],
            ["1+", "(1", "1."],
        ),
        ('root ::= ("a" | "bc"){2,3} [^x]', ["aab", "bcabcd", "aaaa"], ["aa", "aax"]),
        (
            r'root ::= "\x41\u00e9\U0001F600\"\\\n" [\]\-a] .',
            ['A\u00e9\U0001f600"\\\n]\n', 'A\u00e9\U0001f600"\\\n-x'],
            ["A"],
        ),
        ('root ::= a-b\na-b ::= "x" c_1.d\nc_1.d ::= "y"?', ["x", "xy"], ["y"]),
        (
            JSON,
            ['{"a": 1, "b": [1, 2.5e3, true, {"x": null}]}', '{"a":1}', '{"a\\"b": "\\u00e9"}\n  '],
            ['{"a" : [}', "[1]"],
        ),
    ],
)
def test_meaning(grammar: str, yes: list[str], no: list[str]) -> None:
    matcher = compiled("ebnf", grammar)
    assert [takes(matcher, text) for text in yes + no] == [True] * len(yes) + [False] * len(no)


class Model:
    """Texts of a random grammar over a, b, c by what its rules say, up to a length."""

    def __init__(self, rules: dict[str, list[list[str]]], longest: int) -> None:
        self.texts: dict[str, set[str]] = {name: set() for name in rules}
        while True:
            before = sum(map(len, self.texts.values()))
            for name, options in rules.items():
                for parts in options:
                    sets = [self.texts[part] if part in rules else {part} for part in parts]
                    for chosen in itertools.product(*sets):
                        if len("".join(chosen)) <= longest:
                            self.texts[name].add("".join(chosen))
            if sum(map(len, self.texts.values())) == before:
                return


def test_random_recursive_grammars_take_exactly_their_texts() -> None:
    rng, tried = random.Random(4), 0
    texts = ["".join(chars) for n in range(6) for chars in itertools.product("abc", repeat=n)]
    words = ["a", "b", "c", "ab", "abc", "bc", "aa", "cb"]
    while tried < 60:
        rules = {
            name: [
                [
                    rng.choice(words),
                    *(rng.choice([*words, "root", "x", "y"]) for _ in range(rng.randrange(3))),
                ]
                for _ in range(rng.randint(1, 3))
            ]
            for name in ("root", "x", "y")
        }
        lines = [
            f"{name} ::= "
            + " | ".join(" ".join(p if p in rules else f'"{p}"' for p in parts) for parts in options)
            for name, options in rules.items()
        ]
        try:
            matcher = compiled("ebnf", "\n".join(lines))
        except ValueError:
            continue
        tried += 1
        model = Model(rules, 5)
        for text in texts:
            assert takes(matcher, text) is (text in model.texts["root"]), (lines, text)


@pytest.mark.parametrize(
    ("grammar", "names"),
    [
        ('root ::= "a"\nb ::= foo', "line 2: the rule foo is not defined, used in b"),
        ('x ::= "a"', "the rule root is missing"),
        ("", "the rule root is missing"),
        ('root ::= root "a" | "b"', "line 1: the rule root is left-recursive"),
        ('root ::= "a" x\nx ::= y "b"\ny ::= "c"? x', "line 2: the rule x is left-recursive"),
        ('root ::= "a" root', "line 1: the rule root admits no text that ends"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ('root ::= "a', "line 1: '\"a' is not understood"),
        ('root ::= "a" |', "line 1: an alternative is empty"),
        ('\nroot ::= ("a"', "line 2: a ( is not closed"),
        ("root ::= [z-a]", "ends out of order"),
        ('root ::= "a"{3,2}', "{3,2} is no repeat"),
        ('root ::= "\\q"', "the escape '\\\\q' is not supported"),
        ('root ::= "\\ud800"', "is no character"),
        ('root ::= (= "a") "b"', "not understood"),
        ('root ::= ""', "only the empty text"),
        ('root ::= (("a"{1,1000}){1,1000}){1,1000}', "stands for more than"),
        ("root ::= " + "(" * 80 + '"a"' + ")" * 80, "nested more than 64"),
        (
            'root ::= r0 | "b"\nr490 ::= "(" root ")"\n'
            + "\n".join(f'r{i} ::= ("a" ("a" ("a" r{i + 1})?)?)?' for i in range(490)),
            "1200 rules and brackets, within each other",
        ),
        ('start: "a" foo', 'unknown name: "foo"'),
        ('start: %json {"type": "object"}', "line 1: %json is not supported"),
        ("%llguidance {}\nstart: <|im_end|>", "line 2: <|im_end|> is not supported"),
        ("start: @other", "line 1: @other"),
        ("start: x\nx[max_tokens=3]: /a+/", "[max_tokens=3]"),
        ('start: /a\n"/ <|im_start|> "b"', "line 2: <|im_start|> is not supported"),
        ('start: /a\n"/ %json {"type": "object"} "b"', "line 2: %json is not supported"),
        ('start: /a\n"/ @x "b"', "line 2: @x is not supported"),
        ('start: %lark {\nstart: "b"\n}', "line 1: %lark is not supported"),
        (
            'start: x\nx[suffix="x", max_tokens=3]: /a+/',
            'line 2: [suffix="x", max_tokens=3] is not supported',
        ),
        ("start: x\nx[lazy,temperature=2]: /a+/", "[lazy,temperature=2] is not supported"),
        ('start: x\nx[capture_name="]", max_tokens=3]: /a+/', 'line 2: [capture_name="]", max_tokens=3]'),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1: %llguidance is not supported"),
        ('start: "a\n', 'line 1: "a is not supported'),
        ("start: /a", "line 1: / is not supported"),
        ("start: " + "(" * 80 + '"a"' + ")" * 80, "line 1: brackets are nested more than 64 deep"),
        (
            'start: a0\na1200: "x"\n' + "\n".join(f"a{i}: a{i + 1}" for i in range(1200)),
            "more than 1000 rules",
        ),
        ('start: a\na: "x"\n}\nb: {"y"', "line 3: nothing is open at }"),
        ('start: ("a"', "line 1: a bracket is not closed"),
    ],
)
def test_what_is_wrong_is_named(grammar: str, names: str) -> None:
    assert names in refusal("ebnf", grammar)


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('start: /a\n"b/ "c"', 'a\n"bc', "ab"),
        ('start: x "!"\nx[suffix="b"]: /[ab]+/', "aab!", "aabb!"),
        ('start: x "!"\nx[lazy]: /[ab]+;/', "ab;!", "ab!"),
        ('start: INT [A] | (A INT)~2\nA: "a"i\n%import common.INT', "A1a23", "1a2"),
        ('%llguidance {}\nstart: (A B)+\nA: /[a-c]/ & ~/b/\nB: "0".."9"\n%ignore / /', "a1 c2", "b1"),
        ('start: %regex {"substring_words": "a b]: c"}', "b]: c", "ba"),
    ],
)
def test_lark_that_is_taken(grammar: str, yes: str, no: str) -> None:
    matcher = compiled("ebnf", grammar)
    assert [takes(matcher, text) for text in (yes, no)] == [True, False]


def test_lark_is_taken_as_the_engine_takes_it() -> None:
    matcher = compiled("ebnf", 'start: "<x>" "%json" B /<a>/ # <b>\nB: /[0-9]+/ // @c\n')
    assert takes(matcher, "<x>%json12<a>")
    assert not takes(matcher, "<x>%json<a>")
    after = compiled("ebnf", 'start: "a" B\nB: /[0-9]+/', after="</think>")
    assert takes(after, "x</think>\na12")
    assert not takes(after, "a12")


def test_many_rules_that_cannot_be_told_apart_end_soon() -> None:
    chain = "\n".join(f'r{i} ::= "a" r{i + 1} | "(" root ")"' for i in range(300))
    matcher = compiled("ebnf", f'root ::= r0\n{chain}\nr300 ::= "x"')
    assert takes(matcher, "a" * 300 + "x")
    assert not takes(matcher, "a" * 299 + "x")


@pytest.mark.parametrize("after", ["", "</think>"])
@pytest.mark.parametrize("start", ["start", "?start", "!start", "!?start"])
def test_lark_s_start_may_have_its_marks(start: str, after: str) -> None:
    matcher = compiled("ebnf", f'{start}: x "c"\n?x: "a" | "b"', after=after)
    assert takes(matcher, f"{after}ac")
    assert not takes(matcher, f"{after}cc")
