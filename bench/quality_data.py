"""What the models of `bench.quality` are asked: chunks of real text, and questions with choices."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPTIONS = 4
"""Choices of an item made here."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Item:
    """One question: the choice that a model finds most likely after `context` is its answer."""

    context: str
    choices: tuple[str, ...]
    right: int


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; SystemExit names the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as e:
            raise SystemExit(f"{path}:{number}: not JSON: {e}") from None
        if not isinstance(row, dict):
            raise SystemExit(f"{path}:{number}: expected an object")
        rows.append(row)
    return rows


def text_of(path: Path) -> str:
    """A file's text. Of JSON lines: questions with their worked answers, or the turns, row after row."""
    if path.suffix != ".jsonl":
        return path.read_text(encoding="utf-8")
    return "\n\n".join(_prose(row, path) for row in read_rows(path))


def _prose(row: dict[str, Any], path: Path) -> str:
    if "turns" in row:
        return "\n".join(row["turns"])
    if "question" in row and "answer" in row:
        return f"Question: {row['question']}\nAnswer: {row['answer']}"
    if "text" in row:
        return str(row["text"])
    raise SystemExit(
        f"{path}: a row needs text, turns, or a question and its answer; it has {', '.join(row)}"
    )


def chunks(texts: Sequence[list[int]], size: int, count: int) -> list[list[int]]:
    """`count` chunks of `size` tokens, spread evenly over each text and, as far as they go, over all texts.

    Raises SystemExit if there are fewer whole chunks than that.
    """
    whole = [len(text) // size for text in texts]
    if sum(whole) < count:
        raise SystemExit(f"the texts hold {sum(whole)} chunks of {size} tokens, {count} were asked for")
    shares = [0] * len(texts)
    while sum(shares) < count:
        open_texts = [i for i in range(len(texts)) if shares[i] < whole[i]]
        shares[min(open_texts, key=lambda i: shares[i])] += 1
    found = []
    for text, share in zip(texts, shares, strict=True):
        room = len(text) - size
        starts = [room * i // max(1, share - 1) for i in range(share)]
        found += [text[start : start + size] for start in starts]
    return found


def items_of(path: Path, count: int, seed: int = 0) -> list[Item]:
    """Up to `count` items of a JSON-lines file: rows of `context`, `choices` and `answer` (an index) as they
    are; of GSM8K or MT-bench rows they are made here, with wrong choices from other rows."""
    rows, rng = read_rows(path), random.Random(seed)
    if not rows:
        raise SystemExit(f"{path}: has no rows")
    if all("choices" in row for row in rows):
        return [_given_item(row, path) for row in rows[:count]]
    rng.shuffle(rows)
    if all("turns" in row for row in rows):
        return [_turn_item(row, rows, rng) for row in rows[:count]]
    if all("question" in row and "answer" in row for row in rows):
        return [_solution_item(row, rows, rng) for row in rows[:count]]
    raise SystemExit(f"{path}: no items can be made of rows with {', '.join(rows[0])}")


def _given_item(row: dict[str, Any], path: Path) -> Item:
    context, choices, right = row.get("context"), row["choices"], row.get("answer")
    if not isinstance(context, str) or not isinstance(right, int) or not 0 <= right < len(choices):
        raise SystemExit(f"{path}: a row with choices needs a context and the index of its answer")
    return Item(context, tuple(choices), right)


def _item(context: str, right: str, others: set[str], rng: random.Random) -> Item:
    if len(others) < OPTIONS - 1:
        raise SystemExit(f"a question needs {OPTIONS - 1} wrong choices, the other rows have {len(others)}")
    choices = [right, *rng.sample(sorted(others), OPTIONS - 1)]
    rng.shuffle(choices)
    return Item(context, tuple(choices), choices.index(right))


def _solution_item(row: dict[str, Any], rows: list[dict[str, Any]], rng: random.Random) -> Item:
    """Which first step of a worked answer belongs to the question?"""
    right = _first_step(row)
    others = {_first_step(r) for r in rows} - {right}
    return _item(f"Question: {row['question']}\nAnswer:", right, others, rng)


def _first_step(row: dict[str, Any]) -> str:
    return " " + str(row["answer"]).splitlines()[0]


def _turn_item(row: dict[str, Any], rows: list[dict[str, Any]], rng: random.Random) -> Item:
    """Which second turn belongs to the first?"""
    right = str(row["turns"][1])
    others = {str(r["turns"][1]) for r in rows} - {right}
    return _item(f"{row['turns'][0]}\n\n", right, others, rng)


def encoded(item: Item, encode: Encode) -> tuple[list[int], list[list[int]]]:
    """(ids of the context, ids of each choice): the tokens of both together are cut where the choices part
    from the context alone."""
    context = encode(item.context)
    whole = [encode(item.context + choice) for choice in item.choices]
    common = len(context)
    while any(ids[:common] != context[:common] for ids in whole):
        common -= 1
    common = min(common, *(len(ids) - 1 for ids in whole))
    return context[:common], [ids[common:] for ids in whole]
