"""The radix tree over token ids: which prefixes have their K and V in which slots.

    root of namespace ""            a node owns one slot for each token of its key
      ├─[5 9 2 7]──┬─[1 1]          lock_count: rows that use it; locked below implies locked above
      │            └─[3 8 8 4]      unlocked leaves wait in the eviction order
      └─[6 0 6]

A slot is in one place: free (in the pool), cached (in a node here), or private to a row. `insert` makes
private slots cached, `evict` and `flush` make cached slots free; rows free the private slots they keep.
Token ids are little-endian int32 bytes throughout, lengths are in tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sapwood.srt.cache import invariants
from sapwood.srt.cache.eviction import Lru
from sapwood.srt.cache.explain import Ghosts
from sapwood.srt.cache.node import Node, token_at, unpack_token
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.messages import Stopped, Verdict

_ID = np.dtype("<i4")


class Match(NamedTuple):
    """The longest cached prefix: `length` tokens in `slots` `[length]`, which end where `node` ends."""

    length: int
    node: Node
    slots: SlotArray
    verdict: Verdict


class Inserted(NamedTuple):
    """`node` ends exactly at the end of what was inserted, of which `existing` tokens were there before."""

    existing: int
    node: Node


class _Walk(NamedTuple):
    """`node` is the last one on the path that is matched to its end, `child` the edge below it in which the
    walk ended (None: between edges), `at` the number of bytes matched."""

    node: Node
    child: Node | None
    at: int


class RadixTree:
    """Prefixes of any length, shared to the token; one root a namespace, and nothing shared between them."""

    def __init__(self, pool: SlotPool, ghost_size: int = 4096) -> None:
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self.num_nodes = 0
        self.version = 0
        """Changes whenever `peek` might answer otherwise than before."""
        self._pool = pool
        self._roots: dict[str, Node] = {}
        self._order = Lru()
        self._ghosts = Ghosts(ghost_size)
        self._clock = 0

    @property
    def namespaces(self) -> list[str]:
        """Those that hold something."""
        return list(self._roots)

    def peek(self, namespace: str, ids: bytes, limit: int) -> tuple[int, Stopped]:
        """What `match` would find, changing nothing: the number of tokens, and why no more."""
        end = min(4 * limit, len(ids))
        walk = self._walk(namespace, ids, end)
        return walk.at // 4, self._stopped(namespace, ids, end, walk)

    def match(self, namespace: str, ids: bytes, limit: int) -> Match:
        """The longest cached prefix of `ids`, at most `limit` tokens, marked as used now.

        Nothing is locked yet: lock the node before the next `evict` or `flush`.
        """
        end = min(4 * limit, len(ids))
        walk = self._walk(namespace, ids, end)
        stopped = self._stopped(namespace, ids, end, walk)
        node = self._end_of(walk)
        self._touch(node)
        length = walk.at // 4
        return Match(length, node, node.path_slots(), Verdict(length, stopped))

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction, until one `unlock` for each `lock`."""
        while node.parent is not None:
            if node.lock_count == 0:
                self.evictable_tokens -= len(node.slots)
            node.lock_count += 1
            node = node.parent
        assert node.depth == 0, "the locked node is no longer in the tree"

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. The path counts as used until now."""
        self._touch(node)
        while node.parent is not None:
            assert node.lock_count > 0, "unlocked more often than locked"
            node.lock_count -= 1
            if node.lock_count == 0:
                self.evictable_tokens += len(node.slots)
                if not node.children:
                    self._order.push(node)
            node = node.parent

    def insert(self, namespace: str, ids: bytes, slots: SlotArray) -> Inserted:
        """Cache `ids` `[n]`, computed into `slots` `[n]`: afterwards `match` finds all of it.

        Tokens that are cached already keep the tree's slots. The others' slots, `slots[existing:]`, now
        belong to the tree; those of `slots[:existing]` that differ from the tree's stay the caller's own.
        """
        assert len(ids) == 4 * len(slots), f"{len(ids)} bytes of ids for {len(slots)} slots"
        if ids and namespace not in self._roots:
            self._roots[namespace] = Node.root(namespace)
        walk = self._walk(namespace, ids, len(ids))
        node = self._end_of(walk)
        existing = walk.at // 4
        if walk.at < len(ids):
            node = self._add(node, ids[walk.at :], slots[existing:])
        self._touch(node)
        return Inserted(existing, node)

    def path_slots(self, node: Node) -> SlotArray:
        """The tree's slots for the tokens from the root to the end of `node`, `[node.depth]`."""
        return node.path_slots()

    def evict(self, tokens: int) -> int:
        """Free the least recently used `tokens` tokens that no row uses, or all there are; returns how many.

        Only the ends of unlocked paths go, token by token: the last leaf is trimmed to what is needed.
        """
        freed: list[SlotArray] = []
        left = tokens
        while left > 0 and (leaf := self._order.pop()) is not None:
            if len(leaf.slots) > left:
                freed.append(self._trim(leaf, left))
                left = 0
            else:
                freed.append(leaf.slots)
                left -= len(leaf.slots)
                self._remove(leaf)
        return self._give_back(freed)

    def flush(self, namespace: str | None = None) -> int:
        """Drop all that no row uses, in one namespace or all (None), and what was known of evicted edges;
        returns how many tokens were freed. Paths that rows have locked stay, and stay shared.
        """
        freed: list[SlotArray] = []
        for name in [namespace] if namespace is not None else self.namespaces:
            root = self._roots.get(name)
            if root is not None:
                self._drop_unlocked(root, freed)
                if not root.children:
                    del self._roots[name]
        self.version += 1
        self._order.prune()
        self._ghosts.clear(namespace)
        return self._give_back(freed)

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents first."""
        for root in self._roots.values():
            yield from root.subtree()

    def check(self) -> None:
        """Walk over everything; AssertionError that says what is wrong."""
        invariants.check_tree(self, self._roots, self._order)

    def snapshot(self, depth: int = 3, limit: int = 16) -> dict[str, Any]:
        """The tree as nested dicts of plain values, for a person: `depth` levels of nodes, of each node the
        first `limit` ids and the `limit` most recently used children.
        """
        return {name: _picture(root, depth, limit) for name, root in self._roots.items()}

    def _walk(self, namespace: str, ids: bytes, end: int) -> _Walk:
        node = self._roots.get(namespace)
        if node is None:
            return _Walk(Node.root(namespace), None, 0)
        at = 0
        while at < end:
            child = node.children.get(unpack_token(ids, at)[0])
            if child is None:
                break
            if not ids.startswith(child.key, at, end):
                return _Walk(node, child, at + 4 * common_prefix(child.key, ids, at, end))
            at += len(child.key)
            node = child
        return _Walk(node, None, at)

    def _stopped(self, namespace: str, ids: bytes, end: int, walk: _Walk) -> Stopped:
        at = walk.at
        if at == end:
            return "last_token"
        if namespace and self._walk("", ids, end).at > at:
            return "namespace"
        if len(self._ghosts):
            crc = zlib.crc32(ids[4 * walk.node.depth : at], walk.node.path_crc())
            if self._ghosts.has(namespace, crc, token_at(ids, at)):
                return "evicted"
        return "diverged" if at else "cold"

    def _end_of(self, walk: _Walk) -> Node:
        """The node that ends where the walk did; splits the edge in which it ended."""
        if walk.child is None:
            return walk.node
        return self._split(walk.child, walk.at // 4 - walk.node.depth)

    def _split(self, lower: Node, n: int) -> Node:
        """Put a node after the first `n` tokens of an edge. `lower` stays the node of its old end, so that
        whoever holds it still holds the same path."""
        assert lower.parent is not None
        upper = Node(lower.namespace, lower.parent, lower.key[: 4 * n], lower.slots[:n])
        upper.lock_count = lower.lock_count
        upper.last_use = lower.last_use
        lower.parent.children[token_at(upper.key, 0)] = upper
        lower.key = lower.key[4 * n :]
        lower.slots = lower.slots[n:]
        lower.parent = upper
        upper.children[token_at(lower.key, 0)] = lower
        self.num_nodes += 1
        return upper

    def _add(self, parent: Node, key: bytes, slots: SlotArray) -> Node:
        node = Node(parent.namespace, parent, key, slots.astype(np.int32))  # a copy: the row's array lives on
        parent.children[token_at(key, 0)] = node
        self.num_nodes += 1
        self.cached_tokens += len(slots)
        self.evictable_tokens += len(slots)
        self.version += 1
        self._order.push(node)
        return node

    def _touch(self, node: Node) -> None:
        self._clock = now = self._clock + 1
        while node.parent is not None:
            node.last_use = now
            node = node.parent

    def _trim(self, leaf: Node, n: int) -> SlotArray:
        """Cut the last `n` tokens off a leaf; it goes back in the order."""
        keep = len(leaf.slots) - n
        dropped = leaf.slots[keep:]
        token = token_at(leaf.key, 4 * keep)
        leaf.key = leaf.key[: 4 * keep]
        leaf.slots = leaf.slots[:keep].copy()
        leaf.depth -= n
        leaf.crc = None
        self._ghosts.add(leaf.namespace, leaf.path_crc(), token)
        self._order.push(leaf)
        return dropped

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        token = token_at(leaf.key, 0)
        self._ghosts.add(leaf.namespace, parent.path_crc(), token)
        del parent.children[token]
        leaf.parent = None
        self.num_nodes -= 1
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[leaf.namespace]
        elif parent.lock_count == 0:
            self._order.push(parent)

    def _drop_unlocked(self, root: Node, freed: list[SlotArray]) -> None:
        """Cut every unlocked subtree off, and add its slots to `freed`."""
        kept = [root]
        while kept:
            node = kept.pop()
            for token, child in list(node.children.items()):
                if child.lock_count:
                    kept.append(child)
                    continue
                del node.children[token]
                for gone in child.subtree():
                    gone.parent = None
                    freed.append(gone.slots)
                    self.num_nodes -= 1

    def _give_back(self, freed: list[SlotArray]) -> int:
        """Free the slots of evictable tokens that have left the tree."""
        if not freed:
            return 0
        slots = np.concatenate(freed)
        self._pool.free(slots)
        self.cached_tokens -= len(slots)
        self.evictable_tokens -= len(slots)
        self.version += 1
        return len(slots)


def common_prefix(key: bytes, ids: bytes, at: int = 0, end: int | None = None) -> int:
    """How many tokens at the start of `key` equal those of `ids` from byte `at` to `end` (None: all)."""
    n = min(len(key), (len(ids) if end is None else end) - at) // 4
    if n == 0:
        return 0
    differ = np.frombuffer(key, _ID, n) != np.frombuffer(ids, _ID, n, at)
    first = int(differ.argmax())
    return first if differ[first] else n


def _picture(node: Node, depth: int, limit: int) -> dict[str, Any]:
    children = sorted(node.children.values(), key=lambda child: -child.last_use)
    return {
        "tokens": len(node.slots),
        "ids": np.frombuffer(node.key, _ID)[:limit].tolist(),
        "depth": node.depth,
        "locks": node.lock_count,
        "last_use": node.last_use,
        "num_children": len(children),
        "children": [_picture(c, depth - 1, limit) for c in children[:limit]] if depth > 0 else [],
    }
