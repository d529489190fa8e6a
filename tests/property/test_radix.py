"""The radix tree and its slots against a plain dictionary, operation by operation.

The model holds, token by token, the slot of every cached prefix and what its eviction goes by. It knows
nothing of nodes, so splits, trims and the incremental counts have to come out the same by themselves. A
prefix is known by its namespace, by the listed prefix below which it was cached (if any), and by its tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sapwood.srt.cache import eviction
from sapwood.srt.cache.invariants import check_pool
from sapwood.srt.cache.node import LOWEST, Node, Root
from sapwood.srt.cache.pins import MAX_PINNED_SHARE
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotArray, SlotPool
from sapwood.srt.messages import pack, unpack
from sapwood.srt.namespaces import LISTED

POOL = 64
PINNED = int(POOL * MAX_PINNED_SHARE)
MAX_LISTED = 12
MAX_ROWS = 3
OPERATIONS = 10_000
NAMESPACES = st.sampled_from(["", "salt", "key", LISTED])
# Of 1, 256 and 65536 the bytes are each other's, shifted: only whole tokens may match.
TOKENS = st.sampled_from([1, 256, 65536])
TAILS = st.lists(TOKENS, min_size=1, max_size=8).map(tuple)
PRIORITIES = st.integers(-2, 2)

Prefix = tuple[int, ...]
Key = tuple[str, Prefix, Prefix]


@dataclass
class Token:
    """A cached token, the last of its prefix."""

    slot: int
    used: int = 0
    hits: int = 0
    priority: int = LOWEST


RANKS: dict[str, Any] = {
    "lru": lambda token: token.used,
    "lfu": lambda token: (token.hits, token.used),
    "slru": lambda token: (token.hits > 0, token.used),
    "priority": lambda token: (token.priority, token.used),
}


class Row:
    """A row as the scheduler keeps it: some tokens are computed, those up to the lock are in the tree, below
    the listed prefix `start`."""

    def __init__(self, namespace: str, start: Prefix, prompt: Prefix, slots: SlotArray, node: Node) -> None:
        self.namespace = namespace
        self.start = start
        self.ids = prompt
        self.slots = slots.tolist()
        self.locked = len(slots)
        self.node = node
        self.priority = 0

    @property
    def computed(self) -> Prefix:
        return self.ids[: len(self.slots)]


class CacheMachine(RuleBasedStateMachine):
    operations = 0
    ghost_size = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(POOL)
        self.rows: list[Row] = []
        self.tokens: dict[Key, Token] = {}
        self.listed: set[Prefix] = set()
        self.pins: dict[Key, float] = {}
        self.now = 0.0
        self.clock = self.flushed = 0
        self.evicted: set[tuple[str, Prefix]] = set()
        self.cuts: set[tuple[str, Prefix]] = set()
        self.traced: deque[tuple[str, Prefix, bytes, Node]] = deque(maxlen=5)
        type(self).operations -= 1  # the invariant is also checked before the first operation

    @initialize(policy=st.sampled_from(get_args(eviction.Policy)))
    def begin(self, policy: eviction.Policy) -> None:
        self.tree = RadixTree(self.pool, policy, self.ghost_size)
        self.rank = RANKS[policy]

    # ---- operations

    @rule(
        namespace=NAMESPACES,
        data=st.data(),
        less=st.integers(0, 3),
        unsalted=st.sampled_from([None, "", "key"]),
    )
    def peek(self, namespace: str, data: st.DataObject, less: int, unsalted: str | None) -> None:
        prompt = self.prompt(data)
        limit = max(0, len(prompt) - less)
        nodes = self.tree.num_nodes
        matched, stopped = self.tree.peek(namespace, pack(prompt), limit, unsalted)
        assert matched == self.longest(namespace, prompt[:limit])
        self.check_reason(stopped, namespace, prompt, matched, limit, unsalted)
        assert self.tree.num_nodes == nodes
        start = self.start(namespace, prompt[:limit])
        trace = self.tree.trace(namespace, pack(prompt), limit)
        self.traced.append((namespace, start, pack(prompt), trace.node))
        # What is shown of the ways on is the namespace's own, below this listed end.
        here = (namespace, start, prompt[:matched])
        firsts = [way[0] for way in trace.branches(9, 1)]
        own = [t for t in (1, 256, 65536) if (*here[:2], (*here[2], t)) in self.tokens]
        assert sorted(firsts) == own
        assert trace.goes_on == bool(own)
        lengths = [segment.tokens for segment in trace.segments(99)]
        assert sum(lengths) == matched
        assert all(lengths)

    @rule(namespace=NAMESPACES, data=st.data(), fits=st.booleans(), priority=PRIORITIES)
    def admit(self, namespace: str, data: st.DataObject, fits: bool, priority: int) -> None:
        """Look a request up; if the scheduler finds that it fits, it runs."""
        self.try_admit(namespace, self.prompt(data), fits, priority)

    def try_admit(self, namespace: str, prompt: Prefix, fits: bool, priority: int) -> None:
        limit = len(prompt) - 1
        matched, stopped = self.tree.peek(namespace, pack(prompt), limit)
        match = self.tree.match(namespace, pack(prompt), limit)
        start = self.start(namespace, prompt[:limit])
        assert match.length == match.node.depth == self.longest(namespace, prompt[:limit])
        keys = self.path(namespace, start, prompt[: match.length])
        assert match.slots.tolist() == [self.tokens[key].slot for key in keys]
        assert (match.length, stopped) == (matched, self.tree.peek(namespace, pack(prompt), limit)[1])
        self.check_reason(stopped, namespace, prompt, match.length, limit, None)
        self.touch(keys)
        if not fits:
            return
        self.tree.lock(match.node)
        self.tree.note_hit(match.node, priority)
        for key in keys:
            self.tokens[key].hits += 1
        self.raise_priority(keys, priority)
        row = Row(namespace, start, prompt, match.slots, match.node)
        row.priority = priority
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self.end(self.rows[0], abort=False)

    @rule(namespace=NAMESPACES, data=st.data(), priority=PRIORITIES)
    def serve(self, namespace: str, data: st.DataObject, priority: int) -> None:
        """A whole request at once: many of these fill the tree with paths that nobody holds."""
        self.try_admit(namespace, self.prompt(data), True, priority)
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
    @rule(data=st.data(), abort=st.booleans(), keep=st.integers(0, 9))
    def release(self, data: st.DataObject, abort: bool, keep: int) -> None:
        """The end of a request; with `keep` what it leaves is pinned."""
        row = self.pick(data)
        if keep and not abort:
            self.insert_computed(row, row.computed[: max(row.locked, len(row.computed) - 1)])
            self.pin_path(row.node, row.namespace, row.start, row.ids[: row.locked], keep)
        self.end(row, abort)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), keep=st.integers(1, 9), again=st.booleans())
    def pin(self, data: st.DataObject, keep: int, again: bool) -> None:
        """Pin a cached prefix; `again`: one that is pinned."""
        keys = sorted(self.pins if again and self.pins else self.tokens)
        namespace, _, ids = data.draw(st.sampled_from(keys))
        match = self.tree.match(namespace, pack(ids), len(ids))
        start = self.start(namespace, ids)
        self.touch(self.path(namespace, start, ids[: match.length]))
        self.pin_path(match.node, namespace, start, ids[: match.length], keep)

    @precondition(lambda self: self.pins)
    @rule(passed=st.integers(0, 4))
    def expire(self, passed: int) -> None:
        self.now += passed
        self.tree.expire(self.now)
        self.pins = {key: until for key, until in self.pins.items() if until > self.now}

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(data=st.data(), less=st.integers(0, 2))
    def share(self, data: st.DataObject, less: int) -> None:
        """List a prefix, as at the server's start, but at any time."""
        ids = self.prompt(data)[: 4 + less]
        if len(self.listed_keys(self.listed | {ids})) > MAX_LISTED:
            return
        self.try_admit(LISTED, (*ids, 1), True, 0)
        row = self.rows[-1]
        self.compute(row, [0] * (len(ids) - len(row.slots)))
        if len(row.slots) == len(ids):
            self.insert_computed(row, ids)
            self.tree.list_prefix(row.node)
            self.listed.add(ids)
        self.end(row, abort=True)

    @precondition(lambda self: self.tree.evictable_tokens > 0)
    @rule(tokens=st.integers(0, 12))
    def evict(self, tokens: int) -> None:
        self.evict_tokens(tokens)

    @precondition(lambda self: self.tree.evictable_tokens > self.tree.pinned_tokens > 4)
    @rule(tokens=st.integers(-4, 4))
    def evict_all_but_pins(self, tokens: int) -> None:
        """Or some of those, too."""
        loose = self.tokens.keys() - self.locked() - self.pinned(self.pins)
        self.evict_tokens(max(0, len(loose) + tokens))

    @precondition(lambda self: self.clock > self.flushed + 40)
    @rule(namespace=st.none() | NAMESPACES)
    def flush(self, namespace: str | None) -> None:
        self.flushed = self.clock
        locked = self.locked()
        gone = [k for k in self.tokens if namespace in (None, k[0]) and k not in locked]
        assert self.tree.flush(namespace) == len(gone)
        for key in gone:
            del self.tokens[key]
        self.pins = {k: until for k, until in self.pins.items() if namespace not in (None, k[0])}
        self.evicted = {k for k in self.evicted if namespace not in (None, k[0])}
        self.cuts = {k for k in self.cuts if namespace not in (None, k[0])}

    # ---- after each operation

    @invariant()
    def everything_adds_up(self) -> None:
        type(self).operations += 1
        self.tree.check()
        check_pool(self.pool, self.tree, [self.private(row) for row in self.rows])
        assert self.contents() == {k: (t.slot, t.hits, t.priority) for k, t in self.tokens.items()}
        assert self.tree.evictable_tokens == len(self.tokens) - len(self.locked())
        assert self.tree.pinned_tokens == len(self.pinned(self.pins))
        assert self.tree.listed_tokens == len(self.listed_keys(self.listed))
        assert set(self.tree.namespaces) == {key[0] for key in self.tokens}
        for namespace, start, ids, node in self.traced:
            for limit in (len(ids) // 4, node.depth, max(0, node.depth - 1)):
                again = self.tree.trace(namespace, ids, limit, node)
                prompt = tuple(unpack(ids)[:limit].tolist())
                known = node.depth <= limit and (isinstance(node, Root) or node.parent is not None)
                begin = start if known else self.start(namespace, prompt)
                assert again.matched == self.longest_from(namespace, begin, prompt)

    def contents(self) -> dict[Key, tuple[int, int, int]]:
        found: dict[Key, tuple[int, int, int]] = {}
        for node in self.tree.nodes():
            if isinstance(node, Root):
                continue
            assert node.parent is not None
            start, path = self.place(node.parent)
            for token, slot in zip(unpack(node.key).tolist(), node.slots.tolist(), strict=True):
                path += (token,)
                found[node.namespace, start, path] = slot, node.hits, node.priority
        return found

    def place(self, node: Node) -> tuple[Prefix, Prefix]:
        """The listed prefix below which the node is, and its path."""
        if node.parent is None:
            return (), ()
        start, path = self.place(node.parent)
        return (path, path) if isinstance(node, Root) else (start, path + tuple(unpack(node.key).tolist()))

    # ---- the model

    def start(self, namespace: str, ids: Prefix) -> Prefix:
        """The listed prefix at which a lookup begins."""
        ends = [end for end in self.listed if ids[: len(end)] == end and namespace != LISTED]
        return max(ends, key=len, default=())

    def longest(self, namespace: str, ids: Prefix) -> int:
        return self.longest_from(namespace, self.start(namespace, ids), ids)

    def longest_from(self, namespace: str, start: Prefix, ids: Prefix) -> int:
        n = len(start)
        while n < len(ids) and (namespace, start, ids[: n + 1]) in self.tokens:
            n += 1
        return n

    def path(self, namespace: str, start: Prefix, ids: Prefix) -> list[Key]:
        shared: list[Key] = [(LISTED, (), ids[:n]) for n in range(1, len(start) + 1)]
        return shared + [(namespace, start, ids[:n]) for n in range(len(start) + 1, len(ids) + 1)]

    def touch(self, keys: list[Key]) -> None:
        self.clock += 1
        for key in keys:
            self.tokens[key].used = self.clock

    def raise_priority(self, keys: list[Key], priority: int) -> None:
        for key in keys:
            self.tokens[key].priority = max(self.tokens[key].priority, priority)

    def listed_keys(self, ends: set[Prefix]) -> set[Key]:
        return {(LISTED, (), end[:n]) for end in ends for n in range(1, len(end) + 1)}

    def locked(self) -> set[Key]:
        keys = [key for row in self.rows for key in self.path_of(row)]
        return {*keys, *self.listed_keys(self.listed)}

    def path_of(self, row: Row) -> list[Key]:
        return self.path(row.namespace, row.start, row.ids[: row.locked])

    def pinned(self, ends: dict[Key, float]) -> set[Key]:
        return {key for name, start, ids in ends for key in self.path(name, start, ids) if key[0] == name}

    def private(self, row: Row) -> SlotArray:
        """The slots of a row that the tree did not take: not inserted yet, or duplicates."""
        shared = [self.tokens[key].slot for key in self.path_of(row)]
        own = [slot for i, slot in enumerate(row.slots) if i >= row.locked or slot != shared[i]]
        return np.array(own, np.int32)

    def prompt(self, data: st.DataObject) -> Prefix:
        """New tokens, mostly after a prefix that is or was cached somewhere."""
        known_to = {key[2] for key in self.tokens} | {ids for _, ids in self.evicted}
        seen = sorted(known_to, key=lambda ids: (len(ids), ids))
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
        existing = self.longest_from(row.namespace, row.start, ids)
        slots = np.array(row.slots[: len(ids)], np.int32)
        inserted = self.tree.insert(row.namespace, pack(ids), slots, row.node, row.priority)
        assert inserted.existing == existing
        assert inserted.node.depth == len(ids)
        for n in range(existing + 1, len(ids) + 1):
            self.tokens[row.namespace, row.start, ids[:n]] = Token(row.slots[n - 1])
            self.cuts.discard((row.namespace, ids[:n]))
        keys = self.path(row.namespace, row.start, ids)
        self.touch(keys)
        self.raise_priority(keys, row.priority)
        assert inserted.node.path_slots().tolist() == [self.tokens[key].slot for key in keys]
        self.tree.lock(inserted.node)
        self.unlock(row)
        row.node, row.locked = inserted.node, len(ids)

    def unlock(self, row: Row) -> None:
        self.tree.unlock(row.node)
        self.touch(self.path_of(row))

    def pin_path(self, node: Node, namespace: str, start: Prefix, ids: Prefix, keep: int) -> None:
        key = (namespace, start, ids)
        until = self.now + keep + self.clock * 1e-6  # no two end at once
        fits = len(self.pinned({**self.pins, key: until})) <= PINNED
        assert self.tree.pin(node, until) == fits
        if fits and len(ids) > len(start):
            self.pins[key] = max(until, self.pins.get(key, until))

    def evict_tokens(self, tokens: int) -> None:
        """One token at a time, the end of lowest rank first, is what the tree must do too; of pinned ones
        only if there is nothing else, those whose time is over first."""
        gone: set[Key] = set()
        kept = self.locked()
        while len(gone) < tokens and (free := self.tokens.keys() - kept):
            # Of the paths used last at the same time, only the longest can be an end.
            loose = free - self.pinned(self.pins)
            if loose:
                first = min(loose, key=lambda key: (self.rank(self.tokens[key]), -len(key[2])))
            else:
                inner = {(name, start, ids[:-1]) for name, start, ids in self.tokens}
                first = min(self.pins.keys() & (free - inner), key=self.pins.__getitem__)
                del self.pins[first]
            gone.add(first)
            del self.tokens[first]
        assert self.tree.evict(tokens) == len(gone)
        self.evicted |= {(name, ids) for name, _, ids in gone}
        self.cuts |= {(name, ids) for name, start, ids in gone if (name, start, ids[:-1]) not in gone}

    def check_reason(
        self, stopped: str, namespace: str, ids: Prefix, matched: int, limit: int, unsalted: str | None
    ) -> None:
        """`cuts` are the evicted tokens whose path stayed: the tree must know of them, and it must not
        claim an eviction that never was."""
        following = (namespace, ids[: matched + 1])
        if matched == limit:
            assert stopped == "last_token"
        elif unsalted not in (None, namespace) and self.longest(unsalted or "", ids[:limit]) > matched:
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
