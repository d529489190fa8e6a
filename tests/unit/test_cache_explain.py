"""Each lookup says why it stopped, and says it right."""

from __future__ import annotations

from typing import get_type_hints

from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import Stopped, Verdict, pack


class Cache:
    """A tree that is fed whole prompts."""

    def __init__(self, ghost_size: int = 4096) -> None:
        self.pool = SlotPool(256)
        self.tree = RadixTree(self.pool, ghost_size=ghost_size)

    def insert(self, *ids: int, namespace: str = "") -> None:
        slots = self.pool.allocate(len(ids))
        existing, _ = self.tree.insert(namespace, pack(ids), slots)
        self.pool.free(slots[:existing])

    def look_up(self, *ids: int, namespace: str = "", unsalted: str | None = "") -> tuple[int, str]:
        """As for a request: never the last token."""
        peeked = self.tree.peek(namespace, pack(ids), len(ids) - 1, unsalted)
        assert self.tree.match(namespace, pack(ids), len(ids) - 1).length == peeked[0]
        again = self.tree.peek(namespace, pack(ids), len(ids) - 1, unsalted)
        assert again == peeked, "a split changes no reason"
        return peeked


def test_cold_when_nothing_of_it_was_seen() -> None:
    cache = Cache()
    assert cache.look_up(1, 2, 3) == (0, "cold")
    cache.insert(4, 5)
    assert cache.look_up(1, 2, 3) == (0, "cold")


def test_diverged_inside_an_edge_at_a_fork_and_at_a_paths_end() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    assert cache.look_up(1, 2, 9, 9) == (2, "diverged")
    assert cache.look_up(1, 2, 8, 8) == (2, "diverged")
    assert cache.look_up(1, 2, 3, 4, 5, 6) == (4, "diverged")


def test_last_token_when_all_the_rest_is_cached() -> None:
    cache = Cache()
    cache.insert(1, 2, 3)
    assert cache.look_up(1, 2, 3) == (2, "last_token")
    assert cache.look_up(1, 2, 3, 4) == (3, "last_token")
    assert cache.look_up(7) == (0, "last_token")


def test_evicted_when_a_leaf_is_gone() -> None:
    cache = Cache()
    cache.insert(1, 2, 3)
    cache.tree.evict(3)
    assert cache.look_up(1, 2, 3) == (0, "evicted")
    assert cache.look_up(2, 2, 3) == (0, "cold")


def test_evicted_when_a_tail_was_trimmed() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5)
    cache.tree.evict(2)
    assert cache.look_up(1, 2, 3, 4, 5) == (3, "evicted")
    assert cache.look_up(1, 2, 3, 9, 9) == (3, "diverged")
    cache.tree.evict(1)
    assert cache.look_up(1, 2, 3, 4, 5) == (2, "evicted")


def test_evicted_is_known_however_the_path_before_is_split() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, 3, 7)
    cache.tree.match("", pack([1, 2, 3, 7]), 4)
    cache.tree.evict(1)  # the 4
    cache.look_up(1, 9, 9)  # splits before it
    cache.insert(1, 2, 3, 7, 8)
    assert cache.look_up(1, 2, 3, 4, 5) == (3, "evicted")
    cache.tree.evict(256)
    cache.insert(1, 2, 3, 7)  # one edge: the lookup ends inside
    assert cache.look_up(1, 2, 3, 4, 5) == (3, "evicted")


def test_inserted_again_is_no_longer_evicted() -> None:
    cache = Cache()
    cache.insert(1, 2, 3)
    cache.tree.evict(3)
    cache.insert(1, 5)
    assert cache.look_up(1, 2, 3) == (1, "diverged")


def test_only_the_last_evictions_are_known() -> None:
    cache = Cache(ghost_size=2)
    for first in (1, 2, 3):
        cache.insert(first, 0, 0)
    cache.tree.evict(9)
    assert [cache.look_up(first, 0, 0)[1] for first in (1, 2, 3)] == ["cold", "evicted", "evicted"]


def test_no_ghosts_are_kept_at_size_zero() -> None:
    cache = Cache(ghost_size=0)
    cache.insert(1, 2)
    cache.tree.evict(2)
    assert cache.look_up(1, 2) == (0, "cold")


def test_namespace_when_the_one_without_the_salt_knows_more() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, namespace="salt")
    assert cache.look_up(1, 2, 3, 4, namespace="salt") == (2, "namespace")
    assert cache.look_up(1, 2, 9, 9, namespace="salt") == (2, "diverged")
    assert cache.look_up(1, 2, 3, namespace="pepper") == (0, "namespace")


def test_of_the_namespaces_of_others_nothing_is_told() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, 3, namespace="key a")
    for namespace, unsalted in (("key b", "key b"), ("key b, salted", "key b"), ("key b", None)):
        assert cache.look_up(1, 2, 3, 4, namespace=namespace, unsalted=unsalted) == (0, "cold")
    cache.insert(1, 2, namespace="key b")
    assert cache.look_up(1, 2, 3, 4, namespace="key b, salted", unsalted="key b") == (0, "namespace")


def test_the_shared_namespace_is_told_nothing_of_the_others() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, namespace="salt")
    assert cache.look_up(1, 2, 3) == (0, "cold")
    assert cache.look_up(1, 2, 3, namespace="pepper") == (0, "cold")
    cache.tree.evict(3)
    assert cache.look_up(1, 2, 3) == (0, "cold")
    assert cache.look_up(1, 2, 3, namespace="salt") == (0, "evicted")


def test_a_flush_forgets_what_was_evicted_there() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.insert(1, 2, namespace="salt")
    cache.tree.evict(4)
    cache.tree.flush("salt")
    assert cache.look_up(1, 2, namespace="salt") == (0, "cold")
    assert cache.look_up(1, 2) == (0, "evicted")
    cache.tree.flush()
    assert cache.look_up(1, 2) == (0, "cold")


def test_reasons_are_those_that_messages_carry() -> None:
    assert get_type_hints(Verdict)["stopped"] == Stopped
