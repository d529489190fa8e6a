"""RadixTree: match, split, insert, lock and namespaces."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree, common_prefix
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.messages import pack


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(64)


@pytest.fixture
def tree(pool: SlotPool) -> RadixTree:
    return RadixTree(pool)


def insert(tree: RadixTree, pool: SlotPool, ids: list[int], namespace: str = "") -> tuple[Node, SlotArray]:
    """Cache ids that have nothing in common with what is there, or what comes after a cached prefix."""
    match = tree.match(namespace, pack(ids), len(ids))
    slots = np.concatenate((match.slots, pool.allocate(len(ids) - match.length)))
    return tree.insert(namespace, pack(ids), slots).node, slots


def test_an_empty_tree_matches_nothing_and_stays_empty(tree: RadixTree) -> None:
    match = tree.match("", pack([1, 2, 3]), 2)
    assert match.length == 0
    assert match.slots.tolist() == []
    assert tree.namespaces == []


def test_what_was_inserted_is_matched_with_its_slots(tree: RadixTree, pool: SlotPool) -> None:
    pool.allocate(5)
    node, slots = insert(tree, pool, [1, 2, 3, 4])
    match = tree.match("", pack([1, 2, 3, 4, 5]), 4)
    assert (match.length, match.node) == (4, node)
    assert match.slots.tolist() == slots.tolist() == [5, 6, 7, 8]
    assert match.slots.dtype == np.int32


def test_match_stops_inside_an_edge_and_splits_it_there(tree: RadixTree, pool: SlotPool) -> None:
    whole, slots = insert(tree, pool, [1, 2, 3, 4])
    match = tree.match("", pack([1, 2, 9]), 2)
    assert (match.length, match.node.depth) == (2, 2)
    assert match.slots.tolist() == slots[:2].tolist()
    assert whole.parent is match.node
    assert whole.depth == 4
    assert whole.path_slots().tolist() == slots.tolist()
    assert (tree.num_nodes, tree.cached_tokens) == (2, 4)
    tree.check()


def test_the_limit_is_never_exceeded(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    assert [tree.match("", pack([1, 2, 3, 4]), limit).length for limit in range(5)] == [0, 1, 2, 3, 4]


def test_peek_finds_the_same_and_changes_nothing(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    insert(tree, pool, [7, 8])
    before = tree.snapshot()
    assert tree.peek("", pack([1, 2, 9, 9]), 3) == (2, "diverged")
    assert tree.peek("other", pack([1, 2]), 1, "") == (0, "namespace")
    assert tree.peek("other", pack([1, 2]), 1) == (0, "cold")
    assert tree.snapshot() == before
    assert tree.namespaces == [""]


def test_only_whole_tokens_are_compared(tree: RadixTree, pool: SlotPool) -> None:
    """256 is the bytes of 1, one further on."""
    insert(tree, pool, [1, 1, 1])
    assert tree.peek("", pack([256, 256, 256]), 3)[0] == 0
    assert tree.peek("", pack([1, 257, 1]), 3)[0] == 1


def test_the_greatest_token_id_and_a_negative_one_are_ordinary(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [2**31 - 1, -1])
    assert tree.peek("", pack([2**31 - 1, -1, 0]), 3)[0] == 2


def test_siblings_share_their_prefix(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    insert(tree, pool, [1, 2, 5])
    assert tree.cached_tokens == 5
    assert tree.num_nodes == 3
    assert pool.num_free == 64 - 5
    tree.check()


def test_insert_tells_what_was_there_and_takes_only_the_rest(tree: RadixTree, pool: SlotPool) -> None:
    _, first = insert(tree, pool, [1, 2, 3])
    own = pool.allocate(5)
    existing, node = tree.insert("", pack([1, 2, 3, 4, 5]), own)
    assert existing == 3
    assert node.path_slots().tolist() == [*first.tolist(), *own[3:].tolist()]
    duplicates = own[own != node.path_slots()]
    assert duplicates.tolist() == own[:3].tolist()
    check_pool(pool, tree, [duplicates])
    pool.free(duplicates)
    check_pool(pool, tree, [])


def test_insert_ends_a_node_where_the_ids_end(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    own = pool.allocate(2)
    existing, node = tree.insert("", pack([1, 2]), own)
    assert (existing, node.depth) == (2, 2)
    pool.free(own)
    tree.check()


def test_the_tree_keeps_no_view_of_the_callers_slots(tree: RadixTree, pool: SlotPool) -> None:
    own = pool.allocate(3)
    node = tree.insert("", pack([1, 2, 3]), own).node
    kept = own.tolist()
    own[:] = 60
    assert node.path_slots().tolist() == kept
    tree.match("", pack([1, 2, 3]), 3).slots[:] = 60
    assert node.path_slots().tolist() == kept


def test_inserting_nothing_makes_nothing(tree: RadixTree) -> None:
    existing, node = tree.insert("salt", b"", np.empty(0, np.int32))
    assert (existing, node.depth) == (0, 0)
    assert tree.namespaces == []


def test_ids_and_slots_must_be_of_one_length(tree: RadixTree, pool: SlotPool) -> None:
    with pytest.raises(AssertionError, match="8 bytes of ids for 3 slots"):
        tree.insert("", pack([1, 2]), pool.allocate(3))


def test_namespaces_share_nothing(tree: RadixTree, pool: SlotPool) -> None:
    _, plain = insert(tree, pool, [1, 2, 3])
    _, salted = insert(tree, pool, [1, 2, 3], "salt")
    assert not set(plain.tolist()) & set(salted.tolist())
    assert tree.match("", pack([1, 2, 3]), 3).slots.tolist() == plain.tolist()
    assert tree.match("salt", pack([1, 2, 3]), 3).slots.tolist() == salted.tolist()
    assert tree.match("pepper", pack([1, 2, 3]), 3).length == 0
    assert sorted(tree.namespaces) == ["", "salt"]


def test_a_lock_protects_the_path_but_not_what_is_below(tree: RadixTree, pool: SlotPool) -> None:
    insert(tree, pool, [1, 2, 3, 4])
    node = tree.match("", pack([1, 2]), 2).node
    tree.lock(node)
    assert tree.evictable_tokens == 2
    assert tree.evict(64) == 2
    assert tree.peek("", pack([1, 2, 3, 4]), 4)[0] == 2
    tree.unlock(node)
    assert tree.evictable_tokens == 2
    assert tree.evict(64) == 2
    assert pool.num_free == 64


def test_locks_count(tree: RadixTree, pool: SlotPool) -> None:
    node, _ = insert(tree, pool, [1, 2, 3])
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(3) == 0
    tree.unlock(node)
    assert tree.evict(3) == 3


def test_a_split_above_a_lock_holder_keeps_its_whole_path(tree: RadixTree, pool: SlotPool) -> None:
    node, slots = insert(tree, pool, [1, 2, 3, 4])
    tree.lock(node)
    upper = tree.match("", pack([1, 2, 9]), 2).node
    assert upper.lock_count == node.lock_count == 1
    assert tree.evict(64) == 0
    assert node.path_slots().tolist() == slots.tolist()
    tree.unlock(node)
    assert tree.evictable_tokens == 4
    tree.check()


def test_more_unlocks_than_locks_are_noticed(tree: RadixTree, pool: SlotPool) -> None:
    node, _ = insert(tree, pool, [1])
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        tree.unlock(node)


def test_locking_what_was_evicted_is_noticed(tree: RadixTree, pool: SlotPool) -> None:
    node, _ = insert(tree, pool, [1, 2])
    tree.evict(2)
    with pytest.raises(AssertionError, match="no longer in the tree"):
        tree.lock(node)


def test_locking_a_match_of_nothing_is_harmless(tree: RadixTree, pool: SlotPool) -> None:
    node = tree.match("salt", pack([1, 2]), 1).node
    tree.lock(node)
    insert(tree, pool, [1, 2], "salt")
    assert tree.evict(2) == 2
    tree.unlock(node)
    assert tree.namespaces == []
    tree.check()


def test_snapshot_shows_the_most_recently_used_first_and_no_more_than_asked(
    tree: RadixTree, pool: SlotPool
) -> None:
    for last in (5, 6, 7):
        insert(tree, pool, [1, 2, last, 9])
    tree.lock(tree.match("", pack([1, 2, 6]), 3).node)
    (root,) = tree.snapshot(depth=2, limit=2)["namespaces"]
    (shared,) = root["children"]
    assert (shared["ids"], shared["tokens"], shared["depth"], shared["locks"]) == ([1, 2], 2, 2, 1)
    assert shared["num_children"] == 3
    assert [child["ids"][0] for child in shared["children"]] == [6, 7]
    assert all(child["children"] == [] for child in shared["children"])


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([2], [1], 0)]
)
def test_common_prefix_counts_equal_tokens(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(pack(a), pack(b)) == common_prefix(pack(b), pack(a)) == n
