"""Where a lookup ended, as shown to a person: the edges on its way, and what is cached instead."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.srt.cache import snapshot
from sapwood.srt.cache.explain import Trace
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import pack


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(SlotPool(4096))


def insert(tree: RadixTree, *ids: int, namespace: str = "") -> None:
    match = tree.match(namespace, pack(ids), len(ids))
    slots = np.concatenate((match.slots, tree._pool.allocate(len(ids) - match.length)))
    tree.insert(namespace, pack(ids), slots)


def look(tree: RadixTree, *ids: int, namespace: str = "") -> Trace:
    return tree.trace(namespace, pack(ids), len(ids) - 1)


def test_a_trace_says_what_peek_says_and_changes_nothing(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3, 4)
    insert(tree, 1, 2, 5)
    before = tree.snapshot(depth=9)
    for ids in ([1, 2, 3, 9, 9], [1, 2, 9], [7, 7], [1, 2, 3, 4], [1]):
        trace = look(tree, *ids)
        assert trace.matched == tree.peek("", pack(ids), len(ids) - 1)[0]
        trace.segments(9)
        trace.branches(9, 9)
    assert tree.snapshot(depth=9) == before


def test_segments_are_the_edges_of_the_path_in_its_order(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3, 4, 5, 6)
    insert(tree, 1, 2, 9)
    locked = tree.match("", pack([1, 2]), 2).node
    tree.lock(locked)
    tree.note_hit(locked)
    segments = look(tree, 1, 2, 3, 4, 8, 8).segments(9)
    assert [(s.start, s.tokens) for s in segments] == [(0, 2), (2, 2)]
    assert [(s.hits, s.locks) for s in segments] == [(1, 1), (0, 0)]
    assert segments[0].last_use >= segments[1].last_use
    assert look(tree, 1, 2, 3, 4, 8, 8).segments(1) == segments[1:]
    assert look(tree, 7, 8).segments(9) == []


def test_inside_an_edge_its_rest_is_what_is_cached_instead(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3, 4, 5, 6)
    insert(tree, 1, 2, 3, 4, 5, 6, 7, 8)
    trace = look(tree, 1, 2, 9, 9)
    assert trace.goes_on
    assert trace.branches(5, 20) == [[3, 4, 5, 6, 7, 8]]
    assert trace.branches(5, 2) == [[3, 4]]


def test_at_a_fork_the_most_recent_ways_come_first_and_go_on_the_most_recent_way(tree: RadixTree) -> None:
    for ids in ([1, 2, 3, 3], [1, 2, 4, 4], [1, 2, 5, 5, 6], [1, 2, 5, 5, 7]):
        insert(tree, *ids)
    tree.match("", pack([1, 2, 4, 4]), 4)
    trace = look(tree, 1, 2, 9, 9)
    assert trace.branches(5, 20) == [[4, 4], [5, 5, 7], [3, 3]]
    assert trace.branches(2, 1) == [[4], [5]]


def test_where_the_cache_ends_nothing_goes_on(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3)
    trace = look(tree, 1, 2, 3, 4, 5)
    assert (trace.matched, trace.goes_on) == (3, False)
    assert trace.branches(5, 20) == []
    assert not look(tree, 1, 2, namespace="salt:x").goes_on


def test_all_ways_on_of_one_answer_are_looked_for_in_one_budget(
    tree: RadixTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (3, 4, 5):
        for second in range(6, 10):
            insert(tree, 1, 2, first, second, 11)
    ways = look(tree, 1, 2, 9, 9).branches(5, 20)
    assert ways == [[5, 9, 11], [4, 9, 11], [3, 9, 11]]
    monkeypatch.setattr(snapshot, "MAX_LOOKED_AT", 3 + 4)
    assert look(tree, 1, 2, 9, 9).branches(5, 20) == [[5, 9, 11], [4], [3]]


def test_hits_count_requests_along_the_path_and_survive_a_split(tree: RadixTree) -> None:
    insert(tree, 1, 2, 3, 4)
    for _ in range(2):
        tree.note_hit(tree.match("", pack([1, 2, 3, 4]), 4).node)
    tree.note_hit(tree.match("", pack([1, 2, 9]), 2).node)
    (root,) = tree.snapshot(depth=9)["namespaces"]
    (upper,) = root["children"]
    (lower,) = upper["children"]
    assert ((upper["tokens"], upper["hits"]), (lower["tokens"], lower["hits"])) == ((2, 3), (2, 2))
