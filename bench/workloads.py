"""The workloads of `bench.serve`: prompts of real English, each of an exact number of tokens.

A prompt begins with a number of its own, so that prompts share what a workload makes them share and no more.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FEWEST_SENTENCES = 50
TRIES = 200
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Conversation:
    """Turns that are asked one after the other. Not a chat: one turn, whose text is the prompt."""

    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True)
class Workload:
    """`at_once` conversations run at a time; each turn is answered with `output` tokens."""

    name: str
    conversations: tuple[Conversation, ...]
    at_once: int
    output: int
    chat: bool = False

    @property
    def requests(self) -> int:
        return sum(len(c.turns) for c in self.conversations)


def sentences(files: Sequence[Path]) -> list[str]:
    """The plain English sentences of text files, and of all strings in JSON Lines files, each once.

    Raises ValueError if there are fewer than 50.
    """
    found: dict[str, None] = {}
    for file in files:
        text = file.read_text("utf-8")
        if file.suffix == ".jsonl":
            texts = [s for line in text.splitlines() if line.strip() for s in _strings(json.loads(line))]
        else:
            texts = text.split("\n\n")
        for part in texts:
            for sentence in SENTENCE_END.split(" ".join(part.split())):
                if _is_english(sentence):
                    found[sentence] = None
    if len(found) < FEWEST_SENTENCES:
        raise ValueError(
            f"--text has {len(found)} sentences of English, at least {FEWEST_SENTENCES} are needed"
        )
    return list(found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _strings(part)


def _is_english(sentence: str) -> bool:
    plain = sum(c.isascii() and (c.isalpha() or c == " ") for c in sentence)
    words = len(sentence.split())
    return (
        5 <= words <= 60 and sentence[0].isupper() and sentence[-1] in ".!?" and plain >= 0.85 * len(sentence)
    )


class Passages:
    """Passages of an exact length in tokens, from `pool` in the order that a generator draws."""

    def __init__(self, tokenizer: Any, pool: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        encoded = tokenizer.encode_batch([" " + s for s in pool], add_special_tokens=False)
        self._lengths = [len(e.ids) for e in encoded]

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def grow(self, start: str, tokens: int, rng: random.Random) -> str:
        """`start` and `tokens` more tokens of English; the tokens of `start` are a prefix of the result's.

        Raises ValueError if no text of that length is found.
        """
        head = self.ids(start)
        goal = len(head) + tokens
        for _ in range(TRIES):
            text = self._longer(start, tokens, rng)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoded.ids) < goal:
                continue
            end = encoded.offsets[goal - 1][1]
            cut = text[:end]
            whole_word = not text[end : end + 1].isalnum()
            if whole_word and self.ids(cut) == encoded.ids[:goal] and encoded.ids[: len(head)] == head:
                return cut
        raise ValueError(f"no text of exactly {tokens} tokens found in {TRIES} tries")

    def passage(self, tokens: int, rng: random.Random) -> str:
        return self.grow("", tokens, rng)

    def _longer(self, start: str, tokens: int, rng: random.Random) -> str:
        parts = [start] if start else []
        parts.append(f"{rng.randrange(1000, 10000)}.")
        length = 0
        while length <= tokens:
            at = rng.randrange(len(self._pool))
            parts.append(self._pool[at])
            length += self._lengths[at]
        return " ".join(parts)


def _single(passages: Passages, rng: random.Random) -> Workload:
    return Workload("single", _prompts(passages, rng, 1, 128), at_once=1, output=128)


def _batch(passages: Passages, rng: random.Random) -> Workload:
    return Workload("batch", _prompts(passages, rng, 32, 128), at_once=32, output=64)


def _shared_prefix(passages: Passages, rng: random.Random) -> Workload:
    system = passages.passage(1024, rng)
    asked = tuple(Conversation((passages.passage(64, rng),), system) for _ in range(64))
    return Workload("shared_prefix", asked, at_once=16, output=32, chat=True)


def _multi_turn(passages: Passages, rng: random.Random) -> Workload:
    chats = tuple(Conversation(tuple(passages.passage(64, rng) for _ in range(6))) for _ in range(8))
    return Workload("multi_turn", chats, at_once=8, output=64, chat=True)


def _few_shot_tree(passages: Passages, rng: random.Random) -> Workload:
    root = passages.passage(512, rng)
    groups = [passages.grow(root, 256, rng) for _ in range(4)]
    leaves = tuple(Conversation((passages.grow(group, 32, rng),)) for group in groups for _ in range(8))
    return Workload("few_shot_tree", leaves, at_once=32, output=16)


def _long_prompt(passages: Passages, rng: random.Random) -> Workload:
    return Workload("long_prompt", _prompts(passages, rng, 1, 4000), at_once=1, output=32)


def _overload(passages: Passages, rng: random.Random) -> Workload:
    return Workload("overload", _prompts(passages, rng, 200, 64), at_once=200, output=16)


def _prompts(passages: Passages, rng: random.Random, count: int, tokens: int) -> tuple[Conversation, ...]:
    return tuple(Conversation((passages.passage(tokens, rng),)) for _ in range(count))


WORKLOADS: dict[str, Callable[[Passages, random.Random], Workload]] = {
    "single": _single,
    "batch": _batch,
    "shared_prefix": _shared_prefix,
    "multi_turn": _multi_turn,
    "few_shot_tree": _few_shot_tree,
    "long_prompt": _long_prompt,
    "overload": _overload,
}


def build(name: str, passages: Passages, seed: int, repeat: int) -> Workload:
    """The workload of one repeat: the same for the same seed, and with no prompt of another repeat."""
    return WORKLOADS[name](passages, random.Random(f"{seed}/{repeat}/{name}"))
