"""The self-check finds what it is there for: each case damages one thing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import Node, Root
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import pack


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(16)


@pytest.fixture
def tree(pool: SlotPool) -> RadixTree:
    """[1 2] with the children [3 4] and [5]."""
    tree = RadixTree(pool)
    slots = pool.allocate(5)
    tree.insert("", pack([1, 2, 3, 4]), slots[:4])
    tree.insert("", pack([1, 2, 5]), slots[[0, 1, 4]])
    tree.check()
    check_pool(pool, tree, [])
    return tree


def node_at(tree: RadixTree, *ids: int) -> Node:
    return tree.match("", pack(ids), len(ids)).node


def shorten(node: Node) -> None:
    node.slots = node.slots[:-1]


def put_slot(node: Node, slot: int) -> None:
    node.slots[0] = slot


DAMAGES: list[tuple[str, Callable[[RadixTree, Node], None]]] = [
    ("depth", lambda tree, leaf: shorten(leaf)),
    ("share a slot", lambda tree, leaf: put_slot(leaf, 0)),
    ("another parent", lambda tree, leaf: setattr(leaf, "parent", Root(""))),
    ("begins with", lambda tree, leaf: setattr(leaf, "key", pack([9, 4]))),
    ("locks below", lambda tree, leaf: setattr(leaf, "lock_count", 1)),
    ("0 locks below -1", lambda tree, leaf: setattr(leaf, "lock_count", -1)),
    ("CRC", lambda tree, leaf: setattr(leaf, "crc", leaf.path_crc() ^ 1)),
    ("used after its parent", lambda tree, leaf: setattr(leaf, "last_use", 10**6)),
    ("hit more often than its parent", lambda tree, leaf: setattr(leaf, "hits", 1)),
    ("higher priority than its parent", lambda tree, leaf: setattr(leaf, "priority", 1)),
    ("0 pins at depth 4, counted as 1", lambda tree, leaf: setattr(leaf, "pins", 1)),
    ("listed ends in the tree", lambda tree, leaf: setattr(leaf, "listed", True)),
    ("whether it is in the eviction order", lambda tree, leaf: setattr(leaf, "queued", False)),
    ("tokens, counted as", lambda tree, leaf: setattr(tree, "cached_tokens", 4)),
    ("evictable tokens, counted as", lambda tree, leaf: setattr(tree, "evictable_tokens", 4)),
    ("nodes, counted as", lambda tree, leaf: setattr(tree, "num_nodes", 4)),
    ("is under", lambda tree, leaf: setattr(leaf, "namespace", "salt")),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES, ids=[message for message, _ in DAMAGES])
def test_damage_to_the_tree_is_found(
    tree: RadixTree, message: str, damage: Callable[[RadixTree, Node], None]
) -> None:
    damage(tree, node_at(tree, 1, 2, 3, 4))
    with pytest.raises(AssertionError, match=message):
        tree.check()


def test_a_leaf_that_nobody_would_evict_is_found(tree: RadixTree) -> None:
    tree.lock(node := node_at(tree, 1, 2, 3, 4))
    tree.evict(16)  # takes the locked leaf's entry out of the order, too
    node.lock_count = 0
    tree.evictable_tokens = 2
    with pytest.raises(AssertionError, match="evictable and not in the eviction order"):
        tree.check()


@pytest.mark.parametrize(
    ("private", "message"),
    [([], "2 slots are nowhere"), ([5, 6, 7], "1 slots are in two places"), ([5, 16], "not in 0..15")],
)
def test_a_slot_in_no_place_or_in_two_is_found(
    tree: RadixTree, pool: SlotPool, private: list[int], message: str
) -> None:
    own = pool.allocate(2)
    assert own.tolist() == [5, 6]
    check_pool(pool, tree, [own[:1], own[1:]])
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, tree, [np.array(private, np.int32)])


def test_the_pool_is_checked_without_a_tree() -> None:
    pool = SlotPool(4)
    own = pool.allocate(3)
    check_pool(pool, None, [own])
    with pytest.raises(AssertionError, match="nowhere"):
        check_pool(pool, None, [own[:2]])
