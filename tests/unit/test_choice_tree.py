"""Choices as a tree: each token of each choice is judged, and computed once if something follows it."""

from __future__ import annotations

import math
import random

import pytest

from sapwood.srt.messages import TextLogprob
from sapwood.srt.server import choice_tree
from sapwood.srt.server.choice_tree import ChoiceTree, Row


def logprob(before: list[int], token: int) -> float:
    """What a model whose logprobs depend on all that came before might say."""
    return -float(hash((*before, token)) % 1_000_003)


def values_of(row: Row) -> list[TextLogprob]:
    """What the row gives: at each place the path's token, and all those that are beside it somewhere."""
    values = []
    for i, token in enumerate(row.path):
        before = row.before + row.path[:i]
        beside = [(other, logprob(before, other), f"<{other}>", b"") for other in row.beside]
        values.append(TextLogprob(token, logprob(before, token), f"<{token}>", b"", [], beside))
    return values


def judge(choices: list[list[int]]) -> tuple[ChoiceTree, list[list[Row]]]:
    """The tree with all that it asks for, and what it asked for, time after time."""
    tree, waves = ChoiceTree(choices), []
    while rows := tree.rows():
        waves.append(rows)
        for row in rows:
            tree.tell(row, values_of(row))
    return tree, waves


def check(choices: list[list[int]]) -> list[list[Row]]:
    tree, waves = judge(choices)
    for i, choice in enumerate(choices):
        want = [(token, logprob(choice[:at], token), f"<{token}>") for at, token in enumerate(choice)]
        assert tree.judged(i) == want, choice
    followed = {tuple(choice[:n]) for choice in choices for n in range(len(choice))}
    computed = [
        tuple(row.before + row.path[:n]) for rows in waves for row in rows for n in range(len(row.path))
    ]
    assert len(computed) == len(set(computed)), "a token was computed twice"
    assert set(computed) == followed, "a token that nothing follows was computed"
    told: set[tuple[int, ...]] = set()
    for rows in waves:
        for row in rows:
            assert not row.before or tuple(row.before) in told, "a row began after what was not judged"
        for row in rows:
            told |= {tuple(row.before + row.path[:n]) for n in range(1, len(row.path) + 1)}
            told |= {
                (*row.before, *row.path[:n], other) for n in range(len(row.path)) for other in row.beside
            }
    return waves


@pytest.mark.parametrize(
    ("choices", "rows"),
    [
        ([[5]], [1]),
        ([[5], [6], [7]], [1]),
        ([[5, 6, 7]], [1]),
        ([[5], [5]], [1]),
        ([[5, 6], [5]], [1]),
        ([[5], [5, 6], [5, 6, 7]], [1]),
        ([[5, 6], [7, 8]], [1, 1]),
        ([[5, 6], [7, 8], [9, 8], [4]], [1, 2]),
        ([[5, 6, 7], [5, 8, 9], [5, 6, 5, 5]], [1, 1]),
        ([[5, 6, 7], [5, 8, 9], [5, 6, 5, 5], [6, 8, 8]], [1, 2]),
        ([[1, 1], [1, 1, 1], [1, 2, 1], [2, 1, 2]], [1, 2]),
    ],
)
def test_rows(choices: list[list[int]], rows: list[int]) -> None:
    assert [len(wave) for wave in check(choices)] == rows


def test_choices_of_one_token_need_one_row_and_nothing_after_the_prompt() -> None:
    (row,) = ChoiceTree([[7], [5], [6]]).rows()
    assert row == Row([], [7], [5, 6], [0])


def test_random_choices() -> None:
    rng = random.Random(5)
    for _ in range(150):
        letters = range(rng.choice([2, 3, 20]))
        check([rng.choices(letters, k=rng.randint(1, 8)) for _ in range(rng.randint(1, 40))])


def test_256_choices_take_few_turns() -> None:
    """However they branch: the row that has most below it goes on."""
    rng = random.Random(6)
    ladder = [[1] * n + [2] for n in range(256)]
    assert len(check(ladder)) == 1
    forked = [[1] * n + [2, 3] for n in range(256)]
    assert len(check(forked)) == 2
    full = [[n >> bit & 1 for bit in range(8)] for n in range(256)]
    assert len(check(full)) == math.log2(256)
    for _ in range(5):
        base = [rng.choices(range(2), k=300) for _ in range(4)]
        choices = [[*rng.choice(base)[: rng.randint(0, 299)], rng.randint(2, 5), 6] for _ in range(256)]
        assert len(check(choices)) <= 9


def test_a_row_tells_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut, and goes on as another one: nothing is computed twice."""
    monkeypatch.setattr(choice_tree, "MAX_JUDGED", 20)
    choices = [[1] * 50, *[[1, 1, n] for n in range(2, 12)], *[[n, 5] for n in range(2, 6)]]
    waves = check(choices)
    assert all(len(row.path) * (1 + len(row.beside)) <= 50 for wave in waves for row in wave)
    assert sum(len(wave) for wave in waves) > 5


def test_long_choices_are_no_recursion() -> None:
    check([[1] * 5000, [1] * 4999 + [2]])
