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
from sapwood.srt.cache.continuation import continuation
from sapwood.srt.cache.eviction import Order, Policy
from sapwood.srt.cache.explain import Ghosts, Trace
from sapwood.srt.cache.node import Node, Root, token_at, unpack_token
from sapwood.srt.cache.pins import ANYBODY, MAX_PINNED_SHARE, Pins
from sapwood.srt.cache.roots import Roots
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.cache.snapshot import snapshot
from sapwood.srt.messages import Stopped
from sapwood.srt.namespaces import LISTED

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

    def listed(self) -> None:
        """A prefix was listed: lookups of all namespaces may begin elsewhere now."""


class RadixTree:
    """Prefixes of any length, shared to the token; nothing is shared between namespaces but what is listed
    (see roots.py). What goes first when slots are needed is a matter of `eviction` and of pins."""

    def __init__(self, pool: SlotPool, eviction: Policy = "lru", ghost_size: int = 4096) -> None:
        self.cached_tokens = 0
        self.evictable_tokens = 0
        self.num_nodes = 0
        self.follower: Follower | None = None
        self.pins = Pins(int(pool.total * MAX_PINNED_SHARE))
        self._pool = pool
        self._roots = Roots()
        self._order = Order(eviction)
        self._ghosts = Ghosts(ghost_size)
        self._clock = 0

    @property
    def namespaces(self) -> list[str]:
        """Those that hold something."""
        return [name for name, root in self._roots.by_name.items() if root.total_nodes]

    @property
    def pinned_tokens(self) -> int:
        """Tokens on pinned paths."""
        return self.pins.tokens

    @property
    def listed_tokens(self) -> int:
        """Tokens of listed prefixes: they are locked for ever."""
        return self._roots.listed_tokens

    def keep(self, node: Node) -> Node:
        """`node` of a trace, in the tree: a root is put there if need be, and stays while something is cached
        below it or it has spots."""
        return self._roots.keep(node) if isinstance(node, Root) else node

    def prune(self, node: Node) -> None:
        """Drop the node if it is a root and nothing hangs on it."""
        if isinstance(node, Root):
            self._roots.prune(node)

    def peek(
        self, namespace: str, ids: bytes, limit: int, unsalted: str | None = None
    ) -> tuple[int, Stopped]:
        """What `match` would find, changing nothing: the number of tokens, and why no more.

        That the namespace `unsalted` has more is told, and nothing else of other namespaces.
        """
        trace = self.trace(namespace, ids, limit)
        return trace.matched, self._stopped(namespace, ids, limit, trace, unsalted)

    def trace(self, namespace: str, ids: bytes, limit: int, known: Node | None = None) -> Trace:
        """Where the longest cached prefix of `ids` ends, of at most `limit` tokens; to be read before the
        tree changes. `known` is the node of an earlier trace of ids that `ids` begins with: if it is still in
        the tree, the search goes on from there, whatever has been listed since.
        """
        # A node that stays in the tree may lose its end, but the path to it never changes otherwise.
        node: Node
        if known is None or known.depth > limit or (known.key and known.parent is None):
            node = self._roots.start(namespace, ids, limit)
        else:
            node = self._roots.present(known) if isinstance(known, Root) else known
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

    def after(self, node: Node, since: bytes, most: int) -> bytes:
        """Up to `most` ids that are cached after the path to `node`, which a row has locked, and `since`."""
        return continuation(self._roots.present(node) if isinstance(node, Root) else node, since, most)

    def note_hit(self, node: Node, priority: int = 0) -> None:
        """Count a request that begins with the path to `node`. A lookup may be repeated: this is not."""
        self._raise_priority(node, priority)
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
                if not node.children and node.key:
                    self._order.push(node)
            node = node.parent

    def pin(self, node: Node, until: float, holder: int = ANYBODY) -> bool:
        """Evict the path to `node` last, as far as it is its namespace's own, until `expire` is told that
        time, or its `holder` lets go of it. A second pin of a node prolongs the first (see pins.py). False,
        and nothing done, if more than MAX_PINNED_SHARE of all slots would be on pinned paths."""
        assert node.parent is not None or not node.key, "the pinned node is no longer in the tree"
        return not node.key or self.pins.add(node, until, holder)

    def unpin(self, node: Node, holder: int) -> None:
        """`holder` lets go of its pin of `node`, if that is not broken."""
        if self.pins.release(node, holder):
            self._order.push(node)

    def expire(self, now: float) -> None:
        """End the pins whose time is over. O(1) if there is none."""
        for node in self.pins.expire(now):
            self._order.push(node)

    def list_prefix(self, node: Node) -> None:
        """Share the path to `node`, of the namespace LISTED, with all namespaces from now on, and keep it for
        ever. What they have cached of it themselves is found no more: only rows that use it already go on.
        """
        assert node.namespace == LISTED, "only what is in LISTED can be listed"
        assert node.parent is not None, "only what is in the tree can be listed"
        if node.listed:
            return
        self.lock(node)
        self._roots.add_end(node)
        if self.follower is not None:
            self.follower.listed()

    def insert(
        self, namespace: str, ids: bytes, slots: SlotArray, known: Node | None = None, priority: int = 0
    ) -> Inserted:
        """Cache `ids` `[n]`, computed into `slots` `[n]`: afterwards `match` finds all of it.

        Tokens that are cached already keep the tree's slots. The others' slots, `slots[existing:]`, now
        belong to the tree; those of `slots[:existing]` that differ from the tree's stay the caller's own.
        A row that has locked a node says it as `known`: its path goes on from there.
        """
        assert len(ids) == 4 * len(slots), f"{len(ids)} bytes of ids for {len(slots)} slots"
        trace = self.trace(namespace, ids, len(slots), known)
        node, existing = self._end_of(trace), trace.matched
        if existing < len(slots):
            node = self._add(self.keep(node), ids[4 * existing :], slots[existing:])
        self._touch(node)
        self._raise_priority(node, priority)
        return Inserted(existing, node)

    def evict(self, tokens: int) -> int:
        """Free `tokens` tokens that no row uses, or all there are; returns how many.

        Only the ends of unlocked paths go, in the order of eviction, token by token: the last leaf is trimmed
        to what is needed.
        """
        freed: list[SlotArray] = []
        left = tokens
        while left > 0 and (leaf := self._victim()) is not None:
            if len(leaf.slots) > left:
                freed.append(self._trim(leaf, left))
                left = 0
            else:
                freed.append(leaf.slots)
                left -= len(leaf.slots)
                self._remove(leaf)
        return self._give_back(freed)

    def flush(self, namespace: str | None = None) -> int:
        """Drop all that no row uses, and all pins, in one namespace or all (None), and what was known of
        evicted edges; returns how many tokens were freed. Paths that rows have locked stay, and stay shared,
        and so does what is listed.
        """
        freed: list[SlotArray] = []
        self.pins.clear(namespace)
        for start in self._roots.of(namespace):
            self._drop_unlocked(start, freed)
            self._roots.prune(start)
        self._order.prune()
        self._ghosts.clear(namespace)
        return self._give_back(freed)

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents first."""
        for root in self._roots:
            yield from root.subtree()

    def check(self) -> None:
        """Walk over everything; AssertionError that says what is wrong."""
        invariants.check_tree(self, self._roots, self._order, self.pins)

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
        roots = self._roots.by_name
        return {"clock": self._clock, **snapshot(roots, depth, limit, ids, namespaces, max_nodes)}

    def _stopped(self, namespace: str, ids: bytes, limit: int, trace: Trace, unsalted: str | None) -> Stopped:
        at = 4 * trace.matched
        if at == min(4 * limit, len(ids)):
            return "last_token"
        other = unsalted if unsalted is not None else namespace
        if other != namespace and self.trace(other, ids, limit).matched > trace.matched:
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
        upper.pins = lower.pins
        upper.last_use = lower.last_use
        upper.hits = lower.hits
        upper.priority = lower.priority
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
        root = self._roots.by_name[namespace]
        root.total_nodes += nodes
        root.total_tokens += tokens
        self.num_nodes += nodes

    def _touch(self, node: Node) -> None:
        self._clock = now = self._clock + 1
        while node.parent is not None:
            node.last_use = now
            node = node.parent

    def _raise_priority(self, node: Node, priority: int) -> None:
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    def _victim(self) -> Node | None:
        """The leaf that is evicted next; if it has a pin, that is broken."""
        while (leaf := self._order.pop()) is not None:
            if not leaf.pins:
                return leaf
            self.pins.set_aside(leaf)
        leaf = self.pins.take()
        if leaf is not None:
            self.pins.remove(leaf)
        return leaf

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
        if isinstance(parent, Root):
            self._roots.prune(parent)
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
