"""What must hold of the tree and the pool at any moment; for tests and for the idle server's self-check."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from sapwood.srt.cache.eviction import Lru
from sapwood.srt.cache.node import Node, Root, token_at
from sapwood.srt.cache.slots import SlotArray, SlotPool

if TYPE_CHECKING:
    from sapwood.srt.cache.radix import RadixTree


def check_pool(pool: SlotPool, tree: RadixTree | None, private: Iterable[SlotArray]) -> None:
    """`free + cached + private to rows = pool`, and each slot is in exactly one place. O(total).

    `private` holds, for each row, the slots that are its own. AssertionError names the slots at fault.
    """
    cached = [node.slots for node in tree.nodes()] if tree is not None else []
    parts = {"free": [pool.free_slots()], "cached": cached, "private": list(private)}
    sizes = {name: sum(map(len, arrays)) for name, arrays in parts.items()}
    assert sizes["free"] == pool.num_free, f"{sizes['free']} free slots, counted as {pool.num_free}"
    every = np.concatenate([array for arrays in parts.values() for array in arrays])
    outside = every[(every < 0) | (every >= pool.total)]
    assert len(outside) == 0, f"slots {outside[:8].tolist()} are not in 0..{pool.total - 1}"
    uses = np.bincount(every, minlength=pool.total)
    lost, shared = np.flatnonzero(uses == 0), np.flatnonzero(uses > 1)
    assert len(lost) == 0, f"{len(lost)} slots are nowhere ({lost[:8].tolist()}): {sizes} of {pool.total}"
    assert len(shared) == 0, f"{len(shared)} slots are in two places ({shared[:8].tolist()}): {sizes}"


def check_tree(tree: RadixTree, roots: Mapping[str, Root], order: Lru) -> None:
    """Every link, count and order of the tree. AssertionError says what is wrong."""
    queued = list(order)
    waiting = set(map(id, queued))
    assert len(waiting) == len(queued), "a node is in the eviction order twice"
    edges: list[Node] = []
    crcs: dict[Node, int] = {}
    for namespace, root in roots.items():
        before = len(edges)
        assert root.parent is None, f"the root of {namespace!r} has a parent"
        assert root.depth == len(root.key) == len(root.slots) == 0, f"the root of {namespace!r} has a key"
        assert root.children or root.spots, f"the empty namespace {namespace!r} was kept"
        for node in root.subtree():
            assert node.namespace == namespace, f"a node of {node.namespace!r} is under {namespace!r}"
            _check_children(node)
            if node.parent is None:
                crcs[node] = 0
                continue
            _check_edge(node, waiting)
            edges.append(node)
            crcs[node] = zlib.crc32(node.key, crcs[node.parent])
            assert node.crc in (None, crcs[node]), f"the CRC at depth {node.depth} is wrong"
        below = edges[before:]
        totals = (len(below), sum(len(node.slots) for node in below))
        counted = (root.total_nodes, root.total_tokens)
        assert totals == counted, f"{totals} nodes and tokens in {namespace!r}, counted as {counted}"
    held = [node.slots for node in edges]
    slots = np.concatenate(held) if held else np.empty(0, np.int32)
    assert len(np.unique(slots)) == len(slots), "two tokens share a slot"
    assert len(edges) == tree.num_nodes, f"{len(edges)} nodes, counted as {tree.num_nodes}"
    assert len(slots) == tree.cached_tokens, f"{len(slots)} tokens, counted as {tree.cached_tokens}"
    free = sum(len(node.slots) for node in edges if node.lock_count == 0)
    assert free == tree.evictable_tokens, f"{free} evictable tokens, counted as {tree.evictable_tokens}"
    assert len(queued) <= len(edges), f"{len(queued)} entries in the eviction order for {len(edges)} nodes"


def _check_children(node: Node) -> None:
    for token, child in node.children.items():
        assert child.parent is node, f"a child of the node at depth {node.depth} has another parent"
        assert token == token_at(child.key, 0), f"child {token} begins with {token_at(child.key, 0)}"
        assert child.depth == node.depth + len(child.slots), f"depth {child.depth} below {node.depth}"
        assert node.parent is None or child.last_use <= node.last_use, "a child was used after its parent"
    below = sum(child.lock_count for child in node.children.values())
    assert node.parent is None or below <= node.lock_count, f"{below} locks below {node.lock_count}"


def _check_edge(node: Node, waiting: set[int]) -> None:
    where = f"the node at depth {node.depth}"
    assert len(node.slots) > 0, f"{where} is empty"
    assert len(node.key) == 4 * len(node.slots), f"{where}: {len(node.key)} bytes, {len(node.slots)} slots"
    assert node.lock_count >= 0, f"{where} has {node.lock_count} locks"
    assert node.queued == (id(node) in waiting), f"{where} does not know whether it is in the eviction order"
    assert node.queued or not node.evictable, f"{where} is evictable and not in the eviction order"
