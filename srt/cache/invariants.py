"""What must hold of the tree and the pool at any moment; for tests and for the idle server's self-check."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sapwood.srt.cache.eviction import Order
from sapwood.srt.cache.node import Node, Root, token_at
from sapwood.srt.cache.pins import Pins
from sapwood.srt.cache.roots import Roots
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.namespaces import LISTED, label

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


def check_tree(tree: RadixTree, roots: Roots, order: Order, pins: Pins) -> None:
    """Every link, count and order of the tree. AssertionError says what is wrong."""
    queued = list(order)
    waiting = set(map(id, queued))
    assert len(waiting) == len(queued), "a node is in the eviction order twice"
    edges: list[Node] = []
    crcs: dict[Node, int] = {}
    for namespace, own in sorted(roots.by_name.items(), key=lambda item: item[0] != LISTED):
        before = len(edges)
        for root in own.starts():
            _check_root(root, own, roots)
            crcs[root] = crcs[root.parent] if root.parent is not None else 0
            for node in root.subtree():
                assert node.namespace == namespace, f"a node of another one is under {label(namespace)}"
                _check_children(node)
                if node is root:
                    continue
                assert node.parent is not None
                _check_edge(node, waiting, pins)
                edges.append(node)
                crcs[node] = zlib.crc32(node.key, crcs[node.parent])
                assert node.crc in (None, crcs[node]), f"the CRC at depth {node.depth} is wrong"
        below = edges[before:]
        totals = (len(below), sum(len(node.slots) for node in below))
        counted = (own.total_nodes, own.total_tokens)
        assert totals == counted, f"{totals} nodes and tokens in {label(namespace)}, counted as {counted}"
    held = [node.slots for node in edges]
    slots = np.concatenate(held) if held else np.empty(0, np.int32)
    assert len(np.unique(slots)) == len(slots), "two tokens share a slot"
    assert len(edges) == tree.num_nodes, f"{len(edges)} nodes, counted as {tree.num_nodes}"
    assert len(slots) == tree.cached_tokens, f"{len(slots)} tokens, counted as {tree.cached_tokens}"
    free = sum(len(node.slots) for node in edges if node.lock_count == 0)
    assert free == tree.evictable_tokens, f"{free} evictable tokens, counted as {tree.evictable_tokens}"
    assert len(queued) <= len(edges), f"{len(queued)} entries in the eviction order for {len(edges)} nodes"
    _check_pins(pins, edges)
    _check_listed(roots, edges)


def _check_root(root: Root, own: Root, roots: Roots) -> None:
    where = label(root.namespace)
    depth = 0
    if root is not own:
        end = root.parent
        assert end is not None, f"a door of {where} hangs on nothing"
        assert own.doors.get(end) is root, f"a door of {where} is not known by its end"
        assert end in roots.ends, f"a door of {where} is at no listed end"
        assert root.namespace != LISTED, "what is listed begins at its root alone"
        depth = end.depth
    else:
        assert root.parent is None, f"the root of {where} has a parent"
    assert (root.depth, len(root.key), len(root.slots)) == (depth, 0, 0), f"the root of {where} has a key"
    assert root.children or root.spots or root.doors, f"the empty namespace {where} was kept"


def _check_children(node: Node) -> None:
    for token, child in node.children.items():
        assert child.parent is node, f"a child of the node at depth {node.depth} has another parent"
        assert token == token_at(child.key, 0), f"a child at depth {node.depth} begins with another token"
        assert child.depth == node.depth + len(child.slots), f"depth {child.depth} below {node.depth}"
        if node.parent is not None:
            assert child.last_use <= node.last_use, "a child was used after its parent"
            assert child.hits <= node.hits, "a child was hit more often than its parent"
            assert child.priority <= node.priority, "a child has a higher priority than its parent"
    below = sum(child.lock_count for child in node.children.values())
    assert node.parent is None or below <= node.lock_count, f"{below} locks below {node.lock_count}"


def _check_edge(node: Node, waiting: set[int], pins: Pins) -> None:
    where = f"the node at depth {node.depth}"
    assert len(node.slots) > 0, f"{where} is empty"
    assert len(node.key) == 4 * len(node.slots), f"{where}: {len(node.key)} bytes, {len(node.slots)} slots"
    assert node.lock_count >= 0, f"{where} has {node.lock_count} locks"
    assert node.queued == (id(node) in waiting), f"{where} does not know whether it is in the eviction order"
    goes = node.queued or pins.holds(node)
    assert goes or not node.evictable, f"{where} is evictable and not in the eviction order"


def _check_pins(pins: Pins, edges: list[Node]) -> None:
    """A node counts the pins on it and below; what is set aside is pinned."""
    counts: dict[Node, int] = {}
    for pinned in pins:
        node: Node | None = pinned
        while node is not None and node.key:
            counts[node] = counts.get(node, 0) + 1
            node = node.parent
    for node in edges:
        here = counts.pop(node, 0)
        assert node.pins == here, f"{here} pins at depth {node.depth}, counted as {node.pins}"
        assert not pins.holds(node) or node.pins, (
            f"the node at depth {node.depth} has no pin, but is set aside"
        )
    assert not counts, "a pin is on a node that is not in the tree"
    tokens = sum(len(node.slots) for node in edges if node.pins)
    assert tokens == pins.tokens <= pins.limit, f"{tokens} pinned tokens of {pins.limit}, not {pins.tokens}"


def _check_listed(roots: Roots, edges: list[Node]) -> None:
    marked = {node for node in edges if node.listed}
    assert marked == set(roots.ends), f"{len(marked)} listed ends in the tree, {len(roots.ends)} known"
    path: set[Node] = set()
    for end in marked:
        assert end.namespace == LISTED, f"a listed end in {label(end.namespace)}"
        node: Node | None = end
        while node is not None and node.key:
            assert node.lock_count > 0, f"a listed path is not locked at depth {node.depth}"
            path.add(node)
            node = node.parent
    tokens = sum(len(node.slots) for node in path)
    assert tokens == roots.listed_tokens, f"{tokens} listed tokens, counted as {roots.listed_tokens}"
