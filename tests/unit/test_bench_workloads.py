"""bench.workloads: prompts have the promised lengths, and share what they should and no more."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench.workloads import WORKLOADS, Passages, build, sentences

SUBJECTS = [
    "The gardener",
    "A young doctor",
    "My neighbour",
    "The old captain",
    "Every visitor",
    "The teacher",
]
VERBS = ["counted", "painted", "remembered", "sold", "carried", "repaired", "described"]
OBJECTS = ["the wooden boats", "a basket of apples", "several heavy books", "the broken clock", "her letters"]
ENGLISH = [f"{s} {v} {o} before the long winter." for s in SUBJECTS for v in VERBS for o in OBJECTS]


@functools.cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(ENGLISH, trainer)
    return made


@functools.cache
def passages() -> Passages:
    return Passages(tokenizer(), ENGLISH)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


SHAPES = {  # requests, at once, output, tokens of a turn
    "single": (1, 1, 128, 128),
    "batch": (32, 32, 64, 128),
    "shared_prefix": (64, 16, 32, 64),
    "multi_turn": (48, 8, 64, 64),
    "few_shot_tree": (32, 32, 16, 800),
    "long_prompt": (1, 1, 32, 4000),
    "overload": (200, 200, 16, 64),
}


def test_every_workload_has_a_shape_here() -> None:
    assert SHAPES.keys() == WORKLOADS.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_prompts_have_the_exact_length(name: str) -> None:
    requests, at_once, output, tokens = SHAPES[name]
    workload = build(name, passages(), seed=1, repeat=0)
    turns = [t for c in workload.conversations for t in c.turns]
    assert (workload.name, workload.requests, workload.at_once, workload.output) == (
        name, requests, at_once, output
    )  # fmt: skip
    assert {len(passages().ids(t)) for t in turns} == {tokens}
    assert len(set(turns)) == requests
    systems = {c.system for c in workload.conversations}
    assert [len(passages().ids(s)) for s in systems if s] == ([1024] if name == "shared_prefix" else [])
    assert workload.chat == (name in ("shared_prefix", "multi_turn"))


def test_the_tree_shares_what_it_says() -> None:
    workload = build("few_shot_tree", passages(), seed=3, repeat=0)
    ids = [passages().ids(c.turns[0]) for c in workload.conversations]
    own_number = 6  # two branches may draw the same number
    for i in range(32):
        for j in range(i):
            shared = 768 if i // 8 == j // 8 else 512
            assert shared <= common(ids[i], ids[j]) <= shared + own_number


def test_repeats_share_nothing_and_seeds_repeat() -> None:
    assert build("batch", passages(), 1, 0) == build("batch", passages(), 1, 0)
    first, second = (build("batch", passages(), 1, r).conversations for r in (0, 1))
    heads = [[passages().ids(c.turns[0]) for c in part] for part in (first, second)]
    assert max(common(a, b) for a in heads[0] for b in heads[1]) <= 6


def test_a_length_that_cannot_be_had_is_an_error() -> None:
    class Odd(Passages):
        def ids(self, text: str) -> list[int]:
            return [*super().ids(text), 0]

    with pytest.raises(ValueError, match="no text of exactly 20 tokens"):
        Odd(tokenizer(), ENGLISH).passage(20, random.Random(0))


def test_sentences_are_english_and_come_once(tmp_path: Path) -> None:
    rows = [{"turns": [s, {"text": ENGLISH[0]}], "n": 3} for s in ENGLISH[:60]]
    rows.append({"turns": ["x = 3*3 <<3*3=9>> + 4*5 == 29 and so on 12 34.", "too short.", "no End of it"]})
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in rows))
    assert sentences([file]) == ENGLISH[:60]
    plain = tmp_path / "a.txt"
    plain.write_text(" ".join(ENGLISH[:30]) + "\n\n" + "\n".join(ENGLISH[30:60]))
    assert sentences([plain]) == ENGLISH[:60]
    plain.write_text(ENGLISH[0])
    with pytest.raises(ValueError, match="1 sentences"):
        sentences([plain])
