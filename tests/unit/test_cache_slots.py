"""SlotPool: every slot is handed out once, in runs as long as can be had."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.srt.cache.slots import SlotPool


def slots(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_fresh_pool_gives_one_run_from_the_start() -> None:
    pool = SlotPool(10)
    taken = pool.allocate(4)
    assert taken.dtype == np.int32
    assert taken.tolist() == [0, 1, 2, 3]
    assert pool.num_free == 6


def test_the_lowest_run_that_fits_whole_is_taken_before_lower_pieces() -> None:
    pool = SlotPool(20)
    pool.allocate(20)
    pool.free(slots(0, 1, 5, 6, 7, 12, 13, 14, 15))
    assert pool.allocate(3).tolist() == [5, 6, 7]
    assert pool.allocate(3).tolist() == [12, 13, 14]
    assert pool.free_slots().tolist() == [0, 1, 15]


def test_pieces_are_joined_when_no_run_is_long_enough() -> None:
    pool = SlotPool(20)
    pool.allocate(20)
    pool.free(slots(1, 2, 8, 11, 12, 17))
    assert pool.allocate(4).tolist() == [1, 2, 8, 11]
    assert pool.free_slots().tolist() == [12, 17]
    assert pool.allocate(2).tolist() == [12, 17]
    assert pool.num_free == 0


def test_freed_neighbours_become_one_run_again_in_any_order() -> None:
    pool = SlotPool(9)
    taken = pool.allocate(9)
    pool.free(taken[[7, 4, 0]])
    pool.free(taken[[3, 8]])
    pool.free(taken[[6, 1, 5]])
    assert pool.allocate(6).tolist() == [3, 4, 5, 6, 7, 8]  # in pieces, 0 and 1 would be among them


def test_allocating_nothing_and_freeing_nothing_are_allowed() -> None:
    pool = SlotPool(1)
    assert pool.allocate(1).tolist() == [0]
    assert pool.allocate(0).tolist() == []
    pool.free(slots())
    assert pool.num_free == 0


def test_more_than_there_is_cannot_be_taken() -> None:
    pool = SlotPool(3)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="2 slots asked for, 1 free"):
        pool.allocate(2)
    assert pool.free_slots().tolist() == [2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((1, 4), "freed twice"),  # 4 is free
        ((1, 1), "freed twice"),
        ((2, 3, 5), "freed twice"),
        ((-1,), "-1 is below 0"),
        ((1, 6), "6 is not below 6"),
    ],
)
def test_a_wrong_free_is_noticed_and_changes_nothing(wrong: tuple[int, ...], message: str) -> None:
    pool = SlotPool(6)
    pool.allocate(4)
    with pytest.raises(AssertionError, match=message):
        pool.free(slots(*wrong))
    assert pool.num_free == 2
    assert pool.free_slots().tolist() == [4, 5]


def test_a_long_random_life_loses_and_doubles_nothing() -> None:
    rng = np.random.default_rng(7)
    pool = SlotPool(300)
    held: list[np.ndarray] = []
    for _ in range(3000):
        n = int(rng.integers(0, 40))
        if n <= pool.num_free and rng.random() < 0.6:
            held.append(pool.allocate(n))
        elif held:
            mine = rng.permutation(held.pop(int(rng.integers(len(held)))))
            kept = int(rng.integers(0, len(mine) + 1))
            pool.free(mine[kept:])
            held.append(mine[:kept])
        everything = np.concatenate([pool.free_slots(), *held])
        assert np.array_equal(np.sort(everything), np.arange(300))
        assert pool.num_free == 300 - sum(map(len, held))
