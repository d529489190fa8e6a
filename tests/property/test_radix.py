"""The radix tree and its slots against a plain dictionary, operation by operation.

The model holds, for each namespace, the slot and the last use of every cached prefix, token by token. It
knows nothing of nodes, so splits, trims and the incremental counts have to come out the same by themselves.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sapwood.srt.cache import eviction
from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.messages import pack, unpack

POOL = 56
MAX_ROWS = 3
OPERATIONS = 10_000
NAMESPACES = ["", "salt", "adapter"]
# Of 1, 256 and 65536 the bytes are each other's, shifted: only whole tokens may match.
TOKENS = st.sampled_from([1, 256, 65536])
TAILS = st.lists(TOKENS, min_size=1, max_size=8).map(tuple)

Prefix = tuple[int, ...]


class Row:
    """A row as the scheduler keeps it: some tokens are computed, those up to the lock are in the tree."""

    def __init__(self, namespace: str, prompt: Prefix, matched: int, slots: SlotArray, node: Node) -> None:
        self.namespace = namespace
        self.ids = prompt
        self.slots = slots.tolist()
        self.locked = matched
        self.node = node

    @property
    def computed(self) -> Prefix:
        return self.ids[: len(self.slots)]


class CacheMachine(RuleBasedStateMachine):
    operations = 0
    ghost_size = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(POOL)
        self.tree = RadixTree(self.pool, self.ghost_size)
        self.rows: list[Row] = []
        self.slots: dict[tuple[str, Prefix], int] = {}
        self.used: dict[tuple[str, Prefix], int] = {}
        self.clock = self.flushed = 0
        self.evicted: set[tuple[str, Prefix]] = set()
        self.cuts: set[tuple[str, Prefix]] = set()
        self.traced: deque[tuple[str, bytes, Node]] = deque(maxlen=5)
        type(self).operations -= 1  # the invariant is also checked before the first operation

    # ---- operations

    @rule(namespace=st.sampled_from(NAMESPACES), data=st.data(), less=st.integers(0, 3))
    def peek(self, namespace: str, data: st.DataObject, less: int) -> None:
        prompt = self.prompt(data)
        limit = max(0, len(prompt) - less)
        nodes = self.tree.num_nodes
        matched, stopped = self.tree.peek(namespace, pack(prompt), limit)
        assert matched == self.longest(namespace, prompt[:limit])
        self.check_reason(stopped, namespace, prompt, matched, limit)
        assert self.tree.num_nodes == nodes
        self.traced.append((namespace, pack(prompt), self.tree.trace(namespace, pack(prompt), limit).node))

    @rule(namespace=st.sampled_from(NAMESPACES), data=st.data(), fits=st.booleans())
    def admit(self, namespace: str, data: st.DataObject, fits: bool) -> None:
        """Look a request up; if the scheduler finds that it fits, it runs."""
        prompt = self.prompt(data)
        limit = len(prompt) - 1
        matched, stopped = self.tree.peek(namespace, pack(prompt), limit)
        match = self.tree.match(namespace, pack(prompt), limit)
        assert match.length == match.node.depth == self.longest(namespace, prompt[:limit])
        assert match.slots.tolist() == self.path(namespace, prompt[: match.length])
        assert (match.length, stopped) == (matched, self.tree.peek(namespace, pack(prompt), limit)[1])
        self.check_reason(stopped, namespace, prompt, match.length, limit)
        self.touch(namespace, prompt[: match.length])
        if not fits:
            return
        self.tree.lock(match.node)
        self.rows.append(Row(namespace, prompt, match.length, match.slots, match.node))
        if len(self.rows) > MAX_ROWS:
            self.end(self.rows[0], abort=False)

    @rule(namespace=st.sampled_from(NAMESPACES), data=st.data())
    def serve(self, namespace: str, data: st.DataObject) -> None:
        """A whole request at once: many of these fill the tree with paths that nobody holds."""
        self.admit(namespace, data, fits=True)
        row = self.rows[-1]
        self.compute(row, [0] * (len(row.ids) - len(row.slots) + 1))
        self.end(row, abort=False)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=6), insert=st.booleans())
    def extend(self, data: st.DataObject, tokens: list[int], insert: bool) -> None:
        """Compute the next tokens of the prompt, or sampled ones after it, as far as there are slots."""
        row = self.pick(data)
        self.compute(row, tokens)
        if insert:
            self.insert_computed(row, row.computed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), abort=st.booleans())
    def release(self, data: st.DataObject, abort: bool) -> None:
        self.end(self.pick(data), abort)

    @precondition(lambda self: self.tree.evictable_tokens > 0)
    @rule(tokens=st.integers(0, 12))
    def evict(self, tokens: int) -> None:
        self.evict_tokens(tokens)

    @precondition(lambda self: self.clock > self.flushed + 40)
    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def flush(self, namespace: str | None) -> None:
        self.flushed = self.clock
        locked = self.locked()
        gone = [k for k in self.slots if namespace in (None, k[0]) and k not in locked]
        assert self.tree.flush(namespace) == len(gone)
        for key in gone:
            del self.slots[key], self.used[key]
        if namespace is None:
            self.evicted, self.cuts = set(), set()
        else:
            self.evicted = {k for k in self.evicted if k[0] != namespace}
            self.cuts = {k for k in self.cuts if k[0] != namespace}

    # ---- after each operation

    @invariant()
    def everything_adds_up(self) -> None:
        type(self).operations += 1
        self.tree.check()
        check_pool(self.pool, self.tree, [self.private(row) for row in self.rows])
        assert self.contents() == self.slots
        assert self.tree.evictable_tokens == len(self.slots) - len(self.locked())
        assert set(self.tree.namespaces) == {namespace for namespace, _ in self.slots}
        for namespace, ids, node in self.traced:
            for limit in (len(ids) // 4, node.depth, max(0, node.depth - 1)):
                again = self.tree.trace(namespace, ids, limit, node)
                assert again.matched == self.longest(namespace, tuple(unpack(ids)[:limit].tolist()))

    def contents(self) -> dict[tuple[str, Prefix], int]:
        found: dict[tuple[str, Prefix], int] = {}
        paths: dict[Node, Prefix] = {}
        for node in self.tree.nodes():
            path = paths[node.parent] if node.parent else ()
            for token, slot in zip(unpack(node.key).tolist(), node.slots.tolist(), strict=True):
                path += (token,)
                found[node.namespace, path] = slot
            paths[node] = path
        return found

    # ---- the model

    def longest(self, namespace: str, ids: Prefix) -> int:
        n = 0
        while n < len(ids) and (namespace, ids[: n + 1]) in self.slots:
            n += 1
        return n

    def path(self, namespace: str, ids: Prefix) -> list[int]:
        return [self.slots[namespace, ids[:n]] for n in range(1, len(ids) + 1)]

    def touch(self, namespace: str, ids: Prefix) -> None:
        self.clock += 1
        for n in range(1, len(ids) + 1):
            self.used[namespace, ids[:n]] = self.clock

    def locked(self) -> set[tuple[str, Prefix]]:
        return {(row.namespace, row.ids[:n]) for row in self.rows for n in range(1, row.locked + 1)}

    def private(self, row: Row) -> SlotArray:
        """The slots of a row that the tree did not take: not inserted yet, or duplicates."""
        shared = self.path(row.namespace, row.ids[: row.locked])
        own = [slot for i, slot in enumerate(row.slots) if i >= row.locked or slot != shared[i]]
        return np.array(own, np.int32)

    def prompt(self, data: st.DataObject) -> Prefix:
        """New tokens, mostly after a prefix that is or was cached somewhere."""
        seen = sorted({ids for _, ids in self.slots.keys() | self.evicted}, key=lambda ids: (len(ids), ids))
        known: Prefix = data.draw(st.sampled_from([(), *seen]))
        return known + data.draw(TAILS)

    def pick(self, data: st.DataObject) -> Row:
        return self.rows[data.draw(st.integers(0, len(self.rows) - 1))]

    def compute(self, row: Row, tokens: list[int]) -> None:
        if len(tokens) > self.pool.num_free:
            self.evict_tokens(len(tokens) - self.pool.num_free)
        n = min(len(tokens), self.pool.num_free)
        row.slots += self.pool.allocate(n).tolist()
        row.ids += tuple(tokens[: max(0, len(row.slots) - len(row.ids))])

    def end(self, row: Row, abort: bool) -> None:
        """All but the row's last token is kept, or (aborted) nothing that was not inserted before."""
        if not abort:
            self.insert_computed(row, row.computed[: max(row.locked, len(row.computed) - 1)])
        self.pool.free(self.private(row))
        self.rows.remove(row)
        self.unlock(row)

    def insert_computed(self, row: Row, ids: Prefix) -> None:
        known = self.longest(row.namespace, ids)
        inserted = self.tree.insert(row.namespace, pack(ids), np.array(row.slots[: len(ids)], np.int32))
        assert inserted.existing == known
        assert inserted.node.depth == len(ids)
        for n in range(known + 1, len(ids) + 1):
            key = (row.namespace, ids[:n])
            self.slots[key] = row.slots[n - 1]
            self.evicted.discard(key)
            self.cuts.discard(key)
        self.touch(row.namespace, ids)
        assert inserted.node.path_slots().tolist() == self.path(row.namespace, ids)
        self.tree.lock(inserted.node)
        self.unlock(row)
        row.node, row.locked = inserted.node, len(ids)

    def unlock(self, row: Row) -> None:
        self.tree.unlock(row.node)
        self.touch(row.namespace, row.ids[: row.locked])

    def evict_tokens(self, tokens: int) -> None:
        """One token at a time, the least recently used end of a path first, is what the tree must do too."""
        gone: set[tuple[str, Prefix]] = set()
        kept = self.locked()
        while len(gone) < tokens and len(kept) < len(self.slots):
            # Of the paths used last at the same time, only the longest can be an end.
            oldest = min(self.slots.keys() - kept, key=lambda key: (self.used[key], -len(key[1])))
            gone.add(oldest)
            del self.slots[oldest], self.used[oldest]
        assert self.tree.evict(tokens) == len(gone)
        self.evicted |= gone
        self.cuts |= {(name, ids) for name, ids in gone if (name, ids[:-1]) not in gone}

    def check_reason(self, stopped: str, namespace: str, ids: Prefix, matched: int, limit: int) -> None:
        """`cuts` are the evicted tokens whose path stayed: the tree must know of them, and it must not
        claim an eviction that never was."""
        following = (namespace, ids[: matched + 1])
        if matched == limit:
            assert stopped == "last_token"
        elif namespace and self.longest("", ids[:limit]) > matched:
            assert stopped == "namespace"
        elif stopped == "evicted":
            assert following in self.evicted
        else:
            assert stopped == ("diverged" if matched else "cold")
            assert following not in self.cuts or self.ghost_size < 1000


class SmallMachine(CacheMachine):
    """The same, with a ghost set and a list of fresh leaves that overflow all the time."""

    ghost_size = 2


def run(machine: type[CacheMachine], operations: int) -> None:
    steps = 100
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=operations // steps * 2,  # some examples end early
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_tree_equals_dictionary() -> None:
    run(CacheMachine, OPERATIONS)
    assert CacheMachine.operations >= OPERATIONS


def test_tree_equals_dictionary_when_what_is_bounded_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_FRESH", 1)
    run(SmallMachine, 3_000)
    assert SmallMachine.operations >= 3_000
