"""A picture of the tree is what was asked for, and bounded in work however large the tree is."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sapwood.srt.cache import snapshot
from sapwood.srt.cache.radix import RadixTree
from sapwood.srt.cache.slots import SlotPool
from sapwood.srt.messages import pack


def filled(paths: list[list[int]], namespace: str = "", tree: RadixTree | None = None) -> RadixTree:
    tree = tree or RadixTree(SlotPool(1 << 18))
    for ids in paths:
        match = tree.match(namespace, pack(ids), len(ids))
        slots = np.concatenate((match.slots, tree._pool.allocate(len(ids) - match.length)))
        tree.insert(namespace, pack(ids), slots)
    return tree


def shown(picture: dict[str, Any]) -> int:
    def count(node: dict[str, Any]) -> int:
        return sum(1 + count(child) for child in node["children"])

    return sum(count(root) for root in picture["namespaces"])


def test_totals_count_all_of_a_namespace_whatever_is_shown() -> None:
    tree = filled([[1, 2, 3], [1, 2, 4], [5]])
    filled([[1, 2, 3, 4]], "salt:x", tree)
    picture = tree.snapshot(depth=0)
    assert picture["num_namespaces"] == 2
    assert [(n["namespace"], n["nodes"], n["tokens"]) for n in picture["namespaces"]] == [
        ("", 4, 5),
        ("salt:x", 1, 4),
    ]
    assert shown(picture) == 0
    assert not picture["truncated"]


def test_totals_follow_eviction_and_flush() -> None:
    tree = filled([[1, 2, 3], [1, 2, 4]])
    filled([[7, 8]], "salt:x", tree)
    tree.evict(1)
    tree.check()
    (first, _) = tree.snapshot()["namespaces"]
    assert (first["nodes"], first["tokens"]) == (2, 3)
    tree.evict(100)
    assert tree.snapshot()["namespaces"] == []
    filled([[7, 8], [7, 9]], "salt:x", tree)
    tree.lock(tree.match("salt:x", pack([7, 8]), 2).node)
    tree.flush()
    tree.check()
    (left,) = tree.snapshot()["namespaces"]
    assert (left["nodes"], left["tokens"]) == (2, 2)


def test_only_the_namespaces_asked_for_are_shown() -> None:
    tree = filled([[1, 2]], "salt:x", filled([[1, 2, 3]]))
    assert [n["namespace"] for n in tree.snapshot(namespaces=["salt:x", "gone"])["namespaces"]] == ["salt:x"]
    assert [n["namespace"] for n in tree.snapshot(limit=1)["namespaces"]] == [""]


@pytest.mark.parametrize("max_nodes", [1, 7, 40])
def test_what_exceeds_the_budget_is_left_out_and_said_to_be(max_nodes: int) -> None:
    tree = filled([[a, b, c] for a in range(4) for b in range(4) for c in range(4)])
    picture = tree.snapshot(depth=9, limit=9, max_nodes=max_nodes)
    assert shown(picture) == max_nodes
    assert picture["truncated"]
    whole = tree.snapshot(depth=9, limit=9)
    assert shown(whole) == tree.num_nodes
    assert not whole["truncated"]


def test_ids_of_zero_show_no_content() -> None:
    (root,) = filled([[1, 2, 3]]).snapshot(ids=0)["namespaces"]
    assert root["children"][0]["ids"] == []
    assert root["children"][0]["tokens"] == 3


def test_a_picture_of_a_large_tree_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 children of one node, of which no more than the limit are looked at."""
    tree = filled([[i, 1] for i in range(50_000)])
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        picture = tree.snapshot(depth=64, limit=1000, max_nodes=1000)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1
    assert picture["truncated"]
    # The newest are looked at, and of them the most recently used shown.
    (root,) = picture["namespaces"]
    assert root["num_children"] == 50_000
    assert root["children"][0]["ids"][0] == 49_999
    monkeypatch.setattr(snapshot, "MAX_LOOKED_AT", 100)
    assert shown(tree.snapshot(depth=1, limit=1000)) == 99, "one was spent on the namespaces"
