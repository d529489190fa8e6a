"""One edge of the radix tree with the node at its end."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sapwood.srt.cache.slots import SlotArray

unpack_token = struct.Struct("<i").unpack_from
LOWEST = -(2**31)
"""No priority is below it."""
_NO_SLOTS: SlotArray = np.empty(0, np.int32)


def token_at(ids: bytes, offset: int) -> int:
    """The token at byte `offset`."""
    token: int = unpack_token(ids, offset)[0]
    return token


class Node:
    """The tokens of one edge and the KV slots that hold them, below `parent`.

    A root has an empty key, and no parent unless it is a door; whatever was taken out of the tree has no
    parent either. `depth` is in tokens, from the start to the node's end. `lock_count` counts the rows that
    use the node or one below it, `pins` the pins on it or below. `listed` nodes end a shared prefix (see
    roots.py).

    Eviction goes by these, none of which is ever less than a child's, or becomes less: `last_use` is a tick
    of the tree's clock; `hits` counts the requests whose cached prefix went through all of the node;
    `priority` is the highest of those that used it. `queued` belongs to the order of eviction, `spots` to the
    tree's follower.
    """

    __slots__ = (
        "children",
        "crc",
        "depth",
        "hits",
        "key",
        "last_use",
        "listed",
        "lock_count",
        "namespace",
        "parent",
        "pins",
        "priority",
        "queued",
        "slots",
        "spots",
    )

    def __init__(self, namespace: str, parent: Node | None, key: bytes, slots: SlotArray) -> None:
        self.namespace = namespace
        self.parent = parent
        self.key = key
        self.slots = slots
        self.children: dict[int, Node] = {}
        self.depth: int = len(slots) + (parent.depth if parent else 0)
        self.lock_count = 0
        self.pins = 0
        self.last_use = 0
        self.hits = 0
        self.priority = LOWEST
        self.listed = False
        self.queued = False
        self.crc: int | None = None
        self.spots: dict[Any, Any] | None = None

    @property
    def evictable(self) -> bool:
        """An unlocked leaf of the tree."""
        return self.lock_count == 0 and not self.children and self.parent is not None

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path_slots(self) -> SlotArray:
        """The slots from the start to this node's end, `[depth]`, in an array of their own."""
        parts = []
        node = self
        while node.parent is not None:
            parts.append(node.slots)
            node = node.parent
        parts.reverse()
        return np.concatenate(parts) if parts else _NO_SLOTS.copy()

    def path_crc(self) -> int:
        """CRC-32 of all ids from the start to this node's end, wherever the edges are split."""
        if self.crc is not None:
            return self.crc
        missing = [self]
        while (above := missing[-1].parent) is not None and above.crc is None:
            missing.append(above)
        crc = above.crc if above is not None and above.crc is not None else 0
        for node in reversed(missing):
            crc = node.crc = zlib.crc32(node.key, crc)
        return crc


class Root(Node):
    """The empty start of a namespace's paths: its own root, or a door, where they go on below `end`, the end
    of a listed prefix, as if that were their own.

    The namespace's own root knows its `doors` by their ends; `total_nodes` and `total_tokens` are what hangs
    below it and them.
    """

    __slots__ = ("doors", "total_nodes", "total_tokens")

    def __init__(self, namespace: str, end: Node | None = None) -> None:
        super().__init__(namespace, end, b"", _NO_SLOTS)
        self.doors: dict[Node, Root] = {}
        self.total_nodes = 0
        self.total_tokens = 0

    def starts(self) -> list[Root]:
        """This root and its doors."""
        return [self, *self.doors.values()]
