"""Pins keep paths for a time, as long as anything else can go, and never more than their share."""

from __future__ import annotations

import pytest

from sapwood.srt.cache.node import Node
from sapwood.srt.cache.pins import MAX_PINNED_SHARE, Pins
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import pack

POOL = 64
SHARE = int(POOL * MAX_PINNED_SHARE)


class Cache:
    def __init__(self) -> None:
        self.pool = SlotPool(POOL)
        self.tree = RadixTree(self.pool)

    def add(self, *ids: int, namespace: str = "") -> Node:
        slots = self.pool.allocate(len(ids))
        existing, node = self.tree.insert(namespace, pack(ids), slots)
        self.pool.free(slots[:existing])
        self.tree.check()
        return node

    def left(self, *ids: int, namespace: str = "") -> int:
        return self.tree.peek(namespace, pack(ids), len(ids))[0]

    def evict(self, tokens: int) -> None:
        assert self.tree.evict(tokens) == tokens
        self.tree.check()


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_what_is_pinned_goes_after_everything_else(cache: Cache) -> None:
    node = cache.add(1, 1, 1)
    assert cache.tree.pin(node, 10.0)
    cache.add(2, 2)
    cache.add(3, 3)
    assert (cache.tree.pinned_tokens, cache.tree.evictable_tokens) == (3, 7)
    cache.evict(4)
    assert (cache.left(1, 1, 1), cache.left(2, 2), cache.left(3, 3)) == (3, 0, 0)
    cache.evict(1)
    assert cache.left(1, 1, 1) == 2, "nothing else was left"
    assert cache.tree.pinned_tokens == 0, "without its end the pin is broken"


def test_the_pin_whose_time_is_over_first_is_broken_first(cache: Cache) -> None:
    for first, until in ((1, 30.0), (2, 10.0), (3, 20.0)):
        assert cache.tree.pin(cache.add(first, 0), until)
    cache.evict(1)
    assert [cache.left(first, 0) for first in (1, 2, 3)] == [2, 1, 2]
    cache.evict(1)  # the rest of a broken one comes before those that are whole
    assert [cache.left(first, 0) for first in (1, 2, 3)] == [2, 0, 2]
    cache.evict(2)
    assert [cache.left(first, 0) for first in (1, 2, 3)] == [2, 0, 0]


def test_a_pin_ends_with_its_time_and_its_path_is_like_any_other(cache: Cache) -> None:
    node = cache.add(1, 1)
    cache.tree.pin(node, 10.0)
    cache.add(2, 2)
    cache.evict(1)  # it has been set aside by now
    cache.tree.expire(9.9)
    assert cache.tree.pinned_tokens == 2
    cache.tree.expire(10.0)
    assert cache.tree.pinned_tokens == 0
    cache.evict(2)
    assert (cache.left(1, 1), cache.left(2, 2)) == (0, 1)


def test_a_second_pin_prolongs_the_first_and_an_earlier_one_does_not_shorten_it(cache: Cache) -> None:
    node = cache.add(1, 1)
    assert cache.tree.pin(node, 10.0)
    assert cache.tree.pin(node, 20.0)
    assert cache.tree.pin(node, 5.0)
    assert cache.tree.pinned_tokens == 2
    cache.tree.expire(19.0)
    assert cache.tree.pinned_tokens == 2
    cache.tree.expire(20.0)
    assert cache.tree.pinned_tokens == 0
    cache.tree.check()


@pytest.mark.parametrize("passed", [5.0, 15.0])
def test_one_that_was_prolonged_after_it_was_set_aside_is_broken_by_its_new_time(
    cache: Cache, passed: float
) -> None:
    first, second = cache.add(1, 1), cache.add(2, 2)
    cache.tree.pin(first, 10.0)
    cache.tree.pin(second, 20.0)
    cache.add(3)
    cache.tree.evict(1)
    cache.tree.pin(first, 30.0)
    cache.tree.expire(passed)
    cache.tree.check()
    cache.evict(2)
    assert (cache.left(1, 1), cache.left(2, 2)) == (2, 0)


def test_no_more_than_a_share_of_the_pool_is_pinned(cache: Cache) -> None:
    whole = cache.add(*[1] * SHARE)
    assert cache.tree.pin(whole, 10.0)
    other = cache.add(2)
    assert not cache.tree.pin(other, 10.0)
    assert cache.tree.pinned_tokens == SHARE
    assert cache.tree.pin(whole, 20.0), "that costs nothing"
    cache.tree.expire(20.0)
    assert cache.tree.pin(other, 30.0)
    cache.tree.check()


def test_a_token_that_several_pins_protect_counts_once(cache: Cache) -> None:
    half = [1] * (SHARE - 2)
    assert cache.tree.pin(cache.add(*half, 5), 10.0)
    assert cache.tree.pin(cache.add(*half, 6), 20.0)
    assert cache.tree.pinned_tokens == SHARE
    assert not cache.tree.pin(cache.add(*half, 7), 20.0)
    cache.tree.expire(10.0)
    assert cache.tree.pinned_tokens == SHARE - 1
    cache.tree.check()


def test_a_pin_protects_its_path_but_not_what_is_below(cache: Cache) -> None:
    node = cache.add(1, 2)
    cache.tree.pin(node, 10.0)
    cache.add(1, 2, 3, 4)
    cache.add(5, 6)
    cache.evict(4)
    assert (cache.left(1, 2, 3, 4), cache.left(5, 6)) == (2, 0)
    assert cache.tree.pinned_tokens == 2


def test_a_pin_survives_splits_above_and_of_its_own_edge(cache: Cache) -> None:
    node = cache.add(1, 2, 3, 4, 5, 6)
    cache.tree.pin(node, 10.0)
    cache.add(1, 2, 9)  # splits the pinned edge
    cache.add(1, 8)  # and the one above
    assert cache.tree.pinned_tokens == 6
    cache.evict(2)
    assert cache.left(1, 2, 3, 4, 5, 6) == 6
    cache.tree.expire(10.0)
    assert (cache.tree.pinned_tokens, cache.tree.evictable_tokens) == (0, 6)
    cache.tree.check()


def test_a_pinned_path_in_use_is_not_evicted_and_its_pin_ends_all_the_same(cache: Cache) -> None:
    node = cache.add(1, 1)
    cache.tree.pin(node, 10.0)
    cache.tree.lock(node)
    assert cache.tree.evict(9) == 0
    cache.tree.unlock(node)
    cache.add(2, 2)
    cache.evict(2)
    assert cache.left(1, 1) == 2
    cache.tree.lock(node)
    cache.tree.expire(10.0)
    cache.tree.unlock(node)
    cache.evict(2)


def test_a_flush_drops_pins_in_one_namespace_or_in_all(cache: Cache) -> None:
    for name in ("a", "b"):
        node = cache.add(1, 1, namespace=name)
        cache.tree.pin(node, 10.0)
        cache.tree.lock(node)
    assert cache.tree.flush("a") == 0
    assert cache.tree.pinned_tokens == 2
    cache.tree.check()
    cache.tree.flush()
    assert cache.tree.pinned_tokens == 0
    cache.tree.check()


def test_a_pin_is_of_one_namespace(cache: Cache) -> None:
    cache.tree.pin(cache.add(1, 1, namespace="a"), 10.0)
    cache.add(1, 1, namespace="b")
    cache.evict(2)
    assert (cache.left(1, 1, namespace="a"), cache.left(1, 1, namespace="b")) == (2, 0)


def test_nothing_to_pin_is_pinned_for_nothing(cache: Cache) -> None:
    assert cache.tree.pin(cache.tree.match("", pack([1, 2]), 1).node, 10.0)
    cache.tree.expire(10.0)
    assert cache.tree.pinned_tokens == 0


def test_what_is_no_longer_in_the_tree_cannot_be_pinned(cache: Cache) -> None:
    node = cache.add(1, 1)
    cache.evict(2)
    with pytest.raises(AssertionError, match="no longer in the tree"):
        cache.tree.pin(node, 10.0)


def test_a_broken_pin_can_be_made_again(cache: Cache) -> None:
    node = cache.add(1, 1, 1)
    cache.tree.pin(node, 10.0)
    cache.evict(1)
    assert cache.tree.pin(node, 20.0)
    cache.tree.expire(10.0)
    assert cache.tree.pinned_tokens == 2
    cache.tree.expire(20.0)
    assert cache.tree.pinned_tokens == 0
    cache.tree.check()


def test_prolonging_for_ever_piles_nothing_up() -> None:
    cache = Cache()
    nodes = [cache.add(i, 1) for i in range(4)]
    pins = Pins(SHARE)
    for i in range(10_000):
        assert pins.add(nodes[i % 4], float(i))
        assert len(pins._ends) <= 2 * 4 + 65
    assert len(pins) == 4
    assert sorted(map(id, pins.expire(1e9))) == sorted(map(id, nodes))
    assert pins.tokens == 0


class Time(float):
    """Counts how often one is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Time.compared += 1
        return float(self) == other

    def __gt__(self, other: float) -> bool:
        Time.compared += 1
        return float(self) > other

    def __lt__(self, other: float) -> bool:
        Time.compared += 1
        return float(self) < other

    __hash__ = float.__hash__


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_many_who_hold_a_pin_do_not_make_it_dear(later: float) -> None:
    """All for the same time, or each for longer than the one before, who lets go first."""
    cache = Cache()
    node = cache.add(1, 1)
    for holder in range(1, 1001):
        assert cache.tree.pin(node, Time(10.0 + later * holder), holder)
    assert Time.compared < 10 * 1000
    Time.compared = 0
    for holder in range(1, 1001):
        cache.tree.unpin(node, holder)
    assert Time.compared < 10 * 1000
    assert cache.tree.pinned_tokens == 0


def test_a_pin_lasts_as_long_as_the_longest_of_those_who_hold_it_wants() -> None:
    cache = Cache()
    node = cache.add(1, 1)
    for holder, until in ((1, 10.0), (2, 30.0), (3, 30.0), (4, 20.0)):
        assert cache.tree.pin(node, until, holder)
    cache.tree.unpin(node, 2)
    cache.tree.expire(29.0)
    assert cache.tree.pinned_tokens == 2
    assert cache.tree.pin(node, 40.0, 4)
    cache.tree.unpin(node, 3)
    cache.tree.expire(39.0)
    assert cache.tree.pinned_tokens == 2
    cache.tree.pin(node, 25.0, 4)
    cache.tree.expire(39.0)
    assert cache.tree.pinned_tokens == 0
    cache.tree.check()


def test_what_would_fit_without_others_is_found_without_a_change() -> None:
    """Tokens that others share, or that the path itself has, give no room."""
    cache = Cache()
    shared = [1] * 6
    first, second, third = (cache.add(*shared, i, i) for i in (5, 6, 7))
    own = cache.add(*shared, 5, 5, *[9] * 7)
    other = cache.add(*[2] * 12)
    for holder, node in enumerate((first, second, third), 1):
        assert cache.tree.pin(node, 10.0, holder)
    assert cache.tree.pin(first, 10.0, 9)
    pins = cache.tree.pins
    assert pins.tokens == 12
    everyone = [(first, 1), (second, 2), (third, 3), (first, 9)]
    assert not pins.fits_without(other, everyone[:3]), "the first is held by two"
    assert pins.fits_without(other, everyone)
    assert not pins.fits_without(own, everyone[:1])
    asked = iter(everyone)
    assert pins.fits_without(own, asked)
    assert list(asked) == [(first, 9)], "no more than needed is asked for"
    assert pins.tokens == 12
    cache.tree.check()


def test_who_has_not_let_go_is_told_when_a_pin_ends(cache: Cache) -> None:
    told: list[tuple[Node, set[int]]] = []
    cache.tree.pins.on_break = lambda node, holders: told.append((node, set(holders)))
    nodes = [cache.add(i, i) for i in (1, 2, 3, 4)]
    for node in nodes[:3]:
        cache.tree.pin(node, 10.0 + node.key[0], 1)
        cache.tree.pin(node, 10.0, 2)
    cache.tree.unpin(nodes[0], 1)
    cache.tree.unpin(nodes[0], 2)
    assert told == []
    cache.evict(5)
    assert told == [(nodes[1], {1, 2})]
    cache.tree.expire(100.0)
    assert told[1:] == [(nodes[2], {1, 2})]
    cache.tree.pin(nodes[2], 200.0, 3)
    cache.tree.flush()
    assert told[2:] == [(nodes[2], {3})]
