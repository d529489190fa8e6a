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
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from sapwood.srt.cache import invariants
from sapwood.srt.cache.eviction import Lru
from sapwood.srt.cache.explain import Ghosts, Trace
from sapwood.srt.cache.node import Node, Root, token_at, unpack_token
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.cache.snapshot import snapshot
from sapwood.srt.messages import Stopped

_ID = np.dtype("<i4")


class Match(NamedTuple):
    """The longest cached prefix: `length` tokens in `slots` `[length]`, which end where `node` ends."""

    length: int
    node: Node
    slots: SlotArray


class Inserted(NamedTuple):
    """`node` ends exactly at the end of what was inserted, of which `existing` tokens were there before."""

    existing: int
    node: Node


class Follower(Protocol):
    """Is told how the tree changes at nodes with `spots`, when the change is done."""

    def grew(self, parent: Node, child: Node) -> None:
        """`child` was added below `parent`, which has spots."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was put in the midst of the edge to `lower`, which has spots."""

    def shrank(self, node: Node, token: int, into: Node) -> None:
        """What `node`, which has spots, had from the end of `into` on, and which began with `token`, is no
        longer cached: `into` is `node` itself if its end was cut off, else what was above it."""


class RadixTree:
    """Prefixes of any length, shared to the token; one root a namespace, and nothing shared between them."""

    def __init__(self, pool: SlotPool, ghost_size: int = 4096) -> None:
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self.num_nodes = 0
        self.follower: Follower | None = None
        self._pool = pool
        self._roots: dict[str, Root] = {}
        self._order = Lru()
        self._ghosts = Ghosts(ghost_size)
        self._clock = 0

    @property
    def namespaces(self) -> list[str]:
        """Those that hold something."""
        return [name for name, root in self._roots.items() if root.children]

    def root(self, namespace: str) -> Root:
        """The root of a namespace, made if need be: it stays while something is cached or it has spots."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def prune_root(self, namespace: str) -> None:
        """Drop the root if nothing hangs on it."""
        root = self._roots.get(namespace)
        if root is not None and not root.children and not root.spots:
            del self._roots[namespace]

    def peek(self, namespace: str, ids: bytes, limit: int) -> tuple[int, Stopped]:
        """What `match` would find, changing nothing: the number of tokens, and why no more."""
        trace = self.trace(namespace, ids, limit)
        return trace.matched, self._stopped(namespace, ids, limit, trace)

    def trace(self, namespace: str, ids: bytes, limit: int, known: Node | None = None) -> Trace:
        """Where the longest cached prefix of `ids` ends, of at most `limit` tokens; to be read before the
        tree changes. `known` is the node of an earlier trace of ids that `ids` begins with: if it is still in
        the tree, the search goes on from there.
        """
        # A node that stays in the tree may lose its end, but the path to it never changes otherwise.
        known = known if known is not None and known.parent is not None and known.depth <= limit else None
        node = known or self._roots.get(namespace)
        if node is None:
            return Trace(Root(namespace), None, 0)
        at, end = 4 * node.depth, min(4 * limit, len(ids))
        while at < end:
            child = node.children.get(unpack_token(ids, at)[0])
            if child is None:
                break
            if not ids.startswith(child.key, at, end):
                return Trace(node, child, at // 4 + common_prefix(child.key, ids, at, end))
            at += len(child.key)
            node = child
        return Trace(node, None, at // 4)

    def match(self, namespace: str, ids: bytes, limit: int) -> Match:
        """The longest cached prefix of `ids`, at most `limit` tokens, marked as used now.

        Nothing is locked yet: lock the node before the next `evict` or `flush`.
        """
        trace = self.trace(namespace, ids, limit)
        node = self._end_of(trace)
        self._touch(node)
        return Match(trace.matched, node, node.path_slots())

    def note_hit(self, node: Node) -> None:
        """Count a request that begins with the path to `node`. A lookup may be repeated: this is not."""
        while node.parent is not None:
            node.hits += 1
            node = node.parent

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
        if ids:
            self.root(namespace)
        trace = self.trace(namespace, ids, len(slots))
        node, existing = self._end_of(trace), trace.matched
        if existing < len(slots):
            node = self._add(node, ids[4 * existing :], slots[existing:])
        self._touch(node)
        return Inserted(existing, node)

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
                self.prune_root(name)
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

    def snapshot(
        self,
        depth: int = 3,
        limit: int = 16,
        *,
        ids: int = 16,
        namespaces: Collection[str] | None = None,
        max_nodes: int = 1000,
    ) -> dict[str, Any]:
        """The tree as plain values, for a person (see snapshot.py); bounded in work and in size."""
        return {"clock": self._clock, **snapshot(self._roots, depth, limit, ids, namespaces, max_nodes)}

    def _stopped(self, namespace: str, ids: bytes, limit: int, trace: Trace) -> Stopped:
        at = 4 * trace.matched
        if at == min(4 * limit, len(ids)):
            return "last_token"
        if namespace and self.trace("", ids, limit).matched > trace.matched:
            return "namespace"
        if len(self._ghosts):
            crc = zlib.crc32(ids[4 * trace.node.depth : at], trace.node.path_crc())
            if self._ghosts.has(namespace, crc, token_at(ids, at)):
                return "evicted"
        return "diverged" if at else "cold"

    def _end_of(self, trace: Trace) -> Node:
        """The node that ends where the trace does; splits the edge in which it ends."""
        if trace.child is None:
            return trace.node
        return self._split(trace.child, trace.matched - trace.node.depth)

    def _split(self, lower: Node, n: int) -> Node:
        """Put a node after the first `n` tokens of an edge. `lower` stays the node of its old end, so that
        whoever holds it still holds the same path."""
        assert lower.parent is not None
        upper = Node(lower.namespace, lower.parent, lower.key[: 4 * n], lower.slots[:n])
        upper.lock_count = lower.lock_count
        upper.last_use = lower.last_use
        upper.hits = lower.hits
        lower.parent.children[token_at(upper.key, 0)] = upper
        lower.key = lower.key[4 * n :]
        lower.slots = lower.slots[n:]
        lower.parent = upper
        upper.children[token_at(lower.key, 0)] = lower
        self._count(lower.namespace, 1, 0)
        if lower.spots and self.follower is not None:
            self.follower.split(upper, lower)
        return upper

    def _add(self, parent: Node, key: bytes, slots: SlotArray) -> Node:
        node = Node(parent.namespace, parent, key, slots.astype(np.int32))  # a copy: the row's array lives on
        parent.children[token_at(key, 0)] = node
        self._count(parent.namespace, 1, len(slots))
        self.cached_tokens += len(slots)
        self.evictable_tokens += len(slots)
        self._order.push(node)
        if parent.spots and self.follower is not None:
            self.follower.grew(parent, node)
        return node

    def _count(self, namespace: str, nodes: int, tokens: int) -> None:
        root = self._roots[namespace]
        root.total_nodes += nodes
        root.total_tokens += tokens
        self.num_nodes += nodes

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
        self._count(leaf.namespace, 0, -n)
        if leaf.spots and self.follower is not None:
            self.follower.shrank(leaf, token, leaf)
        return dropped

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        token = token_at(leaf.key, 0)
        self._ghosts.add(leaf.namespace, parent.path_crc(), token)
        del parent.children[token]
        leaf.parent = None
        self._count(leaf.namespace, -1, -len(leaf.slots))
        if leaf.spots and self.follower is not None:
            self.follower.shrank(leaf, token, parent)
        if parent.children:
            return
        if parent.parent is None:
            self.prune_root(leaf.namespace)
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
                    self._count(root.namespace, -1, -len(gone.slots))
                    if gone.spots and self.follower is not None:
                        self.follower.shrank(gone, token, node)

    def _give_back(self, freed: list[SlotArray]) -> int:
        """Free the slots of evictable tokens that have left the tree."""
        if not freed:
            return 0
        slots = np.concatenate(freed)
        self._pool.free(slots)
        self.cached_tokens -= len(slots)
        self.evictable_tokens -= len(slots)
        return len(slots)


def common_prefix(key: bytes, ids: bytes, at: int = 0, end: int | None = None) -> int:
    """How many tokens at the start of `key` equal those of `ids` from byte `at` to `end` (None: all)."""
    n = min(len(key), (len(ids) if end is None else end) - at) // 4
    if n == 0:
        return 0
    differ = np.frombuffer(key, _ID, n) != np.frombuffer(ids, _ID, n, at)
    first = int(differ.argmax())
    return first if differ[first] else n
