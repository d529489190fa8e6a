"""A picture of the tree for a person: plain values, and never more work than a step can wait for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from sapwood.srt.cache.node import Node, Root

MAX_LOOKED_AT = 20_000
"""Nodes that one picture, or one answer, may look at: some milliseconds."""

T = TypeVar("T", bound=Node)


def snapshot(
    roots: Mapping[str, Root],
    depth: int,
    limit: int,
    ids: int,
    namespaces: Collection[str] | None,
    max_nodes: int,
) -> dict[str, Any]:
    """`namespaces` (None: those that hold most, at most `limit`), each with its totals and `depth` levels of
    nodes, breadth first: of each node the `limit` most recently used children and the first `ids` ids. The
    first nodes that a namespace has below listed prefixes are among its first level.

    At most `max_nodes` nodes are shown; `truncated` says that there was more within depth and limit, or that
    a node had more children than could be looked at (then the newest were).
    """
    looking = Looking()
    roots = {name: root for name, root in roots.items() if root.total_nodes}
    shown = _shown_roots(roots, namespaces, limit, looking)
    pictures = []
    todo: deque[tuple[Node, dict[str, Any], int]] = deque()
    for root in shown:
        picture: dict[str, Any] = {
            "namespace": root.namespace,
            "nodes": root.total_nodes,
            "tokens": root.total_tokens,
            "num_children": sum(len(start.children) for start in root.starts()),
            "children": [],
        }
        pictures.append(picture)
        todo.append((root, picture, depth))
    left = max_nodes
    while todo:
        node, picture, levels = todo.popleft()
        if levels == 0 or not picture["num_children"]:
            continue
        if left == 0 or looking.left == 0:
            looking.truncated = True
            break
        children = _children(node, limit, looking)
        looking.truncated |= len(children) > left
        for child in children[:left]:
            picture["children"].append(_picture(child, ids))
            todo.append((child, picture["children"][-1], levels - 1))
        left -= min(left, len(children))
    return {"num_namespaces": len(roots), "namespaces": pictures, "truncated": looking.truncated}


def _shown_roots(
    roots: Mapping[str, Root], namespaces: Collection[str] | None, limit: int, looking: Looking
) -> list[Root]:
    if namespaces is not None:
        return [roots[name] for name in namespaces if name in roots]
    return heapq.nlargest(limit, looking.newest(roots.values()), key=lambda root: root.total_tokens)


def _children(node: Node, limit: int, looking: Looking) -> list[Node]:
    """The `limit` most recently used children; of a root, its doors' are among them."""
    if not isinstance(node, Root):
        return looking.most_recent(node.children.values(), limit)
    found = [child for root in node.starts() for child in looking.most_recent(root.children.values(), limit)]
    return heapq.nlargest(limit, found, key=lambda child: child.last_use)


def _picture(node: Node, ids: int) -> dict[str, Any]:
    return {
        "ids": first_ids(node.key, 0, ids),
        "tokens": len(node.slots),
        "depth": node.depth,
        "hits": node.hits,
        "locks": node.lock_count,
        "last_use": node.last_use,
        "num_children": len(node.children),
        "children": [],
    }


def first_ids(key: bytes, start: int, count: int) -> list[int]:
    """At most `count` token ids of a key, from token `start` on."""
    ids: list[int] = np.frombuffer(key, "<i4")[start : start + count].tolist()
    return ids


class Looking:
    """The budget of one picture or answer. Dictionaries keep their order: the last entries are the newest."""

    def __init__(self) -> None:
        self.left = MAX_LOOKED_AT
        self.truncated = False

    def newest(self, nodes: Collection[T]) -> Iterable[T]:
        count = min(len(nodes), self.left)
        self.truncated |= count < len(nodes)
        self.left -= count
        return islice(reversed(nodes), count)  # type: ignore[call-overload]

    def most_recent(self, nodes: Collection[T], limit: int) -> list[T]:
        """The `limit` most recently used of the nodes, or of the newest if they are too many to look at."""
        return heapq.nlargest(limit, self.newest(nodes), key=lambda node: node.last_use)
