"""What goes first when slots run out, and what a flush leaves."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import pack


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(64)


@pytest.fixture
def tree(pool: SlotPool) -> RadixTree:
    return RadixTree(pool)


def insert(tree: RadixTree, pool: SlotPool, ids: list[int], namespace: str = "") -> Node:
    known, _ = tree.peek(namespace, pack(ids), len(ids))
    slots = pool.allocate(len(ids))
    node = tree.insert(namespace, pack(ids), slots).node
    pool.free(slots[:known])
    return node


def cached(tree: RadixTree, ids: list[int], namespace: str = "") -> int:
    return tree.peek(namespace, pack(ids), len(ids))[0]


def test_leaves_go_in_the_exact_order_of_their_last_use(tree: RadixTree, pool: SlotPool) -> None:
    paths = [[i, i, i] for i in range(8)]
    for path in paths:
        insert(tree, pool, path)
    order = [3, 1, 7, 0, 5, 2, 6, 4]
    for i in order:
        tree.match("", pack(paths[i]), 3)
    for gone, i in enumerate(order):
        assert [cached(tree, paths[j]) for j in order[gone:]] == [3] * (8 - gone)
        assert tree.evict(3) == 3
        assert cached(tree, paths[i]) == 0
    assert pool.num_free == 64


def test_the_order_follows_uses_after_the_first_eviction(tree: RadixTree, pool: SlotPool) -> None:
    for i in range(1, 5):
        insert(tree, pool, [i, i])
    tree.evict(2)  # now the order of the others has been settled
    node = tree.match("", pack([2, 2]), 2).node
    tree.lock(tree.match("", pack([3, 3]), 2).node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(2) == 2
    assert [cached(tree, [i, i]) for i in range(1, 5)] == [0, 2, 2, 0]
    assert tree.evict(9) == 2
    assert [cached(tree, [i, i]) for i in range(1, 5)] == [0, 0, 2, 0]


def test_peek_does_not_count_as_a_use(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 1])
    insert(tree, pool, [2, 2])
    tree.peek("", pack([1, 1]), 2)
    tree.evict(2)
    assert (cached(tree, [1, 1]), cached(tree, [2, 2])) == (0, 2)


def test_a_locked_path_counts_as_used_until_it_is_unlocked(tree: RadixTree, pool: SlotPool) -> None:
    node = insert(tree, pool, [1, 1])
    tree.lock(node)
    insert(tree, pool, [2, 2])
    tree.unlock(node)
    tree.evict(2)
    assert (cached(tree, [1, 1]), cached(tree, [2, 2])) == (2, 0)


def test_order_is_one_across_namespaces(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 1], "a")
    insert(tree, pool, [1, 1], "b")
    tree.match("a", pack([1, 1]), 2)
    tree.evict(2)
    assert (cached(tree, [1, 1], "a"), cached(tree, [1, 1], "b")) == (2, 0)
    assert tree.namespaces == ["a"]


def test_only_the_tail_that_is_needed_is_trimmed(tree: RadixTree, pool: SlotPool) -> None:
    node = insert(tree, pool, [1, 2, 3, 4, 5])
    kept = node.path_slots()[:2].tolist()
    assert tree.evict(1) == 1
    assert tree.evict(2) == 2
    assert cached(tree, [1, 2, 3, 4, 5]) == 2
    assert node.path_slots().tolist() == kept
    assert (tree.num_nodes, tree.cached_tokens, pool.num_free) == (1, 2, 62)
    assert tree.evict(1) == 1
    assert node.path_slots().tolist() == kept[:1]
    tree.check()
    check_pool(pool, tree, [])


def test_a_parent_follows_its_last_child_in_its_own_turn(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 1, 2, 2])
    insert(tree, pool, [5, 5])
    tree.match("", pack([1, 1]), 2)  # the prefix is used after [5, 5], its tail before
    assert tree.evict(2) == 2
    assert (cached(tree, [1, 1, 2, 2]), cached(tree, [5, 5])) == (2, 2)
    assert tree.evict(2) == 2
    assert (cached(tree, [1, 1, 2, 2]), cached(tree, [5, 5])) == (2, 0)
    assert tree.evict(2) == 2
    assert tree.namespaces == []


def test_a_prefix_with_a_child_left_stays(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 1, 2])
    insert(tree, pool, [1, 1, 3])
    tree.evict(1)
    assert (cached(tree, [1, 1, 2]), cached(tree, [1, 1, 3])) == (2, 3)


def test_evict_takes_what_there_is_when_asked_for_more(tree: RadixTree, pool: SlotPool) -> None:
    node = insert(tree, pool, [1, 2, 3])
    insert(tree, pool, [4, 5])
    tree.lock(node)
    assert tree.evict(0) == 0
    assert tree.evict(10) == 2
    assert tree.evict(10) == 0
    assert (tree.evictable_tokens, tree.cached_tokens) == (0, 3)


def test_the_order_stays_as_small_as_the_tree(tree: RadixTree, pool: SlotPool) -> None:
    """Using and locking the same paths for ever, without an eviction, must not pile up entries."""
    paths = [[i, 7] for i in range(10)]
    for path in paths:
        insert(tree, pool, path)
    for i in range(5000):
        node = tree.match("", pack(paths[i % 10]), 2).node
        tree.lock(node)
        tree.unlock(node)
    tree.check()  # at most one entry a node
    for i in range(1000):
        insert(tree, pool, [100 + i, 1], "salt")
        tree.flush("salt")
    tree.check()
    assert tree.evict(64) == 20


def test_flush_frees_everything_that_is_not_locked(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3])
    insert(tree, pool, [1, 2, 4], "salt")
    assert tree.flush() == 6
    assert (tree.namespaces, tree.num_nodes, tree.cached_tokens, pool.num_free) == ([], 0, 0, 64)
    assert tree.flush() == 0
    tree.check()


def test_flush_of_one_namespace_leaves_the_others(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3])
    insert(tree, pool, [1, 2, 3], "salt")
    assert tree.flush("salt") == 3
    assert tree.flush("never seen") == 0
    assert tree.namespaces == [""]
    assert cached(tree, [1, 2, 3]) == 3


def test_flush_leaves_running_rows_their_paths(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    insert(tree, pool, [1, 2, 5])
    row = tree.match("", pack([1, 2, 3]), 3)
    tree.lock(row.node)
    assert tree.flush() == 2
    assert row.node.path_slots().tolist() == row.slots.tolist()
    assert (cached(tree, [1, 2, 3, 4]), cached(tree, [1, 2, 5])) == (3, 2)
    tree.check()
    check_pool(pool, tree, [])
    tree.unlock(row.node)
    assert tree.flush() == 3
    assert pool.num_free == 64


def test_a_row_can_go_on_inserting_after_a_flush(tree: RadixTree, pool: SlotPool) -> None:
    node = insert(tree, pool, [1, 2])
    tree.lock(node)
    tree.flush()
    slots = np.concatenate((node.path_slots(), pool.allocate(2)))
    existing, after = tree.insert("", pack([1, 2, 3, 4]), slots)
    assert existing == 2
    tree.lock(after)
    tree.unlock(node)
    assert tree.evict(64) == 0
    tree.check()
    check_pool(pool, tree, [])
