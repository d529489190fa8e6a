"""SentencePiece vocabularies out of GGUF files: the ids are those of SentencePiece's own rule."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood.srt.errors import ModelError
from sapwood.srt.loader.gguf_spm import merges_of
from sapwood.srt.loader.gguf_tokenizer import build
from tests.gguf_files import spm_metadata

HERE = Path("m.gguf")
SPACE = "\u2581"


class Reference:
    """SentencePiece's BPE as llama.cpp does it: the best-scored pair of neighbours is joined, the leftmost of
    equals, until none is a token; what is no token then becomes bytes. Tokens that are not normal are cut out
    of the text first, the longest at each place."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens, kinds = metadata["tokenizer.ggml.tokens"], list(metadata["tokenizer.ggml.token_type"])
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = list(metadata["tokenizer.ggml.scores"])
        whole = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (2, 3, 4)]
        self.joined = set(tokens) - set(whole) - {f"<0x{b:02X}>" for b in range(256)}
        self.whole = re.compile("|".join(map(re.escape, sorted(whole, key=len, reverse=True))))
        self.prefix = " " if metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        self.bos = metadata["tokenizer.ggml.bos_token_id"]

    def encode(self, text: str) -> list[int]:
        found, at = [self.bos], 0
        for match in self.whole.finditer(text):
            found += [*self.plain(text[at : match.start()]), self.ids[match[0]]]
            at = match.end()
        return found + self.plain(text[at:])

    def plain(self, text: str) -> list[int]:
        symbols = list((self.prefix + text).replace(" ", SPACE)) if text else []
        after = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and symbols[left] + symbols[right] in self.joined:
                union = symbols[left] + symbols[right]
                heapq.heappush(queue, (-self.scores[self.ids[union]], left, right, len(union)))

        for left in range(len(symbols) - 1):
            consider(left, left + 1)
        while queue:
            _score, left, right, size = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left] + symbols[right]) != size:
                continue
            symbols[left], symbols[right] = symbols[left] + symbols[right], ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [i for symbol in symbols if symbol for i in self._ids_of(symbol)]

    def _ids_of(self, symbol: str) -> list[int]:
        if symbol in self.joined:
            return [self.ids[symbol]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]


def letters(*more: str) -> dict[str, float]:
    """A vocabulary of single letters and some longer pieces, the earlier the better."""
    return {piece: -float(i) for i, piece in enumerate([*more, SPACE, *"abcdefgh"])}


def ids_of(metadata: dict[str, Any]) -> Callable[[str], list[int]]:
    tokenizer = build(metadata, HERE)
    return lambda text: list(tokenizer.encode(text).ids)


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    return list(build(metadata, HERE).encode(text, add_special_tokens=False).tokens)


def test_the_best_score_is_joined_first() -> None:
    """Not the longest, and not the leftmost unless scores are equal."""
    for pieces, tokens in [
        (letters("bc", "ab"), ["a", "bc", "d"]),
        (letters("ab", "bc"), ["ab", "c", "d"]),
        (letters("cd", "abc", "ab"), ["ab", "cd"]),
    ]:
        assert tokens_of(spm_metadata(pieces, add_space_prefix=False), "abcd") == tokens


def test_a_token_is_reached_by_any_cut_of_it() -> None:
    metadata = spm_metadata(letters("abc", "bc"), add_space_prefix=False)
    assert merges_of(metadata, HERE) == [("a", "bc"), ("b", "c")]
    assert tokens_of(metadata, "abcabc") == ["abc", "abc"]


def test_scores_rank_not_ids() -> None:
    pieces = {**letters("ab", "bc"), "bc": 5.0}
    assert tokens_of(spm_metadata(pieces, add_space_prefix=False), "abc") == ["a", "bc"]


@pytest.mark.parametrize(
    ("prefix", "text", "tokens"),
    [
        (True, "ab", [SPACE, "a", "b"]),
        (True, " ab", [SPACE, SPACE, "a", "b"]),
        (True, "a</s>b", [SPACE, "a", "</s>", SPACE, "b"]),
        (False, "ab", ["a", "b"]),
        (False, "a</s> b", ["a", "</s>", SPACE, "b"]),
        (True, "", []),
    ],
)
def test_the_prefix_space(prefix: bool, text: str, tokens: list[str]) -> None:
    metadata = spm_metadata(letters(), add_space_prefix=prefix)
    assert tokens_of(metadata, text) == tokens
    if "<" not in text:
        assert build(metadata, HERE).decode(build(metadata, HERE).encode(text).ids) == text


def test_unknown_letters_are_bytes_and_come_back() -> None:
    tokenizer = build(spm_metadata(letters()), HERE)
    assert tokenizer.encode("é", add_special_tokens=False).tokens == [SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aé☃🙂b").ids) == "aé☃🙂b"


def test_no_text_becomes_a_control_token_or_a_byte_by_joining() -> None:
    pieces = dict.fromkeys([SPACE, *"<>/s0xC3", "<s", "</s", "<0", "<0x", "<0xC", "<0xC3"], 0.0)
    metadata = spm_metadata(pieces, add_space_prefix=False)
    assert not {"<s>", "</s>", "<0xC3>"} & {left + right for left, right in merges_of(metadata, HERE)}
    assert tokens_of(metadata, "<0xC3>") == ["<0xC3", ">"]


@pytest.mark.parametrize(
    ("more", "first", "last"),
    [
        ({}, 1, None),  # the kind's default
        ({"add_bos_token": False}, None, None),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 2),
        ({"add_bos_token": False, "add_eos_token": True}, None, 2),
    ],
)
def test_ends_are_added_where_the_file_says_so(
    more: dict[str, Any], first: int | None, last: int | None
) -> None:
    tokenizer = build(spm_metadata(letters(), **more), HERE)
    plain = tokenizer.encode("ab", add_special_tokens=False).ids
    expected = [i for i in (first,) if i is not None] + plain + [i for i in (last,) if i is not None]
    assert tokenizer.encode("ab").ids == expected


def test_special_and_user_defined_tokens() -> None:
    metadata = spm_metadata(letters("ab", "abc"), add_space_prefix=False)
    metadata["tokenizer.ggml.token_type"][260] = 4  # "abc"
    tokenizer = build(metadata, HERE)
    assert tokenizer.encode("xabcab", add_special_tokens=False).tokens == ["<0x78>", "abc", "ab"]
    assert tokenizer.decode([1, 260, 2]) == "abc"
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {"<unk>": True, "<s>": True, "</s>": True, "abc": False}


def test_phi_3_swallows_the_space_behind_its_control_tokens() -> None:
    metadata = spm_metadata(letters())
    metadata["tokenizer.ggml.tokens"][2] = "<|end|>"
    names = dict(enumerate(metadata["tokenizer.ggml.tokens"]))
    found = [
        [names[i] for i in build(given, HERE).encode("a<|end|> \nb<s> b").ids]
        for given in (metadata, metadata | {"general.architecture": "phi3"})
    ]
    begin, end = ["<s>", SPACE, "a", "<|end|>"], [SPACE, "b", "<s>", SPACE, SPACE, "b"]
    assert found == [[*begin, SPACE, SPACE, "<0x0A>", *end[1:]], [*begin, *end]]


@pytest.mark.parametrize("seed", range(3))
def test_random_vocabularies_and_texts(seed: int) -> None:
    draw = random.Random(seed)
    pieces = {"".join(draw.choices(SPACE + "abcd", k=draw.choice([2, 2, 3, 4, 6]))) for _ in range(120)}
    metadata = spm_metadata(letters(*sorted(pieces)), add_space_prefix=bool(seed % 2))
    ours, reference = ids_of(metadata), Reference(metadata)
    texts = [
        "".join(draw.choices("abcd é\n", [6, 6, 6, 6, 4, 1, 1], k=draw.randint(1, 40))) for _ in range(400)
    ]
    for text in texts:
        assert ours(text) == reference.encode(text), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": [0.0]}, r"has \d+ tokens but 1 entries in tokenizer.ggml.scores"),
        (
            {"tokenizer.ggml.scores": [float("nan")] * 268},
            "tokenizer.ggml.scores hold a value that is no number",
        ),
        ({"tokenizer.ggml.token_type": [1]}, "entries in tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id 1000000 is no token"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert'"),
    ],
)
def test_what_cannot_be_converted_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build({**spm_metadata(letters()), **change}, HERE)
