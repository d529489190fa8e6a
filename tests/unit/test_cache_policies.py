"""Each eviction policy takes first what it says, and all of them keep to the ends of paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from sapwood.srt.cache.eviction import RANKS, Policy
from sapwood.srt.cache.node import Node
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.config import Config
from sapwood.srt.messages import pack

Make = Callable[[Policy], "Cache"]


class Cache:
    """A tree of paths of two tokens, by their first token."""

    def __init__(self, policy: Policy) -> None:
        self.pool = SlotPool(64)
        self.tree = RadixTree(self.pool, policy)

    def add(self, *ids: int, priority: int = 0) -> Node:
        """A request that computes all of `ids` that is not cached."""
        slots = self.pool.allocate(len(ids))
        existing, node = self.tree.insert("", pack(ids), slots, priority=priority)
        self.pool.free(slots[:existing])
        return node

    def hit(self, *ids: int, priority: int = 0) -> None:
        """A request that finds `ids`."""
        self.tree.note_hit(self.tree.match("", pack(ids), len(ids)).node, priority)

    def order(self, *paths: tuple[int, ...]) -> list[tuple[int, ...]]:
        """In which order they lose their ends."""
        gone: list[tuple[int, ...]] = []
        while len(gone) < len(paths):
            assert self.tree.evict(1) == 1
            self.tree.check()
            gone += [p for p in paths if p not in gone and self.tree.peek("", pack(p), 9)[0] < len(p)]
        return gone


A, B, C, D = (1, 1), (2, 2), (3, 3), (4, 4)


def test_lru_takes_what_was_used_the_longest_time_ago() -> None:
    cache = Cache("lru")
    for path in (A, B, C):
        cache.add(*path)
    cache.hit(*A)
    assert cache.order(A, B, C) == [B, C, A]


def test_lfu_takes_what_the_fewest_requests_have_found() -> None:
    cache = Cache("lfu")
    for path, hits in ((A, 2), (B, 0), (C, 1), (D, 1)):
        cache.add(*path)
        for _ in range(hits):
            cache.hit(*path)
    cache.hit(*A)
    cache.add(*B)  # a use, but no hit
    assert cache.order(A, B, C, D) == [B, C, D, A]


def test_lfu_follows_hits_after_the_first_eviction() -> None:
    cache = Cache("lfu")
    for path in (A, B, C):
        cache.add(*path)
    assert cache.order(A) == [A]
    cache.hit(*B)
    assert cache.order(B, C) == [C, B]


def test_slru_takes_first_what_was_never_found_again_however_recent() -> None:
    cache = Cache("slru")
    cache.add(*A)
    cache.hit(*A)
    cache.add(*B)
    for _ in range(5):
        cache.hit(*B)
    cache.hit(*A)
    for path in (C, D):
        cache.add(*path)
    # Once protected, it goes by the last use: more hits are worth no more.
    assert cache.order(A, B, C, D) == [C, D, B, A]


def test_slru_lets_a_scan_pass_through() -> None:
    cache = Cache("slru")
    cache.add(*A)
    cache.hit(*A)
    for i in range(100):
        if cache.pool.num_free < 2:
            cache.tree.evict(2)
        cache.add(100 + i, 0)
    assert cache.tree.peek("", pack(A), 2)[0] == 2


def test_priority_takes_first_what_only_low_ones_have_used() -> None:
    cache = Cache("priority")
    cache.add(*A, priority=1)
    cache.add(*B, priority=-3)
    cache.add(*C, priority=0)
    cache.add(*D, priority=-3)
    cache.hit(*D, priority=2)
    cache.hit(*A, priority=-9)  # the highest counts
    assert cache.order(A, B, C, D) == [B, C, A, D]


def test_a_prefix_has_the_highest_priority_of_those_below_it() -> None:
    cache = Cache("priority")
    cache.add(1, 2, 3, priority=-1)
    cache.add(1, 2, 4, priority=5)
    cache.add(*C)
    assert cache.order((1, 2, 3), C, (1, 2, 4)) == [(1, 2, 3), C, (1, 2, 4)]


def test_a_split_keeps_what_both_halves_have_earned() -> None:
    for policy in get_args(Policy):
        cache = Cache(policy)
        cache.add(1, 1, 1, 1, priority=3)
        cache.hit(1, 1, 1, 1, priority=3)
        cache.add(*B)
        cache.tree.match("", pack([1, 1, 9]), 3)  # splits, and uses the upper half only
        cache.tree.check()
        if policy == "lru":
            assert cache.order((1, 1), (1, 1, 1, 1), B) == [(1, 1, 1, 1), B, (1, 1)]
        else:
            assert cache.order((1, 1), (1, 1, 1, 1), B) == [B, (1, 1, 1, 1), (1, 1)]


@pytest.mark.parametrize("policy", get_args(Policy))
def test_what_is_locked_stays_under_every_policy(policy: Policy) -> None:
    cache = Cache(policy)
    node = cache.add(1, 2, 3, 4)
    cache.tree.lock(node)
    cache.add(*B)
    assert cache.tree.evict(64) == 2
    cache.tree.unlock(node)
    assert cache.tree.evict(64) == 4
    assert cache.tree.namespaces == []


def test_the_policies_are_those_of_the_flag() -> None:
    assert set(RANKS) == set(get_args(Policy))
    for policy in RANKS:
        assert Config(radix_eviction_policy=policy).radix_eviction_policy == policy
